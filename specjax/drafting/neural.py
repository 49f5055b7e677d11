"""A drafter that is a language model of its own, token by token.

Axes: B rows, G longest block, V vocabulary.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from specjax.drafting._base import Stopping
from specjax.sampling import Sampling, confidence, distribution, draw, num_uniforms
from specjax.types import Array, Cache, DraftBlock, DraftTraits, LanguageModel, Params


@dataclasses.dataclass(frozen=True)
class FixedLength:
    """Never stops a draft before its longest length; a `Stopping`."""

    @property
    def is_random(self) -> bool:
        """No."""
        return False

    @property
    def is_fixed(self) -> bool:
        """Yes."""
        return True

    def init(self, rows: int) -> Any:
        """No state."""
        return ()

    def step(
        self, params: Params, state: Any, token: Array, probs: Array, hidden: Array, index: Array
    ) -> tuple[Array, Any]:
        """Never."""
        return jnp.zeros(token.shape, bool), state


class NeuralDrafterState(NamedTuple):
    """A neural drafter between rounds.

    Attributes:
      cache: the model's; it holds all committed tokens but the last.
      positions: `[B]` int32, where the last committed token belongs.
    """

    cache: Cache
    positions: Array


@dataclasses.dataclass(frozen=True)
class NeuralDrafter:
    """Draws up to `max_draft` tokens from a small model; a `Drafter`.

    Its parameters are `(model parameters, stopping parameters)`.

    Attributes:
      model: the small language model.
      max_draft: G >= 1.
      stopping: when a draft ends before that.

    Raises:
      ValueError: if `max_draft` is no whole number or below 1.
    """

    model: LanguageModel
    max_draft: int
    stopping: Stopping = FixedLength()

    def __post_init__(self) -> None:
        if not isinstance(self.max_draft, int) or self.max_draft < 1:
            raise ValueError(
                f"max_draft must be a whole number of at least 1, got {self.max_draft!r}: "
                "decode autoregressively to do without a drafter"
            )

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.model.vocab_size

    @property
    def num_uniforms(self) -> int:
        """One draw per token."""
        return self.max_draft * num_uniforms(self.vocab_size)

    @property
    def has_confidence(self) -> bool:
        """A neural model has one."""
        return True

    @property
    def traits(self) -> DraftTraits:
        """One drafter, whose distributions depend on the prefix alone."""
        return DraftTraits(
            random_stops=self.stopping.is_random, fixed_length=self.stopping.is_fixed
        )

    def prefill(
        self,
        params: Params,
        inputs: Array,
        input_lengths: Array,
        max_length: int,
        prefix: Array | None = None,
        prefix_lengths: Array | None = None,
    ) -> NeuralDrafterState:
        """See `Drafter`."""
        filled = self.model.prefill(
            params[0], inputs, input_lengths, max_length, prefix, prefix_lengths
        )
        return NeuralDrafterState(filled.cache, filled.positions)

    def propose(
        self,
        params: Params,
        state: NeuralDrafterState,
        tokens: Array,
        uniforms: Array,
        sampling: Sampling,
        active: Array,
        *,
        with_confidence: bool,
    ) -> tuple[DraftBlock, NeuralDrafterState]:
        """See `Drafter`."""
        rows, longest, vocab = tokens.size, self.max_draft, self.vocab_size
        uniforms = uniforms.reshape(rows, longest, num_uniforms(vocab))
        empty = jnp.zeros((rows, longest + 1, vocab), jnp.float32)
        block = DraftBlock(
            tokens=jnp.zeros((rows, longest), jnp.int32),
            probs=empty,
            confidences=empty if with_confidence else None,
            num_drafted=jnp.zeros((rows,), jnp.int32),
            calls=jnp.int32(0),
        )

        def step(carry):
            block, cache, last, going, policy = carry
            index = block.calls
            q, q_conf, hidden, cache = self._read(
                params, cache, last, state.positions + index, sampling, with_confidence
            )
            uniform = lax.dynamic_index_in_dim(uniforms, index, axis=1, keepdims=False)
            token = jax.vmap(draw)(q, uniform)
            stops, policy = self.stopping.step(params[1], policy, token, q, hidden, index)
            confidences = block.confidences
            if confidences is not None:
                confidences = _put(confidences, q_conf, index)
            block = DraftBlock(
                tokens=_put(block.tokens, token, index),
                probs=_put(block.probs, q, index),
                confidences=confidences,
                num_drafted=block.num_drafted + going.astype(jnp.int32),
                calls=index + 1,
            )
            return block, cache, token, going & ~stops, policy

        def unfinished(carry):
            block, _, _, going, _ = carry
            return (block.calls < longest) & jnp.any(going)

        start = (block, state.cache, tokens, active, self.stopping.init(rows))
        block, cache, *_ = lax.while_loop(unfinished, step, start)
        return block, state._replace(cache=cache)

    def bonus(
        self,
        params: Params,
        state: NeuralDrafterState,
        tokens: Array,
        block: DraftBlock,
        sampling: Sampling,
        *,
        with_confidence: bool,
    ) -> tuple[Array, Array | None, NeuralDrafterState]:
        """See `Drafter`."""
        drafted = jnp.concatenate([tokens[:, None], block.tokens], axis=1)
        last = jnp.take_along_axis(drafted, block.num_drafted[:, None], axis=1)[:, 0]
        q, q_conf, _, cache = self._read(
            params,
            state.cache,
            last,
            state.positions + block.num_drafted,
            sampling,
            with_confidence,
        )
        return q, q_conf, state._replace(cache=cache)

    def commit(self, state: NeuralDrafterState, num_committed: Array) -> NeuralDrafterState:
        """See `Drafter`."""
        return state._replace(positions=state.positions + num_committed)

    def _read(self, params, cache, tokens, positions, sampling, with_confidence):
        logits, hidden, cache = self.model.extend(params[0], cache, tokens[:, None], positions)
        q = jax.vmap(distribution)(logits[:, 0], sampling)
        q_conf = jax.vmap(confidence)(logits[:, 0]) if with_confidence else None
        return q, q_conf, hidden[:, 0], cache


def _put(buffer: Array, value: Array, index: Array) -> Array:
    """Writes `value [B, ...]` at `index` of axis 1."""
    return lax.dynamic_update_index_in_dim(buffer, value, index, axis=1)
