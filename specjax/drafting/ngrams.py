"""The successor of a text's last tokens, by the longest ending in a table.

Axes: B rows, K contexts, T their longest, O its lengths from 2 to T, S buckets, W places of the
fullest bucket, V vocabulary.

Source: backing off without weights, as in Large Language Models in Machine Translation (Brants et
al., 2007), for a single guess.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from specjax.checks import check_array
from specjax.types import Array

# The finaliser of MurmurHash3, over uint32, which wraps around.
_FACTORS = (np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35))
_SHIFTS = (np.uint32(16), np.uint32(13), np.uint32(16))


class NGrams(NamedTuple):
    """A hashed table of n-grams: parameters of a `LookupDrafter`, made by `hashed`.

    Attributes:
      successors: `[V]` int32, the successor of each token, -1 if unknown.
      contexts: `[K, T]` int32, endings of two tokens and more, the last token first; -1 after the
        end of a shorter ending. Contexts of a bucket are neighbours.
      followers: `[K]` int32, the successor of each context.
      begins: `[S]` int32, the first place of each bucket; S is a power of two.
      probes: `[W]` int32, 0, 1, ...: the places of a bucket.
      start: int32, the token before the first output token if outputs do not continue the prompts
        (an encoder-decoder's start token), else -1.
    """

    successors: Array  # [V]
    contexts: Array  # [K, T]
    followers: Array  # [K]
    begins: Array  # [S]
    probes: Array  # [W]
    start: Array


def hashed(
    successors: np.ndarray, contexts: np.ndarray, followers: np.ndarray, start: int | None
) -> NGrams:
    """Sorts contexts into buckets, so that a lookup takes few gathers.

    Args:
      successors: see `NGrams`.
      contexts: K >= 1 contexts in any order, without duplicates.
      followers: their successors.
      start: see `NGrams`; None for none.

    Returns:
      The table, of NumPy arrays.
    """
    # At most half full: the largest bucket of a million contexts then has about seven.
    buckets = 1 << (2 * len(contexts) - 1).bit_length()
    bucket = _bucket(contexts, buckets)
    order = np.argsort(bucket, kind="stable")
    sizes = np.bincount(bucket, minlength=buckets)
    arrays: dict[str, Any] = {
        "successors": successors,
        "contexts": contexts[order],
        "followers": followers[order],
        "begins": (np.cumsum(sizes) - sizes).astype(np.int32),
        "probes": np.arange(sizes.max(), dtype=np.int32),
        "start": np.asarray(-1 if start is None else start, np.int32),
    }
    return NGrams(**arrays)


def follower(table: NGrams, ending: Array) -> Array:
    """The successor of the longest known ending of each row.

    Args:
      table: the n-grams.
      ending: `[B, T]` int32, the row's last tokens, the last first; -1 for missing tokens.

    Returns:
      `[B]` int32, -1 if unknown.
    """
    longest = ending.shape[1]
    # Axis 1: endings of 2 tokens, of 3, ...
    real = np.arange(longest) < np.arange(2, longest + 1)[:, None]
    endings = jnp.where(real[None], ending[:, None], -1)
    begins = table.begins[_bucket(endings, table.begins.shape[0])]
    # Places past the bucket's end have other contexts, which do no harm.
    at = begins[..., None] + table.probes[None, None]
    at = jnp.minimum(at, table.followers.shape[0] - 1)
    same = jnp.all(table.contexts[at] == endings[:, :, None], axis=-1)
    found = jnp.max(jnp.where(same, table.followers[at], -1), axis=-1)
    after = table.successors[ending[:, 0]]
    for i in range(longest - 1):
        after = jnp.where(found[:, i] >= 0, found[:, i], after)
    return after


def check_ngrams(what: str, table: NGrams, vocab_size: int) -> None:
    """Raises TypeError, at trace time, unless the arrays have the shapes of a table."""
    check_array(f"{what}.successors", table.successors, "[V]", (vocab_size,), jnp.int32)
    (contexts, longest), buckets = np.shape(table.contexts), np.shape(table.begins)
    check_array(f"{what}.contexts", table.contexts, "[K, T]", (contexts, longest), jnp.int32)
    check_array(f"{what}.followers", table.followers, "[K]", (contexts,), jnp.int32)
    check_array(f"{what}.begins", table.begins, "[S]", buckets, jnp.int32)
    check_array(f"{what}.probes", table.probes, "[W]", np.shape(table.probes), jnp.int32)
    check_array(f"{what}.start", table.start, "scalar", (), jnp.int32)


def _bucket(tokens: Any, buckets: int) -> Any:
    """Hashes `[..., T]` tokens of NumPy or JAX to `[...]` int32 below `buckets`."""
    made = tokens[..., 0].astype(np.uint32)
    for i in range(1, tokens.shape[-1]):
        made = _mixed(made) ^ tokens[..., i].astype(np.uint32)
    return (_mixed(made) & np.uint32(buckets - 1)).astype(np.int32)


def _mixed(x: Any) -> Any:
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> _SHIFTS[2])
