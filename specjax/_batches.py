"""Prompts of any number and length as batches of few static shapes.

Axes: n prompts, B rows of a batch, L length of a bucket.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.base import checked
from specjax.data import Tokenizer
from specjax.sampling import Sampling

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]

# Between two powers of two one more: no row is padded to more than about half as much again.
BUCKETS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
# How many times the slots may be filled before all of them run empty once. A resumed run decodes a
# segment that was begun from its start.
SEGMENT = 16
_MAX_ID = 2**31 - 1
_MAX_SEED = 2**32 - 1


@dataclasses.dataclass(frozen=True, eq=False)
class Requests:
    """Everything that is asked of each row.

    Attributes:
      tokens: n int32 arrays, the prompts.
      limits: `[n]` int32, how many tokens each may emit.
      seeds: `[n]` uint32.
      ids: `[n]` int32, the rows' random streams.
      sampling: fields `[n]`.
    """

    tokens: list[np.ndarray]
    limits: np.ndarray
    seeds: np.ndarray
    ids: np.ndarray
    sampling: Sampling


class Batch(NamedTuple):
    """Arrays of one batch; rows that only fill up its shape have the limit 0.

    Attributes:
      inputs: `[B, L]` int32.
      input_lengths: `[B]` int32.
      limits: `[B]` int32.
      seeds: `[B]` uint32.
      ids: `[B]` int32.
      sampling: fields `[B]`.
    """

    inputs: Any
    input_lengths: Any
    limits: Any
    seeds: Any
    ids: Any
    sampling: Sampling


class PromptTooLongError(ValueError):
    """A prompt has more tokens than the last bucket holds."""


def encode(tokenizer: Tokenizer, prompt: Prompt, name: str) -> np.ndarray:
    """The tokens of a prompt.

    Args:
      tokenizer: the model's.
      prompt: a text, token ids, or the messages of a chat (dicts with `role` and `content`).
      name: what messages call it.

    Returns:
      `[n]` int32, n >= 1.

    Raises:
      ValueError: if it is empty, or a chat without template.
      TypeError: if it is none of the three.
    """
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError(f"{name} is empty: give it some text, or leave it out")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{name} has half a surrogate pair at character {error.start + 1}: no text"
            ) from None
        ids = tokenizer.encode(prompt)
    elif len(prompt) and isinstance(prompt[0], Mapping):
        try:
            ids = tokenizer.encode_chat(prompt)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    else:
        array = np.asarray(prompt)
        if array.size and (array.ndim != 1 or array.dtype.kind not in "iu"):
            raise TypeError(
                f"{name} must be a text, a list of token ids or a list of chat messages, got "
                f"{str(prompt)[:60]!r}"
            )
        ids = array.tolist()
    if not ids:
        raise ValueError(f"{name} has no tokens: give it some text, or leave it out")
    return np.asarray(ids, np.int64).astype(np.int32)


def check_tokens(tokens: np.ndarray, name: str, vocab_size: int, longest: int) -> None:
    """Checks that a prompt fits.

    Args:
      tokens: the prompt.
      name: what messages call it.
      vocab_size: V.
      longest: how many tokens the last bucket holds.

    Raises:
      PromptTooLongError: if there are too many tokens.
      ValueError: if one is outside the vocabulary.
    """
    if len(tokens) > longest:
        raise PromptTooLongError(
            f"{name} has {len(tokens)} tokens, but the longest bucket holds {longest}: shorten "
            f"it, or give the Decoder buckets=(..., {len(tokens)})"
        )
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        bad = tokens[(tokens < 0) | (tokens >= vocab_size)][0]
        raise ValueError(f"{name} has token {bad}: ids must be in 0 .. {vocab_size - 1}")


def requests(
    tokens: list[np.ndarray],
    *,
    seed: Any,
    ids: Any,
    limits: Any,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    max_new: int,
) -> Requests:
    """Checks what is asked per call or per row, and gives every row its own.

    Args:
      tokens: the prompts.
      seed: one or `[n]`.
      ids: `[n]`, or None for the prompts' places.
      limits: one or `[n]`, at most `max_new`.
      temperature: one or `[n]`.
      top_k: one, `[n]` or None.
      top_p: one, `[n]` or None.
      max_new: the longest output.

    Returns:
      The requests.

    Raises:
      ValueError: for a value out of its range, or another number of them than prompts.
    """
    count = len(tokens)

    def rows(name: str, value: Any) -> Any:
        array = np.asarray(value)
        if array.shape not in ((), (count,)):
            raise ValueError(
                f"{name} has shape {list(array.shape)} for {count} prompts: give one value, or "
                "one per prompt"
            )
        return np.broadcast_to(array, (count,))

    if np.any(np.asarray(limits) > max_new):
        raise ValueError(
            f"max_new_tokens is {np.max(limits)} but this Decoder has room for {max_new}: make it "
            f"with max_new_tokens={np.max(limits)}"
        )
    limits = checked("max_new_tokens", rows("max_new_tokens", limits), low=1, dtype=np.int32)
    ids = np.arange(count) if ids is None else _whole("ids", rows("ids", ids), _MAX_ID)
    settings = Sampling(
        rows("temperature", temperature),
        None if top_k is None else rows("top_k", top_k),
        None if top_p is None else rows("top_p", top_p),
    )
    return Requests(
        tokens=tokens,
        limits=limits,
        seeds=_whole("seed", rows("seed", seed), _MAX_SEED).astype(np.uint32),
        ids=ids.astype(np.int32),
        sampling=settings,
    )


def _whole(name: str, values: np.ndarray, high: int) -> np.ndarray:
    # Not `checked`, which compares in the final dtype: these fill theirs.
    if values.dtype.kind not in "iu" or values.min() < 0 or values.max() > high:
        raise ValueError(f"{name} must be whole numbers in 0 .. {high}, got {values[0]}, ...")
    return values


def check_buckets(buckets: Sequence[int]) -> tuple[int, ...]:
    """Checks the caller's bucket lengths: whole numbers that increase, from 1 or more."""
    lengths = tuple(int(length) for length in buckets)
    if not lengths or lengths[0] < 1 or list(lengths) != sorted(set(lengths)):
        raise ValueError(f"buckets={tuple(buckets)} must increase, from 1 or more")
    return lengths


class Segment(NamedTuple):
    """Prompts that pass through one set of slots.

    Attributes:
      members: `[m]`, the prompts, those with the longest input first.
      rows: B, the slots.
      refill: n, how many finished slots are given new prompts at once.
      length: L, the bucket.
    """

    members: np.ndarray
    rows: int
    refill: int
    length: int


def plan(
    lengths: Sequence[int], buckets: Sequence[int], batch_size: int, row_multiple: int = 1
) -> Iterator[Segment]:
    """Sorts prompts by length and cuts them into segments.

    It depends on the lengths alone, and a segment on nothing before it, so that a run cut short
    finds the same segments again and decodes the unfinished ones as before.

    Args:
      lengths: of the prompts, at most the last bucket.
      buckets: increasing.
      batch_size: the slots; for fewer prompts the next power of two.
      row_multiple: what the number of rows decoded or taken in together must be a multiple of.

    Yields:
      Segments of at most `SEGMENT * B` prompts. One ends with its bucket, once it fills the slots.
    """
    rows = min(batch_size, 1 << (len(lengths) - 1).bit_length())
    rows += -rows % row_multiple
    refill = max(1, rows // 4)
    refill += -refill % row_multiple
    order = np.argsort(lengths, kind="stable")
    sizes = np.asarray(buckets)[np.searchsorted(buckets, np.asarray(lengths)[order])]
    start = 0
    for end in range(1, len(order) + 1):
        count = end - start
        last = end == len(order)
        if last or count == SEGMENT * rows or (count >= rows and sizes[end] != sizes[end - 1]):
            members = order[start:end][::-1]
            yield Segment(members, rows, refill, int(sizes[end - 1]))
            start = end


def make_batch(
    asked: Requests, members: Sequence[int], rows: int, length: int, pad_id: int
) -> Batch:
    """The arrays of `members`, padded to `rows` rows of `length` tokens."""
    inputs = np.full((rows, length), pad_id, np.int32)
    input_lengths = np.ones(rows, np.int32)
    for row, member in enumerate(members):
        prompt = asked.tokens[member]
        inputs[row, : len(prompt)] = prompt
        input_lengths[row] = len(prompt)

    def fill(values: np.ndarray) -> np.ndarray:
        out = np.zeros(rows, values.dtype)
        out[: len(members)] = values[list(members)]
        return out

    sampling = jax.tree.map(fill, asked.sampling)
    return Batch(
        inputs,
        input_lengths,
        fill(asked.limits),
        fill(asked.seeds),
        fill(asked.ids),
        sampling,
    )


def spread(tree: Any, mesh: jax.sharding.Mesh) -> Any:
    """Puts rows, the leading axis of every array, and caches' heads where the mesh's rules say."""
    from specjax.models import RaggedCache
    from specjax.partitioning import batch_shardings, cache_shardings

    def sharding(part: Any) -> Any:
        rule = cache_shardings if isinstance(part, RaggedCache) else batch_shardings
        return rule(part, mesh)

    is_cache = lambda part: isinstance(part, RaggedCache)  # noqa: E731
    return jax.device_put(tree, jax.tree.map(sharding, tree, is_leaf=is_cache))
