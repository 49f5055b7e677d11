"""Drafters of draft heads, which read the verifier's states: chains, trees and blocks.

A distribution depends on where its round began: drafted tokens are read with the head's own
states, or not at all. So `GreedyBlock`, whose later rounds need an earlier round's, is
refused, and under a rule that reads the drafter the target depends on where rounds began.

Axes: B rows, T committed tokens, D width of the verifier's states.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from specjax.decoding import history as history_lib
from specjax.drafting.chain import (
    Chain,
    ChainParams,
    ChainState,
    ModelDrafter,
    catches_up_on,
)
from specjax.drafting.stopping import Estimate
from specjax.drafting.trees import Tree
from specjax.errors import UserError
from specjax.models.heads import Fresh
from specjax.processing import distributions
from specjax.sampling.distributions import confidence
from specjax.types import (
    Bonus,
    DraftBlock,
    DraftInputs,
    DraftTraits,
    Drawn,
    Params,
    Prompts,
)


class _ReadsVerifier(ModelDrafter):
    """What drafters of a head share, whether they draft chains or trees.

    Committed tokens wait with the states before them; the next draft of any row begins with their
    entries. So no row lags.
    """

    _lags: ClassVar[bool] = False

    @property
    def traits(self) -> DraftTraits:
        return super().traits._replace(
            prefix_only=False,
            catches_up=True,
            reads_verifier_hidden=True,
            boundaries=self.model.config.boundaries,
        )

    def prefill(
        self, params: Params, prompts: Prompts, max_length: int, verifier: Any = None
    ) -> ChainState:
        sizes = max_length, self.path, self.max_draft
        cache = self.model.begin(params.model, verifier, *sizes)
        history = history_lib.begin(verifier, max_length, self.max_draft)
        return ChainState(cache, verifier.positions, history, self._past(params, prompts))

    def commit(
        self, state: ChainState, tokens: Array, counts: Array, hidden: Array | None = None
    ) -> ChainState:
        after = super().commit(state, tokens, counts)
        assert hidden is not None
        # Entries of the present draft may be of the head's own states.
        read = jnp.where(counts > 0, state.positions, state.history.read)
        most = self.path + 1
        fresh = Fresh(tokens[:, :most], hidden[:, :most], counts)
        return after._replace(
            cache=state.cache._replace(fresh=fresh, outputs=None),
            history=after.history._replace(read=read),
        )

    def _catch_up(self, params: Params, state: ChainState, inputs: DraftInputs) -> ChainState:
        cache = self.model.catch_up(params.model, state.cache, state.positions)
        return state._replace(cache=cache, history=state.history._replace(read=state.positions))


@dataclasses.dataclass(frozen=True)
class EagleDrafter(_ReadsVerifier, Chain):
    """Draws up to `max_draft` tokens from a recurrent head; see `specjax.models.heads`.

    Attributes:
      longest: of the drafts in its rounds, where another drafter drafts, too; 0: its own.
    """

    longest: int = 0

    @property
    def path(self) -> int:
        return max(self.max_draft, self.longest)

    def describe(self) -> Any:
        return {**super().describe(), "greedy": self.greedy}

    def propose(
        self,
        params: ChainParams,
        state: ChainState,
        inputs: DraftInputs,
    ) -> tuple[DraftBlock, ChainState]:
        state = self._reading(self._catch_up(params, state, inputs), inputs.memory)
        block, state = super().propose(params, state, self._chosen(inputs))
        return block, self._reading(state, None)

    def bonus(
        self,
        params: ChainParams,
        state: ChainState,
        inputs: DraftInputs,
        block: DraftBlock,
    ) -> tuple[Bonus, ChainState]:
        state = self._reading(state, inputs.memory)
        extra, state = super().bonus(params, state, self._chosen(inputs), block)
        return extra, self._reading(state, None)

    # A round's caches of the verifier differ, and no state keeps one of them.
    def _reading(self, state: ChainState, memory: Any) -> ChainState:
        return state._replace(cache=self.model.with_memory(state.cache, memory))

    def _chosen(self, inputs: DraftInputs) -> DraftInputs:
        if not self.greedy:
            return inputs
        sampling = inputs.sampling
        cold = jnp.zeros_like(sampling.temperature)
        return inputs._replace(sampling=dataclasses.replace(sampling, temperature=cold))


@dataclasses.dataclass(frozen=True)
class BlockDrafter(EagleDrafter):
    """Draws up to `max_draft` tokens from a block head, which makes one pass for all of them.

    The tokens of a DFlash are independent given the text before the block; those of the others
    follow each other by their corrections. A rule that reads the drafter after a whole draft needs
    a `max_draft` below the most that the head drafts.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        config, most = self.model.config, self.model.most_drafts
        if self.max_draft > most:
            raise UserError(
                f"max_draft must be at most {most} for this {config.kind}, whose block has "
                f"{config.block_size} tokens, got {self.max_draft}"
            )

    @property
    def traits(self) -> DraftTraits:
        return super().traits._replace(draws_bonus=self._slots > self.max_draft)

    @property
    def draft_passes(self) -> int:
        return 1

    @property
    def _slots(self) -> int:
        return min(self.max_draft + 1, self.model.most_drafts)

    def propose(
        self,
        params: ChainParams,
        state: ChainState,
        inputs: DraftInputs,
    ) -> tuple[DraftBlock, ChainState]:
        block, state = super().propose(params, state, inputs)
        passes = jnp.any(inputs.active).astype(jnp.int32)
        return block._replace(calls={self.name: passes}), state

    def bonus(
        self,
        params: ChainParams,
        state: ChainState,
        inputs: DraftInputs,
        block: DraftBlock,
    ) -> tuple[Bonus, ChainState]:
        extra, state = super().bonus(params, state, inputs, block)
        return extra._replace(calls={self.name: jnp.int32(0)}), state

    def _catch_up(self, params: ChainParams, state: ChainState, inputs: DraftInputs) -> ChainState:
        """The state with the block that the head has read."""
        state = super()._catch_up(params, state, inputs)
        given = params.model, state.cache, inputs.tokens, state.positions, self._slots

        def read() -> Any:
            with jax.named_scope("drafter_pass"):
                return self.model.block(*given)

        def nothing() -> Any:
            return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(read))

        outputs = lax.cond(jnp.any(inputs.active), read, nothing)
        return state._replace(cache=state.cache._replace(outputs=outputs))


@dataclasses.dataclass(frozen=True)
class OwnEstimate(Estimate):
    """What a DSpark head says of the chance that its token is accepted, before it is drawn.

    Source: `confidence_head` of `vllm-project/speculators`.
    """

    reads_odds: ClassVar[bool] = True

    def feature(self, params: Params, carry: Any, drawn: Drawn) -> tuple[Array, Any]:
        return drawn.hidden[:, -1].astype(jnp.float32), carry


@dataclasses.dataclass(frozen=True)
class EagleTree(_ReadsVerifier, Tree):
    """Drafts trees from a recurrent head."""

    def propose(
        self,
        params: ChainParams,
        state: ChainState,
        inputs: DraftInputs,
    ) -> tuple[DraftBlock, ChainState]:
        return super().propose(params, self._catch_up(params, state, inputs), inputs)

    def bonus(
        self,
        params: ChainParams,
        state: ChainState,
        inputs: DraftInputs,
        block: DraftBlock,
    ) -> tuple[Bonus, ChainState]:
        path = jnp.concatenate([inputs.tokens[:, None], block.tokens[:, : self.path]], axis=1)
        count = jnp.minimum(block.num_drafted, self.path)

        def step(i: Array, carry: Any) -> Any:
            cache, last = carry
            token = lax.dynamic_slice_in_dim(path, i, 1, axis=1)
            read = self.model.extend(params.model, cache, token, state.positions + i)
            return read.cache, jnp.where((i == count)[:, None], read.logits[:, 0], last)

        empty = jnp.zeros((count.size, self.vocab_size), jnp.float32)
        # Each step reads the state of the step before.
        cache, last = lax.fori_loop(0, self.path + 1, step, (state.cache, empty))
        q = distributions(last, inputs.sampling)
        q_conf = jax.vmap(confidence)(last) if inputs.with_confidence else None
        passes = {self.name: jnp.int32(self.path + 1)}
        return Bonus(q, q_conf, passes), state._replace(cache=cache)


def with_network(drafter: Any, small: Any, verifier: Any) -> tuple[Any, Params]:
    """A `Chain` or `Tree` of the network of `small`, which may be a draft head; its parameters."""
    fields = {field.name: getattr(drafter, field.name) for field in dataclasses.fields(drafter)}
    fields |= {"model": small.model}
    if not small.model.reads_verifier:
        if isinstance(drafter, Chain):
            fields["catches_up"] |= catches_up_on(small.platform)
        return type(drafter)(**fields), small.prepared
    of_blocks = BlockDrafter if small.model.most_drafts else EagleDrafter
    kind = of_blocks if isinstance(drafter, Chain) else EagleTree
    return kind(**fields), small.model.joined(small.prepared, verifier.prepared)
