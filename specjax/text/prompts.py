"""Puts prompts of any number and length into batches of few static shapes.

Axes: n prompts, B rows of a batch, L length of a bucket.
"""

import bisect
import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import jax
import numpy as np

from specjax.checks import check_count, checked
from specjax.text.requests import SETTINGS, Request
from specjax.tokenizers import Tokenizer
from specjax.types import Rule, Sampling

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]

# Powers of two and one length in between: padding adds at most about half to a row.
BUCKETS = (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
# How often the slots may be filled before all must be empty once.
TURNS = 16
# The same where a resumed run must decode an unfinished plan from its start.
TURNS_AGAIN = 4
_MAX_ID = 2**31 - 1
_MAX_SEED = 2**32 - 1


def as_list(prompts: Any) -> list[Prompt]:
    """The prompts of a call.

    Raises:
      TypeError: if `prompts` is a single prompt or has no order.
      ValueError: if there are no prompts.
    """
    if isinstance(prompts, str):
        raise TypeError("prompts must be a list of prompts, got a single text: give [text]")
    unordered = bytes | Mapping | AbstractSet
    if isinstance(prompts, unordered) or not isinstance(prompts, Iterable):
        raise TypeError(
            f"prompts must be a list of texts, of lists of token ids or of chats, got "
            f"{type(prompts).__name__}: {str(prompts)[:60]}"
        )
    prompts = list(prompts)
    if not prompts:
        raise ValueError("prompts is empty: give at least one prompt")
    return prompts


def encode(tokenizer: Tokenizer, prompt: Prompt, name: str) -> np.ndarray:
    """The tokens of a prompt.

    Args:
      tokenizer: the tokenizer of the model.
      prompt: a text, token ids, or the messages of a chat (dicts with `role` and `content`).
      name: its name in messages.

    Returns:
      `[n]` int32, n >= 1.

    Raises:
      ValueError: if it is empty, is not valid text, has an id above int32, or is a chat and the
        tokenizer has no chat template.
      TypeError: if it is neither a text, nor token ids, nor the messages of a chat.
    """
    ids: Any
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError(f"{name} is empty: give it some text, or leave it out")
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{name} has half a surrogate pair at character {error.start + 1}, which is not "
                "text: correct or remove it"
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
    if array.max() > _MAX_ID:  # int32 would wrap it around into the vocabulary
        raise ValueError(f"{name} has token {array.max()}: ids must be below the vocabulary size")
    return array.astype(np.int32)


def shortened(tokenizer: Tokenizer, tokens: np.ndarray, longest: int, side: str) -> np.ndarray:
    """The tokens of a prompt, cut where they are too many.

    The token that the tokenizer puts at the other end of a prompt, and the one at this end, stay.

    Args:
      tokenizer: the tokenizer of the model.
      tokens: `[n]` int32.
      longest: how many may stay.
      side: "end" cuts at the end, as seqio does, or "beginning".

    Returns:
      `[min(n, longest)]` int32.
    """
    if len(tokens) <= longest:
        return tokens
    first = int(tokenizer.add_bos and tokens[0] == tokenizer.bos_id and longest > 1)
    last = int(tokenizer.add_eos and tokens[-1] in tokenizer.eos_ids and longest > 1 + first)
    head, body, tail = np.split(tokens, [first, len(tokens) - last])
    kept = longest - first - last
    body = body[:kept] if side == "end" else body[len(body) - kept :]
    return np.concatenate([head, body, tail])


def _token_ids(prompt: Any, name: str) -> np.ndarray:
    try:
        array = np.asarray(prompt)
    except (TypeError, ValueError):  # its lists have different lengths
        array = np.empty((1, 1))
    if array.ndim == 1 and (array.dtype.kind in "iu" or not array.size):
        return array
    hint = ""
    if isinstance(prompt, int | np.integer | Mapping):
        hint = " (give a single prompt as a list: [prompt])"
    raise TypeError(
        f"{name} must be a text, a list of token ids or a list of chat messages, got "
        f"{repr(prompt)[:60]}{hint}"
    )


def check_tokens(tokens: np.ndarray, name: str, vocab_size: int, longest: int) -> None:
    """Checks that a prompt fits into the last bucket and the vocabulary.

    Args:
      tokens: the prompt.
      name: its name in messages.
      vocab_size: V.
      longest: the length of the last bucket.

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
    """Checks values that are given per call or per row, and makes one request per row.

    Args:
      tokens: the n prompts.
      seed: one number or `[n]`.
      ids: `[n]`, or None for the places of the prompts.
      max_new_tokens: one number or `[n]`.
      sampling: temperature, top_k and top_p; each is one number, `[n]` or None.
      draft_limit: one number or `[n]` in 0 .. G, or None.
      max_draft: G.
      rule: the rule, whose strengths are one number or `[n]` each; or None.

    Returns:
      The requests.

    Raises:
      TypeError: if a value is not a number.
      ValueError: if a value is out of its range, or there are not as many values as prompts.
    """
    count = len(tokens)
    limits = _one_or_each("max_new_tokens", max_new_tokens, count)
    limits = checked("max_new_tokens", limits, low=1, dtype=np.int32)
    if ids is not None:
        ids = _whole("ids", _one_or_each("ids", ids, count), _MAX_ID)
        if not ids.ndim:
            raise ValueError(f"ids must be a list of {count} numbers, one per prompt, got {ids}")
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
            **{name: of_row(getattr(settings, name), row) for name in SETTINGS},
            draft_limit=None if drafts is None else int(of_row(drafts, row)),
            strengths=None if rule is None else tuple(of_row(x, row) for _, x in strengths),
        )
        for row, prompt in enumerate(tokens)
    ]


def check_options(given: Iterable[str], known: Sequence[str]) -> None:
    """Raises TypeError if an option of a call is not among those that there are."""
    for name in given:
        close = difflib.get_close_matches(name, known, n=1)
        hint = f", did you mean {close[0]}?" if close else ""
        raise TypeError(f"there is no option {name}{hint}; the options are {', '.join(known)}")


def check_done(done: Any, count: int) -> Mapping[int, int] | frozenset[int]:
    """Places 0 .. count - 1 of prompts, or a mapping from them to rounds.

    Raises:
      TypeError: if `done` is no collection, or a number of rounds is none.
      ValueError: if there is no prompt at one of the places.
    """
    try:
        found = dict(done) if isinstance(done, Mapping) else frozenset(done)
    except TypeError:
        raise TypeError(f"done must be places of prompts, such as {{0, 3}}, got {done!r}") from None
    if absent := set(found).difference(range(count)):
        raise ValueError(
            f"done names {sorted(absent, key=str)[0]!r}, but the prompts' places are "
            f"0 .. {count - 1}"
        )
    for place, rounds in found.items() if isinstance(found, Mapping) else ():
        check_count(f"done[{place}]", rounds, "give the row's info.rounds")
    return found


def check_limits(asked: Sequence[Request], max_new: int) -> None:
    """Raises ValueError if a row may emit more than there is room for."""
    longest = max(request.limit for request in asked)
    if longest > max_new:
        raise ValueError(
            f"max_new_tokens is {longest} but this Decoder has room for {max_new}: make it with "
            f"max_new_tokens={longest}"
        )


def _one_or_each(name: str, value: Any, count: int) -> np.ndarray:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError):  # a key, or lists of different lengths
        array = np.asarray("")
    if array.dtype.kind in "US":
        shown = " ".join(repr(value).split())[:60]
        raise TypeError(f"{name} must be one number, or one per prompt, got {shown}")
    if array.shape not in ((), (count,)):
        raise ValueError(
            f"{name} has shape {list(array.shape)}, but there are {count} prompts: give one "
            "value or one per prompt"
        )
    return array


def _whole(name: str, values: np.ndarray, high: int) -> np.ndarray:
    # Not `checked`, which compares in the final dtype: seeds use its whole range.
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
    """Checks the bucket lengths of a caller: they must be whole, at least 1, and increase."""
    if np.shape(buckets) == (0,):
        raise ValueError("buckets is empty: give lengths such as (64, 128)")
    lengths: Any = checked("buckets", buckets, low=1, dtype=np.int32)
    if not lengths.ndim or np.any(np.diff(lengths) < 1):
        raise ValueError(f"buckets must be lengths that increase, such as (64, 128), got {buckets}")
    return tuple(lengths.tolist())


class SlotPlan(NamedTuple):
    """Prompts that are decoded in one set of slots.

    Attributes:
      members: `[m]`, the places of the prompts, the longest prompt first.
      rows: B, the number of slots.
      refill: n, the number of finished slots that get new prompts at once.
      length: L, the length of the bucket.
    """

    members: np.ndarray
    rows: int
    refill: int
    length: int


def plan(
    lengths: Sequence[int],
    buckets: Sequence[int],
    batch_size: int,
    row_multiple: int = 1,
    turns: int = TURNS,
) -> Iterator[SlotPlan]:
    """Sorts prompts by length and splits them into plans.

    The plans depend only on the arguments, and decoding a plan does not depend on the plans before
    it. So a resumed run finds the same plans, and what is missing of them comes out as before.

    Args:
      lengths: the lengths of the prompts, at most that of the last bucket.
      buckets: the lengths of the buckets, increasing.
      batch_size: the number of slots. Fewer prompts get the next power of four of slots, so that
        there are few shapes.
      row_multiple: slots and refills are multiples of this.
      turns: how often the slots may be filled in one plan.

    Yields:
      Plans of at most `turns * B` prompts. A plan that fills the slots ends at the next end of a
      bucket.
    """
    rows = 1
    while rows < min(batch_size, len(lengths)):
        rows *= 4
    rows = min(rows, batch_size)
    rows += -rows % row_multiple
    refill = max(1, rows // 4)
    refill += -refill % row_multiple
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    sizes = [buckets[bisect.bisect_left(buckets, lengths[place])] for place in order]
    start = 0
    for end in range(1, len(order) + 1):
        count = end - start
        last = end == len(order)
        if last or count == turns * rows or (count >= rows and sizes[end] != sizes[end - 1]):
            yield SlotPlan(np.array(order[start:end][::-1]), rows, refill, int(sizes[end - 1]))
            start = end
