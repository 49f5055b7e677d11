"""Prompts of a call, and their tokens."""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from specjax.checks import shown
from specjax.tokenizers import Tokenizer

Prompt = str | Sequence[int] | np.ndarray | Sequence[Mapping[str, Any]]


def as_list(prompts: Any) -> list[Prompt]:
    """Returns the prompts of a call as a list.

    Raises:
      TypeError: `prompts` is a single prompt or unordered.
      ValueError: there are no prompts.
    """
    if isinstance(prompts, str):
        raise TypeError("prompts must be a list of prompts, got a single text: give [text]")
    unordered = bytes | Mapping | AbstractSet
    if isinstance(prompts, unordered) or not isinstance(prompts, Iterable):
        raise TypeError(
            f"prompts must be a list of texts, lists of token ids or chats, got "
            f"{type(prompts).__name__}: {str(prompts)[:60]}"
        )
    prompts = list(prompts)
    if not prompts:
        raise ValueError("prompts is empty: give at least one prompt")
    return prompts


def encode(
    prompt: Prompt, name: str, vocab_size: int, tokenizer: Tokenizer | None = None
) -> np.ndarray:
    """Returns the tokens of a prompt.

    Args:
      prompt: a text, token ids, or the messages of a chat (dicts with `role` and `content`).
      name: its name in messages.
      vocab_size: V of the model.
      tokenizer: the tokenizer of the model; without it a prompt must be token ids.

    Returns:
      `[n]` int32 in 0 .. V - 1, n >= 1.

    Raises:
      ValueError: the prompt is empty or not valid text, has an id out of range, or is a chat for a
        tokenizer without a chat template.
      TypeError: it is neither a text, nor token ids, nor the messages of a chat.
    """
    ids: Any
    if tokenizer is not None and isinstance(prompt, str):
        if not prompt.strip():
            raise ValueError(f"{name} is empty: add text, or leave it out")
        check_unicode(prompt, name)
        ids = tokenizer.encode(prompt)
    elif tokenizer is not None and _is_chat(prompt):
        for message in prompt:
            if isinstance(message, Mapping):
                check_unicode(str(message.get("content")), name)
        try:
            ids = tokenizer.encode_chat(prompt)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    else:
        ids = _token_ids(prompt, name)
    array = np.asarray(ids)
    if not array.size:
        raise ValueError(f"{name} has no tokens: add text, or leave it out")
    bad = (array < 0) | (array >= vocab_size)  # before the cast to int32
    if bad.any():
        first = array[bad][0]
        raise ValueError(f"{name} has token {first}: tokens must be in 0 .. {vocab_size - 1}")
    return array.astype(np.int32)


def check_unicode(text: str, name: str) -> None:
    """Raises ValueError for a text with half a surrogate pair; `name` is its name."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has half a surrogate pair at character {error.start + 1}: correct or remove "
            "this character"
        ) from None


def check_truncate(truncate: Any) -> None:
    """Raises ValueError unless it is "end", "beginning" or None."""
    if truncate not in (None, "end", "beginning"):
        raise ValueError(f"truncate must be None, 'end' or 'beginning', got {truncate!r}")


def _is_chat(prompt: Any) -> bool:
    return isinstance(prompt, Sequence) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def _token_ids(prompt: Any, name: str) -> np.ndarray:
    try:
        array = np.asarray(prompt)
    except (TypeError, ValueError):  # lists of different lengths
        array = np.empty((1, 1))
    if array.ndim == 1 and (array.dtype.kind in "iu" or not array.size):
        return array
    hint = ""
    if isinstance(prompt, int | np.integer | Mapping):
        hint = " (give a single prompt as a list: [prompt])"
    raise TypeError(
        f"{name} must be a text, a list of token ids or a list of chat messages, got "
        f"{shown(prompt)}{hint}"
    )


def shortened(tokenizer: Tokenizer, tokens: np.ndarray, longest: int, side: str) -> np.ndarray:
    """Cuts the tokens of a prompt that is too long; keeps the tokenizer's special tokens.

    Args:
      tokenizer: the tokenizer of the model.
      tokens: `[n]` int32.
      longest: the most tokens to keep.
      side: "end" cuts at the end, like seqio, or "beginning".

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
