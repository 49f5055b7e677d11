"""Penalties: processors that make tokens of the text so far less, or more, probable.

The penalties of transformers count the tokens that a decoder has read: prompt and output of a
decoder-only model, the output of an encoder-decoder model. vLLM's repetition penalty counts prompt
and output; its presence and frequency penalties count the output only, as OpenAI's. `over` says
which tokens count.

Axes: B rows, S tokens of a text, V vocabulary.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32

from specjax.processors.common import check_over, check_strength, column, without
from specjax.types import Params, Processor, PromptBatch, traced_dataclass


class _OverTokens(Processor):
    """A processor whose state is the count of each token."""

    over: Any

    def init(
        self, params: Params, prompts: PromptBatch, vocab_size: int, room: int
    ) -> Int32[Array, "B V"]:
        rows, width = prompts.inputs.shape
        counts = jnp.zeros((rows, vocab_size), jnp.int32)
        if self.over == "output":
            return counts
        real = jnp.arange(width)[None] < prompts.input_lengths[:, None]
        # Padding is outside of the vocabulary, so it is dropped.
        tokens = jnp.where(real, prompts.inputs, vocab_size)
        return counts.at[jnp.arange(rows)[:, None], tokens].add(1, mode="drop")

    def advance(self, params: Params, state: Array, tokens: Array) -> Array:
        if self.over == "prompt":
            return state
        place = jnp.arange(state.shape[1], dtype=jnp.int32)[None]
        return state + (place == tokens[:, None]).astype(jnp.int32)


@traced_dataclass
class RepetitionPenalty(_OverTokens):
    """Divides the positive logits of tokens that were there by `penalty`, and multiplies negative.

    Source: Keskar et al. 2019 (arXiv 1909.05858); `RepetitionPenaltyLogitsProcessor` of
    transformers. `over="prompt"` is its `EncoderRepetitionPenalty...` with 1 / penalty.

    Attributes:
      penalty: > 0; 1 changes nothing, more weakens repetition. A number, or `[B]`.
      over: "both" (prompt and output), "prompt" or "output".
    """

    penalty: Array | float
    over: str = dataclasses.field(default="both", metadata={"static": True})

    order: ClassVar[int] = 10
    forbids: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_strength(self, "penalty", low=0.0, open_low=True, open_high=True)
        check_over(self)

    def process(self, params: Params, state: Array, logits: Array) -> Array:
        penalty = column(self.penalty, logits)
        weaker = jnp.where(logits > 0.0, logits / penalty, logits * penalty)
        return jnp.where(state > 0, weaker, logits)


@traced_dataclass
class PresencePenalty(_OverTokens):
    """Subtracts `penalty` from the logits of tokens that were there.

    Source: OpenAI's `presence_penalty`, as in vLLM.

    Attributes:
      penalty: a number, or `[B]`; negative values favour repetition.
      over: "output", "both" or "prompt".
    """

    penalty: Array | float
    over: str = dataclasses.field(default="output", metadata={"static": True})

    order: ClassVar[int] = 12
    forbids: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_strength(self, "penalty", open_low=True, open_high=True)
        check_over(self)

    def process(self, params: Params, state: Array, logits: Array) -> Array:
        return logits - column(self.penalty, logits) * (state > 0).astype(jnp.float32)


@traced_dataclass
class FrequencyPenalty(PresencePenalty):
    """Subtracts `penalty` from the logits of a token for each time that it was there.

    Its fields are those of `PresencePenalty`.

    Source: OpenAI's `frequency_penalty`, as in vLLM.
    """

    order: ClassVar[int] = 11

    def process(self, params: Params, state: Array, logits: Array) -> Array:
        return logits - column(self.penalty, logits) * state.astype(jnp.float32)


class _Text(NamedTuple):
    tokens: Int32[Array, "B S"]
    lengths: Int32[Array, " B"]


@traced_dataclass
class NoRepeatNgram(Processor):
    """Forbids a token that would complete an n-gram for the second time.

    Source: `NoRepeatNGramLogitsProcessor` of transformers.

    Attributes:
      size: n, at least 1; a whole number, or `[B]`.
      over: "both" (n-grams of prompt and output) or "output".
    """

    size: Array | int
    over: str = dataclasses.field(default="both", metadata={"static": True})

    order: ClassVar[int] = 13

    def __post_init__(self) -> None:
        check_strength(self, "size", low=1, dtype=jnp.int32)
        check_over(self, ("both", "output"))

    def init(self, params: Params, prompts: PromptBatch, vocab_size: int, room: int) -> _Text:
        if self.over == "output":
            rows = prompts.inputs.shape[0]
            return _Text(jnp.zeros((rows, room), jnp.int32), jnp.zeros((rows,), jnp.int32))
        return _Text(jnp.pad(prompts.inputs, ((0, 0), (0, room))), prompts.input_lengths)

    def process(self, params: Params, state: _Text, logits: Array) -> Array:
        tokens, lengths = state
        rows, width = tokens.shape
        size = column(self.size, logits)
        places = jnp.arange(width, dtype=jnp.int32)[None]
        repeats = places < lengths[:, None]

        def compare(back: int | Array, so_far: tuple[Array, Array]) -> tuple[Array, Array]:
            """Whether the token `back` places earlier is the one `back` before the next."""
            earlier, repeats = so_far
            earlier = jnp.roll(earlier, 1, axis=1)
            last = jnp.take_along_axis(tokens, jnp.maximum(lengths - back, 0)[:, None], axis=1)
            return earlier, repeats & ((earlier == last) & (places >= back) | (back >= size))

        most = jnp.minimum(jnp.max(size), width + 1)
        _, repeats = lax.fori_loop(1, most, compare, (tokens, repeats))
        # Also if the text is shorter than n - 1.
        repeats &= lengths[:, None] >= size - 1
        banned = jnp.zeros(logits.shape, bool)
        banned = banned.at[jnp.arange(rows)[:, None], tokens].max(repeats)
        return without(logits, banned)

    def advance(self, params: Params, state: _Text, tokens: Array) -> _Text:
        put = lambda row, at, token: lax.dynamic_update_slice(row, token[None], (at,))  # noqa: E731
        at = jnp.minimum(state.lengths, state.tokens.shape[1] - 1)
        written = jax.vmap(put)(state.tokens, at, tokens)
        return _Text(written, jnp.minimum(state.lengths + 1, state.tokens.shape[1]))
