"""Prompts of any number and length as batches of few static shapes.

Axes: n prompts, B rows of a batch, L length of a bucket.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.checks import checked
from specjax.text.engine import Request
from specjax.tokenizers import Tokenizer
from specjax.types import Rule, Sampling

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]

# Between two powers of two one more: no row is padded to more than about half as much again.
BUCKETS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
# How many times the slots may be filled before all of them run empty once. A resumed run decodes a
# plan that was begun from its start.
TURNS = 16
_MAX_ID = 2**31 - 1
_MAX_SEED = 2**32 - 1


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
    max_new_tokens: Any,
    sampling: Mapping[str, Any],
    draft_limit: Any,
    max_draft: int,
    rule: Rule | None = None,
) -> list[Request]:
    """Checks what is asked per call or per row, and gives every row its own.

    Args:
      tokens: the n prompts.
      seed: one or `[n]`.
      ids: `[n]`, or None for the prompts' places.
      max_new_tokens: one or `[n]`.
      sampling: temperature, top_k and top_p, each one, `[n]` or None.
      draft_limit: one or `[n]` in 0 .. G, or None.
      max_draft: G.
      rule: its strengths one or `[n]` each.

    Returns:
      The requests.

    Raises:
      TypeError: for a value that is no number.
      ValueError: for a value out of its range, or another number of them than prompts.
    """
    count = len(tokens)
    limits = _one_or_each("max_new_tokens", max_new_tokens, count)
    limits = checked("max_new_tokens", limits, low=1, dtype=np.int32)
    if ids is not None:
        ids = _whole("ids", _one_or_each("ids", ids, count), _MAX_ID)
        if not ids.ndim:
            raise ValueError(f"ids is one number for {count} prompts: give one per prompt, [{ids}]")
    seeds = _whole("seed", _one_or_each("seed", seed, count), _MAX_SEED)
    drafts = None
    if draft_limit is not None:
        drafts = _one_or_each("draft_limit", draft_limit, count)
        drafts = checked("draft_limit", drafts, low=0, high=max_draft, dtype=np.int32)
    given = {k: None if v is None else _one_or_each(k, v, count) for k, v in sampling.items()}
    settings = Sampling(**given)  # type: ignore[arg-type]
    strengths = jax.tree_util.tree_leaves_with_path(rule)
    for path, strength in strengths:
        _one_or_each(f"{type(rule).__name__}{jax.tree_util.keystr(path)}", strength, count)

    def of_row(value: Any, row: int) -> Any:
        return value if value is None or not np.ndim(value) else value[row]

    return [
        Request(
            tokens=prompt,
            limit=int(of_row(limits, row)),
            seed=int(of_row(seeds, row)),
            stream=row if ids is None else int(ids[row]),
            **{name: of_row(getattr(settings, name), row) for name in _SETTINGS},
            draft_limit=None if drafts is None else int(of_row(drafts, row)),
            strengths=None if rule is None else tuple(of_row(x, row) for _, x in strengths),
        )
        for row, prompt in enumerate(tokens)
    ]


_SETTINGS = ("temperature", "top_k", "top_p")


def _one_or_each(name: str, value: Any, count: int) -> np.ndarray:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):  # a key, or lists of several lengths
        array = np.asarray("")
    if array.dtype.kind in "US":
        shown = " ".join(repr(value).split())[:60]
        raise TypeError(f"{name} must be one number, or one per prompt, got {shown}")
    if array.shape not in ((), (count,)):
        raise ValueError(
            f"{name} has shape {list(array.shape)} for {count} prompts: give one value, or one per "
            "prompt"
        )
    return array


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


class SlotPlan(NamedTuple):
    """Prompts that pass through one set of slots.

    Attributes:
      members: `[m]`, the places of the prompts, those with the longest input first.
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
) -> Iterator[SlotPlan]:
    """Sorts prompts by length and cuts them into plans.

    It depends on the lengths alone, and a plan on nothing before it, so that a run cut short finds
    the same plans again and decodes the unfinished ones as before.

    Args:
      lengths: of the prompts, at most the last bucket.
      buckets: increasing.
      batch_size: the slots; for fewer prompts the next power of four: few shapes.
      row_multiple: what the number of rows decoded or taken in together must be a multiple of.

    Yields:
      Plans of at most `TURNS * B` prompts. One ends with its bucket, once it fills the slots.
    """
    rows = 1
    while rows < min(batch_size, len(lengths)):
        rows *= 4
    rows = min(rows, batch_size)
    rows += -rows % row_multiple
    refill = max(1, rows // 4)
    refill += -refill % row_multiple
    order = np.argsort(lengths, kind="stable")
    sizes = np.asarray(buckets)[np.searchsorted(buckets, np.asarray(lengths)[order])]
    start = 0
    for end in range(1, len(order) + 1):
        count = end - start
        last = end == len(order)
        if last or count == TURNS * rows or (count >= rows and sizes[end] != sizes[end - 1]):
            yield SlotPlan(order[start:end][::-1], rows, refill, int(sizes[end - 1]))
            start = end
