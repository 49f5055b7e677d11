"""Prompts of any number and length as batches of few static shapes.

Axes: n prompts, B rows of a batch, L length of a bucket.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.checks import checked
from specjax.rules import Rule
from specjax.sampling import Sampling
from specjax.tokenizers import Tokenizer

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
      rule: each strength one number or `[n]`; None where one model decodes alone.
    """

    tokens: list[np.ndarray]
    limits: np.ndarray
    seeds: np.ndarray
    ids: np.ndarray
    sampling: Sampling
    rule: Rule | None = None

    def rule_of(self, slots: Sequence[int | None]) -> Rule | None:
        """The rule whose strengths per row are those of the prompts in the slots (None: any)."""
        places = [place or 0 for place in slots]
        return jax.tree.map(lambda x: np.asarray(x)[places] if np.ndim(x) else x, self.rule)


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


def as_list(prompts: Any) -> list[Prompt]:
    """The prompts of a call.

    Raises:
      TypeError: for what is one prompt rather than several, or in no order.
      ValueError: if there are none.
    """
    if isinstance(prompts, str):
        raise TypeError("prompts is a single text: give a list of them, such as [text]")
    unordered = bytes | Mapping | AbstractSet
    if isinstance(prompts, unordered) or not isinstance(prompts, Iterable):
        raise TypeError(
            f"prompts must be a list of texts, of lists of token ids or of chats, got "
            f"{type(prompts).__name__}: {str(prompts)[:60]}"
        )
    prompts = list(prompts)
    if not prompts:
        raise ValueError("prompts is empty: give at least one")
    return prompts


def encode(tokenizer: Tokenizer, prompt: Prompt, name: str) -> np.ndarray:
    """The tokens of a prompt.

    Args:
      tokenizer: the model's.
      prompt: a text, token ids, or the messages of a chat (dicts with `role` and `content`).
      name: what messages call it.

    Returns:
      `[n]` int32, n >= 1.

    Raises:
      ValueError: if it is empty, no text, a chat without template, or an id is past int32.
      TypeError: if it is none of the three.
    """
    ids: Any
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
    elif isinstance(prompt, Sequence) and len(prompt) and isinstance(prompt[0], Mapping):
        try:
            ids = tokenizer.encode_chat(prompt)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    else:
        ids = _token_ids(prompt, name)
    array = np.asarray(ids)
    if not array.size:
        raise ValueError(f"{name} has no tokens: give it some text, or leave it out")
    if array.max() > _MAX_ID:  # before it wraps around into the vocabulary
        raise ValueError(f"{name} has token {array.max()}: ids must be below the vocabulary's size")
    return array.astype(np.int32)


def _token_ids(prompt: Any, name: str) -> np.ndarray:
    try:
        array = np.asarray(prompt)
    except (TypeError, ValueError):  # lists in it are of several lengths
        array = np.empty((1, 1))
    if array.ndim == 1 and (array.dtype.kind in "iu" or not array.size):
        return array
    hint = ""
    if isinstance(prompt, int | np.integer | Mapping):
        hint = " (one prompt alone goes into a list of its own: [prompt])"
    raise TypeError(
        f"{name} must be a text, a list of token ids or a list of chat messages, got "
        f"{str(prompt)[:60]!r}{hint}"
    )


def check_tokens(tokens: np.ndarray, name: str, vocab_size: int, longest: int) -> None:
    """Checks that a prompt fits.

    Args:
      tokens: the prompt.
      name: what messages call it.
      vocab_size: V.
      longest: how many tokens the last bucket holds.

    Raises:
      ValueError: if there are too many tokens, or one is outside the vocabulary.
    """
    if len(tokens) > longest:
        raise ValueError(
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
    rule: Rule | None = None,
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
      rule: its strengths one or `[n]` each.

    Returns:
      The requests.

    Raises:
      TypeError: for a value that is no number.
      ValueError: for a value out of its range, or another number of them than prompts.
    """
    count = len(tokens)

    def given(name: str, value: Any) -> Any:
        try:
            array = np.asarray(value)
        except (TypeError, ValueError):  # a key, or lists of several lengths
            array = np.asarray("")
        if array.dtype.kind in "US":
            shown = " ".join(repr(value).split())[:60]
            raise TypeError(f"{name} must be one number, or one per prompt, got {shown}")
        if array.shape not in ((), (count,)):
            raise ValueError(
                f"{name} has shape {list(array.shape)} for {count} prompts: give one value, or "
                "one per prompt"
            )
        return array

    def rows(array: np.ndarray) -> np.ndarray:
        return np.broadcast_to(array, (count,))

    limits = checked("max_new_tokens", given("max_new_tokens", limits), low=1, dtype=np.int32)
    if limits.max() > max_new:
        raise ValueError(
            f"max_new_tokens is {limits.max()} but this Decoder has room for {max_new}: make it "
            f"with max_new_tokens={limits.max()}"
        )
    ids = np.arange(count) if ids is None else _whole("ids", given("ids", ids), _MAX_ID)
    if not ids.ndim:
        raise ValueError(f"ids is one number for {count} prompts: give one per prompt, [{ids}]")
    settings = Sampling(
        given("temperature", temperature),
        None if top_k is None else given("top_k", top_k),
        None if top_p is None else given("top_p", top_p),
    )
    for path, strength in jax.tree_util.tree_leaves_with_path(rule):
        given(f"{type(rule).__name__}{jax.tree_util.keystr(path)}", strength)
    return Requests(
        tokens=tokens,
        limits=rows(limits),
        seeds=rows(_whole("seed", given("seed", seed), _MAX_SEED).astype(np.uint32)),
        ids=ids.astype(np.int32),
        sampling=jax.tree.map(rows, settings),
        rule=rule,
    )


def _whole(name: str, values: np.ndarray, high: int) -> np.ndarray:
    # Not `checked`, which compares in the final dtype: these fill theirs.
    numbers = values.dtype.kind in "iu"
    bad = (values < 0) | (values > high) if numbers else np.ones(values.shape, bool)
    if np.any(bad):
        row = f" in row {np.argmax(bad)}" if values.ndim else ""
        raise ValueError(
            f"{name} must be whole numbers in 0 .. {high}, got "
            f"{values.reshape(-1)[np.argmax(bad)]}{row}"
        )
    return values


def check_buckets(buckets: Sequence[int]) -> tuple[int, ...]:
    """Checks the caller's bucket lengths: whole numbers that increase, from 1 or more."""
    lengths: Any = checked("buckets", buckets, low=1, dtype=np.int32)
    if not lengths.ndim or np.any(np.diff(lengths) < 1):
        raise ValueError(f"buckets={buckets} must be lengths that increase, such as (64, 128)")
    return tuple(lengths.tolist())


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
