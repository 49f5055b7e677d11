"""What processors share.

Axes: B rows, P prompt length, V vocabulary.
"""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32

from specjax.checks import check_number
from specjax.errors import UserError
from specjax.types import Params, Processor


class Unbound(Processor):
    """A processor in whose place `bind` gives another."""

    def process(self, params: Params, state: Any, logits: Array) -> Array:
        raise UserError(f"{type(self).__name__} must be bound to a model: give it to a Decoder")


def padded_size(count: int, least: int = 8) -> int:
    """Returns the size of an array of `count` entries: a power of two, so that sizes are few."""
    return max(least, 1 << (count - 1).bit_length())


def padded_ids(ids: Iterable[int], rest: int) -> np.ndarray:
    """Token ids as an array of `padded_size`, filled with `rest`."""
    listed = list(ids)
    return np.array([*listed, *[rest] * (padded_size(len(listed)) - len(listed))], np.int32)


def check_strength(of: Processor, name: str, **span: Any) -> None:
    """Fixes the dtype of a strength, see `check_number`; its name in messages is gin's."""
    value = check_number(f"{type(of).__name__}.{name}", getattr(of, name), **span)
    object.__setattr__(of, name, value)


def column(strength: Any, logits: Float32[Array, "B V"]) -> Array:
    """Returns a strength, a number or `[B]`, as `[B, 1]`."""
    return jnp.broadcast_to(strength, logits.shape[:1])[:, None]


def without(logits: Float32[Array, "B V"], tokens: Bool[Array, "#B V"]) -> Float32[Array, "B V"]:
    """Returns the logits, -inf where `tokens` is true."""
    return jnp.where(tokens, -jnp.inf, logits)


def check_over(of: Any, choices: tuple[str, ...] = ("both", "prompt", "output")) -> None:
    """Refuses an `over` that does not say which tokens count."""
    if of.over not in choices:
        words = ", ".join(map(repr, choices))
        raise UserError(f"{type(of).__name__}.over must be one of {words}, got {of.over!r}")


def checked_ids(name: str, ids: Any, kind: str = "token id") -> tuple[int, ...]:
    """Returns token ids, or other whole numbers named `kind`, as a tuple."""
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise UserError(f"{name} must be a list of {kind}s such as (13, 42), got {ids!r}")
    listed = tuple(ids)
    if not listed:
        raise UserError(f"{name} must have at least one {kind}: leave the processor out")
    for value in listed:
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 0:
            remedy = ": for a word write tokenizer.encode(word)" if isinstance(value, str) else ""
            raise UserError(f"{name} must be {kind}s of at least 0, got {value!r}{remedy}")
    return tuple(map(int, listed))


def check_known(of: Processor, name: str, ids: tuple[int, ...], model: Any) -> None:
    """Refuses an id that is not a token of the model's tokenizer."""
    size, largest = model.model.vocab_size, max(ids, default=-1)
    if largest >= size:
        raise UserError(
            f"{type(of).__name__}.{name} has the token id {largest}, but the verifier has {size} "
            f"tokens: give ids in 0 .. {size - 1}"
        )
