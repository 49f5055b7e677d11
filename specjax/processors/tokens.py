"""Processors of certain tokens, and of certain positions of the output.

Axes: B rows, V vocabulary.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from specjax.checks import checked, whole_number
from specjax.processors.common import (
    check_known,
    check_strength,
    checked_ids,
    column,
    marked,
    without,
)
from specjax.types import Array, Params, Processor, PromptBatch, traced_dataclass


class _OverPositions(Processor):
    """A processor whose state is the number of output tokens, `[B]` int32."""

    def init(self, params: Params, prompts: PromptBatch, vocab_size: int, room: int) -> Array:
        """See `types.Processor`."""
        return jnp.zeros(prompts.inputs.shape[:1], jnp.int32)

    def advance(self, params: Params, state: Array, tokens: Array) -> Array:
        """See `types.Processor`."""
        return state + 1


def _pairs(name: str, given: Any, example: str) -> list[tuple[Any, Any]]:
    """The pairs of a mapping, in the order of their keys."""
    try:
        found = sorted(
            ((k, v) for k, v in (given.items() if isinstance(given, Mapping) else given)),
            key=lambda pair: pair[0],
        )
    except (TypeError, ValueError):
        raise TypeError(f"{name} must be like {example}, got {given!r}") from None
    for (key, _), (following, _) in itertools.pairwise(found):
        if key == following:
            raise ValueError(f"{name} must have each key once, got {key!r} twice")
    return found


@traced_dataclass
class LogitBias(Processor):
    """Adds a number to the logits of some tokens.

    Source: OpenAI's `logit_bias`; `SequenceBiasLogitsProcessor` of transformers for single tokens.

    Attributes:
      bias: token id -> a finite number, or `[B]`; also as pairs. The ids are static.

    Raises:
      TypeError: if `bias` is not a mapping from token ids.
      ValueError: if a value is out of range, or the tokenizer lacks an id.
    """

    bias: Any

    order: ClassVar[int] = 0
    forbids: ClassVar[bool] = False

    def __post_init__(self) -> None:
        pairs = _pairs("LogitBias.bias", self.bias, "{42: -2.5} (token id: number)")
        ids = checked_ids("LogitBias.bias", [i for i, _ in pairs])
        for i, value in pairs:
            if np.ndim(value) == 0 and value == -np.inf:
                raise ValueError(
                    f"LogitBias.bias[{i}] must be finite, got -inf: to forbid tokens write "
                    f"SuppressTokens(({i},))"
                )
        values = [
            checked(f"LogitBias.bias[{i}]", value, open_low=True, open_high=True)
            for i, value in pairs
        ]
        object.__setattr__(self, "bias", dict(zip(ids, values, strict=True)))

    def bind(self, model: Any) -> tuple[Processor, Params]:
        """See `types.Processor`."""
        check_known(self, "bias", tuple(self.bias), model)
        return self, ()

    def process(self, params: Params, state: Any, logits: Array) -> Array:
        """See `types.Processor`."""
        ids = jnp.asarray(list(self.bias), jnp.int32)
        added = [column(value, logits) for value in self.bias.values()]
        return logits.at[:, ids].add(jnp.concatenate(added, axis=1))


@traced_dataclass
class SuppressTokens(_OverPositions):
    """Forbids some tokens, everywhere or in the first positions of the output.

    Source: `SuppressTokensLogitsProcessor` and `SuppressTokensAtBeginLogitsProcessor` of
    transformers (`first=1`).

    Attributes:
      ids: the tokens; static.
      first: the number of positions; None: all. Static.

    Raises:
      TypeError: if `ids` are not token ids.
      ValueError: if the tokenizer lacks an id, `ids` has every token, or `first` is out of range.
    """

    ids: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    first: int | None = dataclasses.field(default=None, metadata={"static": True})

    order: ClassVar[int] = 17

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", checked_ids("SuppressTokens.ids", self.ids))
        if self.first is not None:
            object.__setattr__(
                self, "first", whole_number("SuppressTokens.first", self.first, low=1)
            )

    def bind(self, model: Any) -> tuple[Processor, Params]:
        """See `types.Processor`."""
        check_known(self, "ids", self.ids, model)
        if len(set(self.ids)) == (size := model.model.vocab_size):
            raise ValueError(
                f"SuppressTokens.ids has all {size} tokens of the verifier, so none could follow: "
                "leave some out"
            )
        return self, ()

    def process(self, params: Params, state: Array, logits: Array) -> Array:
        """See `types.Processor`."""
        forbidden = jnp.asarray(marked(self.ids, logits.shape[1]))[None]
        if self.first is not None:
            forbidden = forbidden & (state < self.first)[:, None]
        return without(logits, forbidden)


@traced_dataclass
class ForcedTokens(_OverPositions):
    """Forces the tokens at some positions of the output.

    Source: `ForcedBOSTokenLogitsProcessor` of transformers, for other positions too.

    Attributes:
      tokens: position of the output (0 is the first) -> token id; static.

    Raises:
      TypeError: if `tokens` is not a mapping from positions to token ids.
      ValueError: if a position is negative, or the tokenizer lacks an id.
    """

    tokens: Any = dataclasses.field(metadata={"static": True})

    order: ClassVar[int] = 16

    def __post_init__(self) -> None:
        pairs = _pairs("ForcedTokens.tokens", self.tokens, "{0: 42} (position: token id)")
        positions = checked_ids(
            "the keys of ForcedTokens.tokens", [key for key, _ in pairs], "position"
        )
        ids = checked_ids("ForcedTokens.tokens", [token for _, token in pairs])
        object.__setattr__(self, "tokens", tuple(zip(positions, ids, strict=True)))

    def bind(self, model: Any) -> tuple[Processor, Params]:
        """See `types.Processor`."""
        check_known(self, "tokens", tuple(token for _, token in self.tokens), model)
        return self, ()

    def process(self, params: Params, state: Array, logits: Array) -> Array:
        """See `types.Processor`."""
        place = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
        for position, token in self.tokens:
            here = (state == position)[:, None]
            # Not where a constraint forbids it.
            forced = jnp.where((place == token) & (logits > -jnp.inf), 0.0, -jnp.inf)
            logits = jnp.where(here, forced, logits)
        return logits


@traced_dataclass
class MinNewTokens(_OverPositions):
    """Forbids the end of a row before it has `tokens` tokens.

    Source: `MinNewTokensLengthLogitsProcessor` of transformers.

    Attributes:
      tokens: at least 0; a whole number, or `[B]`.
      eos_ids: the tokens that end a row; the verifier's by default. Static.

    Raises:
      TypeError: if `eos_ids` are not token ids.
      ValueError: if `tokens` is out of range, or the tokenizer lacks an id.
    """

    tokens: Array | int
    eos_ids: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    order: ClassVar[int] = 14

    def __post_init__(self) -> None:
        check_strength(self, "tokens", low=0, dtype=jnp.int32)
        if self.eos_ids != ():
            object.__setattr__(self, "eos_ids", checked_ids("MinNewTokens.eos_ids", self.eos_ids))

    def bind(self, model: Any) -> tuple[Processor, Params]:
        """See `types.Processor`."""
        found = self.eos_ids or tuple(model.tokenizer.eos_ids)
        check_known(self, "eos_ids", found, model)
        return dataclasses.replace(self, eos_ids=found), ()

    def process(self, params: Params, state: Array, logits: Array) -> Array:
        """See `types.Processor`."""
        ends = jnp.asarray(marked(self.eos_ids, logits.shape[1]))[None]
        return without(logits, ends & (state < self.tokens)[:, None])


@traced_dataclass
class LinearTemperature(_OverPositions):
    """A temperature that changes with the position: from `first` to `last` in `tokens` tokens.

    `Sampling.temperature` multiplies it; a greedy row stays greedy.

    Attributes:
      first: > 0, at the first token; a number, or `[B]`.
      last: > 0, from `tokens` on; a number, or `[B]`.
      tokens: at least 1; a whole number, or `[B]`.

    Raises:
      ValueError: if a value is out of range.
    """

    first: Array | float
    last: Array | float
    tokens: Array | int

    order: ClassVar[int] = 99
    forbids: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("first", "last"):
            check_strength(self, name, low=0.0, open_low=True, open_high=True)
        check_strength(self, "tokens", low=1, dtype=jnp.int32)

    def process(self, params: Params, state: Array, logits: Array) -> Array:
        """See `types.Processor`."""
        part = jnp.minimum(state / jnp.asarray(self.tokens), 1.0).astype(jnp.float32)
        return logits / column(self.first + (self.last - self.first) * part, logits)
