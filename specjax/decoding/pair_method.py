"""What methods over two models share that decode without a round: each cascade adds its step.

Axes: B rows, V vocabulary.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from specjax.checks import check_part, check_static
from specjax.decoding.checks import check_strengths, check_vocabularies
from specjax.decoding.loop import LoopMethod
from specjax.types import (
    Array,
    Axes,
    Cache,
    DecodeState,
    LanguageModel,
    Params,
    PromptBatch,
    row_axes,
)

VERIFIER, DRAFTER = range(2)  # in `model_names`


class CascadeParams(NamedTuple):
    """What a cascade reads besides its state.

    Attributes:
      verifier: the verifier's parameters.
      drafter: the drafter's.
      rule: what it decides by, its strengths scalar or `[B]`.
    """

    verifier: Params
    drafter: Params
    rule: Any


class Reader(NamedTuple):
    """How far a model has read.

    Attributes:
      positions: `[B]` int32, where the last committed token belongs in its cache.
      cache: its cache, without that token.
    """

    positions: Array  # [B]
    cache: Cache


class CascadeState(NamedTuple):
    """What one step leaves to the next, per row.

    Attributes:
      tokens: `[B]` int32, the last committed token; in neither cache yet.
      verifier: how far the verifier has read.
      drafter: how far the drafter has read.
      own: what a cascade keeps besides; its arrays have the batch as their leading axis.
    """

    tokens: Array  # [B]
    verifier: Reader
    drafter: Reader
    own: Any = ()


@dataclasses.dataclass(frozen=True)
class PairMethod(LoopMethod):
    """Decodes with two models, step by step. Its parameters: `CascadeParams`.

    `DecodeInfo.calls` are a row's own: passes that read something of this row.

    Attributes:
      verifier: the large model.
      drafter: the small model.
      eos_ids: tokens that end a row.
      partitioner: where arrays lie on a mesh; None for one device.

    Raises:
      TypeError: if a model is not what it must be.
      ValueError: if their vocabularies differ.
    """

    verifier: LanguageModel
    drafter: LanguageModel

    def __post_init__(self) -> None:
        for name, model in (("verifier", self.verifier), ("drafter", self.drafter)):
            needed = ("vocab_size", "prefill", "score", "write", "extend")
            check_part(name, model, needed, "models.T5(config)")
            check_static(name, model)
        check_vocabularies(self.verifier, self.drafter)
        super().__post_init__()

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.verifier.vocab_size

    @property
    def model_names(self) -> tuple[str, ...]:
        """The two."""
        return ("verifier", "drafter")

    def describe(self) -> dict[str, Any]:
        """See `Method`."""
        return {**super().describe(), "drafter": self.drafter.describe()}

    def prompt_positions(self, input_lengths: Any, prefix_lengths: Any) -> Any:
        """See `LoopMethod`."""
        models = (self.verifier, self.drafter)
        first, second = (x.prompt_positions(input_lengths, prefix_lengths) for x in models)
        return np.maximum(first, second)

    def prefill(self, params: CascadeParams, prompts: PromptBatch, max_length: int) -> CascadeState:
        """See `LoopMethod`."""
        prompt = (prompts.inputs, prompts.input_lengths, max_length)
        forced = (prompts.prefix, prompts.prefix_lengths)
        large = self.verifier.prefill(params.verifier, *prompt, *forced)
        small = self.drafter.prefill(params.drafter, *prompt, *forced)
        readers = (Reader(filled.positions, filled.cache) for filled in (large, small))
        return CascadeState(large.tokens, *readers)

    def inner_axes(self, inner: CascadeState) -> Axes:
        """See `LoopMethod`."""

        def axes(model: LanguageModel, reader: Reader) -> Axes:
            return Reader(row_axes(reader.positions), model.cache_axes(reader.cache))

        return CascadeState(
            tokens=row_axes(inner.tokens),
            verifier=axes(self.verifier, inner.verifier),
            drafter=axes(self.drafter, inner.drafter),
            own=row_axes(inner.own),
        )

    def check_params(self, params: Params, state: DecodeState) -> None:
        """See `LoopMethod`."""
        if not isinstance(params, CascadeParams):
            raise TypeError(
                f"params must be decoding.CascadeParams(verifier=, drafter=, rule=), got "
                f"{type(params).__name__}"
            )
        self.check_rule(params.rule)
        check_strengths(params.rule, state.ended_by.shape[0])


def per_row(rule: Any, rows: Array) -> Any:
    """The rule with strengths `[B]`; `rows` is any `[B]`."""
    return jax.tree.map(lambda x: jnp.broadcast_to(x, rows.shape), rule)


def log_at(probs: Array, tokens: Array) -> Array:
    """Natural logarithms of the probabilities `[..., V]` of `tokens [...]`."""
    return jnp.log(jnp.take_along_axis(probs, tokens[..., None], axis=-1)[..., 0])


def step_counts(state: DecodeState, drafted: Array, accepted: Array) -> dict[str, Array]:
    """The histograms of `DecodeInfo` after a step of the running rows; both numbers `[B]`."""
    lengths = jnp.arange(state.info.drafted_lengths.shape[1])[None]
    running = ~state.finished[:, None]

    def counted(before: Array, number: Array) -> Array:
        return before + ((lengths == number[:, None]) & running).astype(jnp.int32)

    return {
        "drafted_lengths": counted(state.info.drafted_lengths, drafted),
        "accepted_lengths": counted(state.info.accepted_lengths, accepted),
    }


def source_of_nan(in_verifier: Array, in_drafter: Array) -> Array:
    """`[B]` int32 as `end_by_nan` takes it, of two `[B]` bool."""
    return jnp.where(in_verifier, VERIFIER, jnp.where(in_drafter, DRAFTER, -1))
