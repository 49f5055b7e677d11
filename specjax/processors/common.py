"""What processors share.

Axes: B rows, P prompt length, V vocabulary.
"""

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from specjax.types import Array, PromptBatch

OVER = ("both", "prompt", "output")


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


def checked_over(over: Any) -> str:
    """Raises ValueError unless `over` says which tokens count."""
    if over not in OVER:
        raise ValueError(f"over must be one of {', '.join(map(repr, OVER))}, got {over!r}")
    return str(over)


def checked_ids(name: str, ids: Any, kind: str = "token id") -> tuple[int, ...]:
    """Returns token ids, or other whole numbers named `kind`, as a tuple.

    Raises:
      TypeError: they are not a sequence of whole numbers.
      ValueError: there are none, or one is negative.
    """
    if isinstance(ids, str | bytes) or not isinstance(ids, Iterable):
        raise TypeError(f"{name} must be a list of {kind}s such as (13, 42), got {ids!r}")
    given = tuple(ids)
    for value in given:
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            remedy = ": for a word write tokenizer.encode(word)" if kind == "token id" else ""
            raise TypeError(f"{name} must be {kind}s (whole numbers), got {value!r}{remedy}")
        if value < 0:
            raise ValueError(f"{name} must be {kind}s of at least 0, got {value}")
    if not given:
        raise ValueError(f"{name} must have at least one {kind}: leave the processor out")
    return tuple(map(int, given))


def check_known(name: str, ids: tuple[int, ...], model: Any) -> None:
    """Raises ValueError for an id that is not a token of the model's tokenizer."""
    size = model.model.vocab_size
    for value in ids:
        if value >= size:
            raise ValueError(
                f"{name} has the token id {value}, but the verifier has {size} tokens: "
                f"give ids in 0 .. {size - 1}"
            )
