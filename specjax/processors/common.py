"""What processors share.

Axes: B rows, P prompt length, V vocabulary.
"""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.checks import checked
from specjax.errors import UserError
from specjax.types import Array, Params, Processor, PromptBatch

OVER = ("both", "prompt", "output")
# The fewest entries of a padded list of tokens.
LEAST = 8


class Unbound(Processor):
    """A processor in whose place `bind` gives another."""

    def process(self, params: Params, state: Any, logits: Array) -> Array:
        """Only a bound processor can: see `bind`."""
        raise UserError(f"{type(self).__name__} must be bound to a model: give it to a Decoder")


def padded_size(count: int, least: int = LEAST) -> int:
    """The size of an array that holds `count` entries: a power of two, so that sizes are few."""
    return max(least, 1 << (count - 1).bit_length())


def padded_ids(ids: Iterable[int], rest: int) -> np.ndarray:
    """Token ids as an array of `padded_size`, filled with `rest`."""
    given = list(ids)
    return np.array([*given, *[rest] * (padded_size(len(given)) - len(given))], np.int32)


def check_strength(of: Processor, name: str, **span: Any) -> None:
    """Fixes the dtype of a strength, see `checks.checked`; its name in messages is gin's.

    Raises:
      TypeError: it is not a number, or a number per row.
      ValueError: it is out of range.
    """
    value = checked(f"{type(of).__name__}.{name}", getattr(of, name), **span)
    object.__setattr__(of, name, value)


def column(strength: Any, logits: Array) -> Array:
    """A strength, a number or `[B]`, as `[B, 1]`."""
    return jnp.broadcast_to(strength, logits.shape[:1])[:, None]


def without(logits: Array, tokens: Array) -> Array:
    """The logits, -inf where `tokens` is true."""
    return jnp.where(tokens, -jnp.inf, logits)


def marked(ids: tuple[int, ...], vocab_size: int) -> np.ndarray:
    """`[V]` bool, true at the ids."""
    found = np.zeros(vocab_size, bool)
    found[list(ids)] = True
    return found


def prompt_counts(prompts: PromptBatch, vocab_size: int) -> Array:
    """`[B, V]` int32, how often each token is in each prompt."""
    rows, width = prompts.inputs.shape
    real = jnp.arange(width)[None] < prompts.input_lengths[:, None]
    # Padding is outside of the vocabulary, so it is dropped.
    tokens = jnp.where(real, prompts.inputs, vocab_size)
    counts = jnp.zeros((rows, vocab_size), jnp.int32)
    return counts.at[jnp.arange(rows)[:, None], tokens].add(1, mode="drop")


def counted(counts: Array, tokens: Array) -> Array:
    """`[B, V]` counts, with one more of `tokens [B]`."""
    place = jnp.arange(counts.shape[1], dtype=jnp.int32)[None]
    return counts + (place == tokens[:, None]).astype(jnp.int32)


def check_over(of: Any, known: tuple[str, ...] = OVER) -> None:
    """Raises ValueError unless the processor's `over` says which tokens count."""
    if of.over not in known:
        words = ", ".join(map(repr, known))
        raise UserError(f"{type(of).__name__}.over must be one of {words}, got {of.over!r}")


def checked_ids(name: str, ids: Any, kind: str = "token id") -> tuple[int, ...]:
    """Returns token ids, or other whole numbers named `kind`, as a tuple.

    Raises:
      TypeError: they are not a sequence of whole numbers.
      ValueError: there are none, or one is negative.
    """
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise UserError(f"{name} must be a list of {kind}s such as (13, 42), got {ids!r}")
    given = tuple(ids)
    for value in given:
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            remedy = ": for a word write tokenizer.encode(word)" if kind == "token id" else ""
            raise UserError(f"{name} must be {kind}s (whole numbers), got {value!r}{remedy}")
        if value < 0:
            raise UserError(f"{name} must be {kind}s of at least 0, got {value}")
    if not given:
        raise UserError(f"{name} must have at least one {kind}: leave the processor out")
    return tuple(map(int, given))


def check_known(of: Processor, name: str, ids: tuple[int, ...], model: Any) -> None:
    """Raises ValueError for an id that is not a token of the model's tokenizer."""
    size = model.model.vocab_size
    for value in ids:
        if value >= size:
            raise UserError(
                f"{type(of).__name__}.{name} has the token id {value}, but the verifier has {size} "
                f"tokens: give ids in 0 .. {size - 1}"
            )
