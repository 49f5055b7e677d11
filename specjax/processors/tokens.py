"""Processors of certain tokens, and of certain positions of the output.

Axes: B rows, K listed tokens with padding, V vocabulary.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from specjax.checks import check_number
from specjax.errors import UserError
from specjax.processors.common import (
    Unbound,
    check_known,
    check_strength,
    checked_ids,
    column,
    padded_ids,
    padded_size,
    without,
)
from specjax.types import Params, Processor, PromptBatch, traced_dataclass


class _OverPositions(Processor):
    """A processor whose state is the number of output tokens."""

    def init(
        self, params: Params, prompts: PromptBatch, vocab_size: int, room: int
    ) -> Int32[Array, " B"]:
        return jnp.zeros(prompts.inputs.shape[:1], jnp.int32)

    def advance(self, params: Params, state: Array, tokens: Array) -> Array:
        return state + 1


def _pairs(name: str, value: Any, example: str) -> list[tuple[Any, Any]]:
    """The pairs of a mapping, in the order of their keys."""
    try:
        pairs = [(k, v) for k, v in (value.items() if isinstance(value, Mapping) else value)]
        pairs.sort(key=lambda pair: pair[0])
    except (TypeError, ValueError):
        raise UserError(f"{name} must be like {example}, got {value!r}") from None
    for (key, _), (following, _) in itertools.pairwise(pairs):
        if key == following:
            raise UserError(f"{name} must have each key once, got {key!r} twice")
    return pairs


@traced_dataclass
class BoundBias(Processor):
    """Adds numbers to the logits of some tokens; `LogitBias` makes it for a model.

    Its `params` are the ids as an array.

    Attributes:
      values: for each id a number, or `[B]`; then zeros, up to a power of two.
      ids: the tokens; of the host.
    """

    values: tuple[Array | float, ...]
    ids: tuple[int, ...] = dataclasses.field(metadata={"host": True})

    order: ClassVar[int] = 0
    forbids: ClassVar[bool] = False

    def process(self, params: Params, state: Any, logits: Array) -> Array:
        added = [column(value, logits) for value in self.values]
        return logits.at[:, params].add(jnp.concatenate(added, axis=1), mode="drop")


@traced_dataclass
class LogitBias(Unbound):
    """Adds a number to the logits of some tokens.

    Source: OpenAI's `logit_bias`; `SequenceBiasLogitsProcessor` of transformers for single tokens.

    Attributes:
      bias: token id -> a finite number, or `[B]`; also as pairs.
    """

    bias: Any

    order: ClassVar[int] = BoundBias.order
    forbids: ClassVar[bool] = BoundBias.forbids

    def __post_init__(self) -> None:
        pairs = _pairs("LogitBias.bias", self.bias, "{42: -2.5} (token id: number)")
        ids = checked_ids("LogitBias.bias", [i for i, _ in pairs])
        for i, value in pairs:
            if np.ndim(value) == 0 and value == -np.inf:
                raise UserError(
                    f"LogitBias.bias[{i}] must be finite, got -inf: to forbid tokens write "
                    f"SuppressTokens(({i},))"
                )
        values = [
            check_number(f"LogitBias.bias[{i}]", value, open_low=True, open_high=True)
            for i, value in pairs
        ]
        object.__setattr__(self, "bias", dict(zip(ids, values, strict=True)))

    def bind(self, model: Any) -> tuple[Processor, Params]:
        ids = tuple(self.bias)
        check_known(self, "bias", ids, model)
        rest = padded_size(len(ids)) - len(ids)
        values = (*self.bias.values(), *[np.zeros((), np.float32)] * rest)
        return BoundBias(values, ids), padded_ids(ids, model.model.vocab_size)


@traced_dataclass
class SuppressTokens(_OverPositions):
    """Forbids some tokens, everywhere or in the first positions of the output.

    Source: `SuppressTokensLogitsProcessor` and `SuppressTokensAtBeginLogitsProcessor` of
    transformers (`first=1`).

    Attributes:
      ids: the tokens; of the host.
      first: the number of positions, or `[B]`; None: all.
    """

    ids: tuple[int, ...] = dataclasses.field(metadata={"host": True})
    first: Array | int | None = None

    order: ClassVar[int] = 17

    def __post_init__(self) -> None:
        ids = checked_ids("SuppressTokens.ids", self.ids)
        object.__setattr__(self, "ids", tuple(sorted({*ids})))  # the order says nothing
        if self.first is not None:
            check_strength(self, "first", low=1, dtype=jnp.int32)

    def bind(self, model: Any) -> tuple[Processor, Params]:
        check_known(self, "ids", self.ids, model)
        if len(self.ids) == (size := model.model.vocab_size):
            raise UserError(
                f"SuppressTokens.ids has all {size} tokens of the verifier, so none could follow: "
                "leave some out"
            )
        return self, np.isin(np.arange(size), self.ids)

    def process(self, params: Params, state: Array, logits: Array) -> Array:
        forbidden = params[None]
        if self.first is not None:
            forbidden = forbidden & (state < self.first)[:, None]
        return without(logits, forbidden)


@traced_dataclass
class ForcedTokens(_OverPositions):
    """Forces the tokens at some positions of the output.

    Source: `ForcedBOSTokenLogitsProcessor` of transformers, for other positions too.

    Attributes:
      tokens: position of the output (0 is the first) -> token id; of the host.
    """

    tokens: Any = dataclasses.field(metadata={"host": True})

    order: ClassVar[int] = 16

    def __post_init__(self) -> None:
        pairs = _pairs("ForcedTokens.tokens", self.tokens, "{0: 42} (position: token id)")
        positions = checked_ids(
            "the keys of ForcedTokens.tokens", [key for key, _ in pairs], "position"
        )
        ids = checked_ids("ForcedTokens.tokens", [token for _, token in pairs])
        object.__setattr__(self, "tokens", tuple(zip(positions, ids, strict=True)))

    def bind(self, model: Any) -> tuple[Processor, Params]:
        positions, ids = zip(*self.tokens, strict=True)
        check_known(self, "tokens", ids, model)
        return self, (padded_ids(positions, -1), padded_ids(ids, -1))

    def process(self, params: Params, state: Array, logits: Array) -> Array:
        positions, ids = params
        here = positions[None] == state[:, None]  # [B, K]
        token = jnp.max(jnp.where(here, ids[None], -1), axis=1, keepdims=True)
        place = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
        # Not where a constraint forbids it.
        forced = jnp.where((place == token) & (logits > -jnp.inf), 0.0, -jnp.inf)
        return jnp.where(token >= 0, forced, logits)


@traced_dataclass
class MinNewTokens(_OverPositions):
    """Forbids the end of a row before it has `tokens` tokens.

    Source: `MinNewTokensLengthLogitsProcessor` of transformers.

    Attributes:
      tokens: at least 0; a whole number, or `[B]`.
      eos_ids: the tokens that end a row; the verifier's by default. Of the host.
    """

    tokens: Array | int
    eos_ids: tuple[int, ...] = dataclasses.field(default=(), metadata={"host": True})

    order: ClassVar[int] = 14

    def __post_init__(self) -> None:
        check_strength(self, "tokens", low=0, dtype=jnp.int32)
        if self.eos_ids != ():
            ids = checked_ids("MinNewTokens.eos_ids", self.eos_ids)
            object.__setattr__(self, "eos_ids", tuple(sorted({*ids})))

    def bind(self, model: Any) -> tuple[Processor, Params]:
        ids = self.eos_ids or tuple(sorted({*model.tokenizer.eos_ids}))
        check_known(self, "eos_ids", ids, model)
        ends = np.isin(np.arange(model.model.vocab_size), ids)
        return dataclasses.replace(self, eos_ids=ids), ends

    def process(self, params: Params, state: Array, logits: Array) -> Array:
        return without(logits, params[None] & (state < self.tokens)[:, None])


@traced_dataclass
class LinearTemperature(_OverPositions):
    """A temperature that changes with the position: from `first` to `last` in `tokens` tokens.

    `Sampling.temperature` multiplies it; a greedy row stays greedy.

    Attributes:
      first: > 0, at the first token; a number, or `[B]`.
      last: > 0, from `tokens` on; a number, or `[B]`.
      tokens: at least 1; a whole number, or `[B]`.
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
        part = jnp.minimum(state / jnp.asarray(self.tokens), 1.0).astype(jnp.float32)
        return logits / column(self.first + (self.last - self.first) * part, logits)
