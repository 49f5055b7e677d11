"""Prompts of a call, and their tokens."""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from specjax.checks import shown
from specjax.errors import UserError
from specjax.tokenizers import Tokenizer
from specjax.tokenizers.chat_template import plain
from specjax.tokenizers.tokenizer import warn_of_two_bos

Prompt = str | Sequence[int] | np.ndarray | Sequence[Mapping[str, Any]]


def as_list(prompts: Any) -> list[Prompt]:
    """Returns the prompts of a call as a list.

    Raises:
      TypeError: `prompts` is a single prompt or unordered.
      ValueError: there are no prompts.
    """
    if isinstance(prompts, str):
        raise UserError("prompts must be a list of prompts, got a single text: give [text]")
    unordered = bytes | Mapping | AbstractSet
    if isinstance(prompts, unordered) or not isinstance(prompts, Iterable):
        raise UserError(
            f"prompts must be a list of texts, lists of token ids or chats, got "
            f"{type(prompts).__name__}: {str(prompts)[:60]}"
        )
    prompts = list(prompts)
    if not prompts:
        raise UserError("prompts is empty: give at least one prompt")
    return prompts


def encode(
    prompt: Prompt,
    name: str,
    vocab_size: int,
    tokenizer: Tokenizer | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> np.ndarray:
    """Returns the tokens of a prompt.

    Args:
      prompt: a text, token ids, or the messages of a chat (dicts with `role` and `content`).
      name: its name in messages.
      vocab_size: V of the model.
      tokenizer: the tokenizer of the model; without it a prompt must be token ids.
      chat_template_kwargs: options of `Tokenizer.encode_chat`, for the messages of a chat.

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
            raise UserError(f"{name} is empty: add text, or leave it out")
        check_unicode(prompt, name)
        try:
            ids = tokenizer.encode(prompt)
        except ValueError as error:
            raise UserError(f"{name}: {error}") from None
    elif tokenizer is not None and _is_chat(prompt):
        for message in prompt:
            if isinstance(message, Mapping):
                check_unicode(str(message.get("content")), name)
        try:
            options = chat_template_kwargs or {}
            ids = tokenizer.encode_chat(prompt, **options)  # type: ignore[arg-type]
        except ValueError as error:
            raise UserError(f"{name}: {error}") from None
    else:
        ids = _token_ids(prompt, name)
        if isinstance(tokenizer, Tokenizer):
            warn_of_two_bos(tokenizer, ids, "remove one")
    array = np.asarray(ids)
    if not array.size:
        raise UserError(f"{name} has no tokens: add text, or leave it out")
    bad = (array < 0) | (array >= vocab_size)  # before the cast to int32
    if bad.any():
        first = array[bad][0]
        raise UserError(f"{name} has token {first}: tokens must be in 0 .. {vocab_size - 1}")
    return array.astype(np.int32)


def checked_template_kwargs(options: Any) -> dict[str, Any]:
    """Returns a plain copy of the options of a chat template; {} for None.

    Raises:
      TypeError: they are not a mapping from names.
      ValueError: a value is not of JSON's types, or the messages are among them.
    """
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not all(isinstance(key, str) for key in options):
        raise UserError(
            "chat_template_kwargs must be options by name, such as {'enable_thinking': False}, got "
            f"{options!r}"
        )
    if "messages" in options:
        raise UserError("chat_template_kwargs must not have messages: give them as a prompt")
    return plain("chat_template_kwargs", dict(options))


def checked_chat(name: str, chat: Any) -> dict[str, Any] | None:
    """Returns the options of the chat template for inputs that are messages, or None for texts.

    Args:
      name: the name of the value in messages.
      chat: whether inputs are messages of the user; or options of the chat template.

    Raises:
      TypeError: it is neither.
      ValueError: as `checked_template_kwargs`.
    """
    if isinstance(chat, Mapping):
        return checked_template_kwargs(chat)
    if not isinstance(chat, bool):
        raise UserError(
            f"{name} must be True or False, or options of the chat template such as "
            f"{{'enable_thinking': False}}, got {chat!r}"
        )
    return {} if chat else None


def check_unicode(text: str, name: str) -> None:
    """Raises ValueError for a text with half a surrogate pair; `name` is its name."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{name} has half a surrogate pair at character {error.start + 1}: correct or remove "
            "this character"
        ) from None


def check_truncate(truncate: Any) -> None:
    """Raises ValueError unless it is "end", "beginning" or None."""
    if truncate not in (None, "end", "beginning"):
        raise UserError(f"truncate must be None, 'end' or 'beginning', got {truncate!r}")


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
    raise UserError(
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
