"""The most frequent successor of each token in a text, and of longer contexts.

A longer context is kept only if its successor differs from that of its longest shorter ending.

Source: backing off without weights, as in Large Language Models in Machine Translation (Brants et
al., 2007), for a single guess.

Axes: B rows, K contexts, T their longest, S buckets, W places of the fullest bucket, V vocabulary.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int32

from specjax.checks import check_count
from specjax.errors import UserError

MAX_ORDER = 5  # The number of tokens in the longest n-gram.

# The number of pairs that are counted at once: 8 MiB as int64.
_AT_ONCE = 2**20
# The finaliser of MurmurHash3, over uint32, which wraps around.
_FACTORS = (np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35))
_SHIFTS = (np.uint32(16), np.uint32(13), np.uint32(16))


class NGrams(NamedTuple):
    """A hashed table of n-grams: parameters of a `Lookup`, made by `hashed`.

    Attributes:
      successors: the successor of each token, -1 if unknown.
      contexts: endings of two tokens and more, the last token first; -1 after the end of a shorter
        ending. Contexts of a bucket are neighbours.
      followers: the successor of each context.
      begins: the first place of each bucket; S is a power of two.
      probes: 0, 1, ...: the places of a bucket.
      start: int32, the token before the first output token if outputs do not continue the prompts
        (an encoder-decoder's start token), else -1.
    """

    successors: Int32[Array, " V"]
    contexts: Int32[Array, "K T"]
    followers: Int32[Array, " K"]
    begins: Int32[Array, " S"]
    probes: Int32[Array, " W"]
    start: Array


def hashed(
    successors: np.ndarray, contexts: np.ndarray, followers: np.ndarray, start: int | None
) -> NGrams:
    """Sorts K >= 1 contexts, without duplicates, into buckets: then a lookup takes few gathers."""
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


def follower(table: NGrams, ending: Int32[Array, "B T"]) -> Int32[Array, " B"]:
    """The successor of the longest known ending of each row, -1 if unknown.

    The last token of an ending comes first; missing tokens are -1.
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
    by_length = jnp.max(jnp.where(same, table.followers[at], -1), axis=-1)
    after = table.successors[ending[:, 0]]
    for i in range(longest - 1):
        after = jnp.where(by_length[:, i] >= 0, by_length[:, i], after)
    return after


def _bucket(tokens: Any, buckets: int) -> Any:
    """Hashes `[..., T]` tokens of NumPy or JAX to `[...]` int32 below `buckets`."""
    mixed = tokens[..., 0].astype(np.uint32)
    for i in range(1, tokens.shape[-1]):
        mixed = _mixed(mixed) ^ tokens[..., i].astype(np.uint32)
    return (_mixed(mixed) & np.uint32(buckets - 1)).astype(np.int32)


def _mixed(x: Any) -> Any:
    for shift, factor in zip(_SHIFTS, _FACTORS, strict=False):
        x = (x ^ (x >> shift)) * factor
    return x ^ (x >> _SHIFTS[2])


@dataclasses.dataclass(frozen=True, eq=False)
class Bigram:
    """A table of successors, perhaps of longer contexts, and the vocabulary it belongs to.

    Attributes:
      successors: `[n]` int32 for the n ids of the tokenizer; -1 if none was seen.
      tokenizer_fingerprint: `Tokenizer.fingerprint` of the vocabulary.
      notes: other information, as JSON values.
      contexts: `[K, T]` int32, contexts of 2 .. T tokens, the last token first, -1 after the end of
        a shorter context; in lexicographic order. `frequent_contexts` makes them. None by default.
      followers: `[K]` int32, the successor of each context.
    """

    successors: np.ndarray = dataclasses.field(repr=False)
    tokenizer_fingerprint: str
    notes: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    contexts: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros((0, 1), np.int32), repr=False
    )
    followers: np.ndarray = dataclasses.field(
        default_factory=lambda: np.zeros(0, np.int32), repr=False
    )

    def __post_init__(self) -> None:
        table = np.asarray(self.successors)
        if table.ndim != 1 or not table.size or table.dtype != np.int32:
            raise UserError(f"successors must be [n] int32, got {list(table.shape)} {table.dtype}")
        if not _are_ids(table, -1, table.size):
            raise UserError(f"successors must lie in -1 .. {table.size - 1}")
        if not _are_contexts(np.asarray(self.contexts), np.asarray(self.followers), table.size):
            raise UserError(
                "contexts must be [K, T] int32 ids, two or more before the first -1, in "
                "lexicographic order without duplicates, and followers [K] int32 ids"
            )

    @property
    def order(self) -> int:
        """The number of tokens in the longest n-gram: 2 without longer contexts."""
        return int(self.contexts.shape[1]) + 1

    def table(
        self, name: str, tokenizer_fingerprint: str, vocab_size: int, start: int | None = None
    ) -> np.ndarray | NGrams:
        """The parameters of a `Lookup` for the model `name`, whose vocabulary must be ours.

        Its `vocab_size` may exceed the tokenizer's. `start` is the start token of an
        encoder-decoder, whose outputs do not continue the prompts: longer contexts begin with it at
        the earliest.
        """
        if tokenizer_fingerprint != self.tokenizer_fingerprint or vocab_size < self.successors.size:
            raise UserError(
                f"the bigram table has {self.successors.size} ids (tokenizer "
                f"{self.tokenizer_fingerprint}) but {name} has {vocab_size} (tokenizer "
                f"{tokenizer_fingerprint}): make a table with `specjax train bigram --tokenizer` "
                "and that model's directory"
            )
        missing = vocab_size - self.successors.size
        successors = np.pad(self.successors, (0, missing), constant_values=-1)
        if not self.followers.size:
            return successors
        return hashed(successors, self.contexts, self.followers, start)


def most_frequent_successors(texts: Iterable[Sequence[int]], vocab_size: int) -> np.ndarray:
    """The most frequent successor of each token, the smallest in a tie; -1 if none was seen.

    The last token of a text has no successor. `vocab_size` is the largest id plus 1.
    """
    counts: tuple[np.ndarray, np.ndarray] = (np.zeros(0, np.int64), np.zeros(0, np.int64))
    waiting: list[np.ndarray] = []
    size = 0
    for text in texts:
        ids = np.asarray(text, np.int64)
        waiting.append(ids[:-1] * vocab_size + ids[1:])
        size += waiting[-1].size
        if size >= _AT_ONCE:
            counts, waiting, size = _add(counts, waiting), [], 0
    pairs, often = _add(counts, waiting)
    tokens, best = _most_frequent(pairs, often, vocab_size)
    table = np.full(vocab_size, -1, np.int32)
    table[tokens] = best
    return table


def frequent_contexts(
    texts: Iterable[Sequence[int]], successors: np.ndarray, order: int, min_count: int = 2
) -> tuple[np.ndarray, np.ndarray]:
    """Counts the successors of contexts of 2 .. T = order - 1 tokens.

    A context is left out if its longest shorter ending has the same successor: a lookup finds that
    ending instead.

    Args:
      texts: token ids; held in memory at once, with some 60 bytes a token while counting.
      successors: `[n]` int32, of `most_frequent_successors` for the same texts.
      order: tokens of the longest n-gram, 3 .. 5.
      min_count: how often a context must have had a successor.

    Returns:
      `[K, T]` int32 contexts and `[K]` int32 followers; see `Bigram`. In a tie, the smallest
      follower.
    """
    check_count("min_count", min_count, "give the least number of times a context occurs")
    if order not in range(3, MAX_ORDER + 1):
        raise UserError(f"order must lie in 3 .. {MAX_ORDER}, got {order}: order 2 is the default")
    rows = [np.asarray(text, np.int64) for text in texts if len(text)]
    tokens = np.concatenate([np.zeros(0, np.int64), *rows])
    ends = np.cumsum([len(row) for row in rows], dtype=np.int64)
    followed = np.ones(tokens.size, bool)
    followed[ends - 1] = False
    # The context that ends at each place, as a number; -1 for none or a rare context. First
    # contexts of one token, then longer ones.
    here, shorter = np.where(followed, tokens, -1), successors
    parts_by_size = [(np.zeros((0, order - 1), np.int32), np.zeros(0, np.int32))]
    for size in range(2, order):
        # The ends of frequent contexts that are longer by a token, and their numbers from 0 on. The
        # last place of a text has no context, so contexts never cross texts.
        before = np.concatenate([[-1], here[:-1]])[: here.size]
        places = np.flatnonzero(followed & (before >= 0))
        pairs = before[places] * successors.size + tokens[places]
        _, number, often = np.unique(pairs, return_inverse=True, return_counts=True)
        frequent = often >= min_count
        kept = frequent[number]
        places, numbers = places[kept], (np.cumsum(frequent) - 1)[number[kept]]
        longer = np.full(tokens.size, -1)
        longer[places] = numbers
        pairs = numbers * successors.size + tokens[places + 1]
        _, best = _most_frequent(*np.unique(pairs, return_counts=True), successors.size)
        one = places[np.unique(numbers, return_index=True)[1]]
        news = best != shorter[here[one]]
        contexts = np.full((int(news.sum()), order - 1), -1, np.int32)
        contexts[:, :size] = tokens[one[news][:, None] - np.arange(size)]
        parts_by_size.append((contexts, best[news].astype(np.int32)))
        here, shorter = longer, best
    contexts, followers = (np.concatenate(parts) for parts in zip(*parts_by_size, strict=True))
    place = np.lexsort(contexts.T[::-1])
    return contexts[place], followers[place]


def _most_frequent(
    pairs: np.ndarray, often: np.ndarray, vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """The first of each pair (as a number), sorted, and its most frequent second."""
    first, second = pairs // vocab_size, pairs % vocab_size
    order = np.lexsort((second, -often, first))
    firsts, best = np.unique(first[order], return_index=True)
    return firsts, second[order][best]


def _add(
    counts: tuple[np.ndarray, np.ndarray], waiting: list[np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Pairs as numbers, and the count of each."""
    new, often = np.unique(np.concatenate([np.zeros(0, np.int64), *waiting]), return_counts=True)
    pairs, place = np.unique(np.concatenate([counts[0], new]), return_inverse=True)
    weights = np.concatenate([counts[1], often])
    total = np.zeros(pairs.size, np.int64)
    np.add.at(total, place, weights)
    return pairs, total


def _are_ids(ids: np.ndarray, low: int, size: int) -> bool:
    return not ids.size or (ids.min() >= low and ids.max() < size)


def _are_contexts(contexts: np.ndarray, followers: np.ndarray, size: int) -> bool:
    """Whether they are as `Bigram` describes them, for `size` ids."""
    if contexts.ndim != 2 or followers.shape != contexts.shape[:1]:
        return False
    if contexts.dtype != np.int32 or followers.dtype != np.int32:
        return False
    longest, real = contexts.shape[1], contexts >= 0
    if not 1 <= longest < MAX_ORDER or (longest == 1 and followers.size):
        return False
    if not real[:, :2].all() or (real[:, 1:] > real[:, :-1]).any():
        return False
    change = np.diff(contexts, axis=0)
    first = np.argmax(change != 0, axis=1)
    rising = (np.take_along_axis(change, first[:, None], axis=1) > 0).all()
    return bool(rising) and _are_ids(contexts, -1, size) and _are_ids(followers, 0, size)
