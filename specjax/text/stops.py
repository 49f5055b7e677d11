"""Stop strings: a row ends when its text has a stop string, which may span several tokens.

An automaton reads the bytes of the text (Aho & Corasick 1975). A table has its state after each
token, so the loop needs no text: a row ends inside a block, at the completing token.

Axes: S states, V vocabulary.
"""

import collections
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from specjax.decoding import Method
from specjax.errors import UserError
from specjax.text.text_models import TextModel
from specjax.tokenizers import Tokenizer
from specjax.types import Array

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def check_stops(stop: Any) -> tuple[str, ...]:
    """Returns the checked stop strings.

    Raises:
      TypeError: `stop` is neither a text nor a tuple of texts.
      ValueError: a string is empty, or has replacement characters or half a surrogate pair.
    """
    strings = (stop,) if isinstance(stop, str) else stop
    if strings is None:
        return ()
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) for s in strings):
        raise UserError(f"stop must be texts such as ('\\n\\n', 'Q:'), got {stop!r}")
    for string in strings:
        if not string:
            raise UserError("stop has an empty text: leave it out")
        if _REPLACEMENT in string or not _is_unicode(string):
            raise UserError(
                f"stop has {string!r}, with a replacement character or half a surrogate pair: "
                "leave it out"
            )
    return tuple(dict.fromkeys(strings))


def cut(text: str, strings: Sequence[str]) -> str:
    """Cuts a text before the stop string that is completed first; of several before the longest.

    So the result does not depend on the tokens of the text.

    Args:
      text: a text.
      strings: the stop strings.

    Returns:
      The beginning of `text`, or all of it without a stop string.
    """
    places = [(text.find(string), string) for string in strings]
    ends = [(start + len(string), start) for start, string in places if start >= 0]
    return text[: min(ends)[1]] if ends else text


def token_table(
    strings: Sequence[str], tokenizer: Tokenizer, vocab_size: int, *, goes_on: bool = False
) -> np.ndarray:
    """Returns the automaton's next state for each state and token.

    State 0 is the state before the first token; S - 1 is final: a stop string is complete. A
    special token adds no text, but completes a stop string that is its own text.

    Args:
      strings: the stop strings, at least one.
      tokenizer: the tokenizer of the texts.
      vocab_size: V; ids that the tokenizer does not know add no text.
      goes_on: whether the texts continue the text of a prompt.

    Returns:
      `[S, V]` int16, or int32 if there are too many states.

    Raises:
      ValueError: the text of a token depends on other tokens.
    """
    pieces = tokenizer.all_pieces
    special = _special_tokens(strings, tokenizer, pieces.later[:vocab_size])
    steps = automaton([string.encode() for string in strings])
    found = len(steps) - 1
    size = np.int16 if found + 1 < 2**15 else np.int32
    later = _over_tokens(steps, len(steps), pieces.later, vocab_size)
    later[:, special] = found
    if goes_on:
        return later.astype(size)
    # After a token without text the text is still empty.
    empty = np.ones(vocab_size, bool)
    known = [not piece for piece in pieces.later[:vocab_size]]
    empty[: len(known)] = known
    (first,) = _over_tokens(steps, 1, pieces.first, vocab_size) + 1
    first[empty] = 0
    first[special] = found + 1
    table = np.concatenate([first[None], later + 1])
    return table.astype(size)


def _special_tokens(
    strings: Sequence[str], tokenizer: Tokenizer, pieces: Sequence[bytes]
) -> list[int]:
    """The special tokens whose texts are stop strings."""
    silent = ((i, tokenizer.token(i)) for i, piece in enumerate(pieces) if not piece)
    ids = {text: i for i, text in silent if text}
    for string in strings:
        inside = [text for text in ids if text != string and text in string]
        if string not in ids and inside:
            special = max(inside, key=len)
            warnings.warn(
                f"stop has {string!r}, but the special token {special!r} adds no text, so only its "
                f"text in other tokens counts: give {special!r} alone, which ends a row at this "
                "token",
                stacklevel=5,
            )
    return [ids[string] for string in strings if string in ids]


def stop_table(strings: Sequence[str], model: TextModel, method: Method) -> Array:
    """Returns `token_table` for a model's outputs, on the method's devices."""
    goes_on = model.continues_prompts
    table = token_table(strings, model.tokenizer, method.vocab_size, goes_on=goes_on)
    where = method.partitioner
    return jax.device_put(table) if where is None else where.replicate(table)


def automaton(strings: Sequence[bytes]) -> np.ndarray:
    """Returns the next states of Aho and Corasick's automaton for each byte.

    Args:
      strings: the strings to find, none of them empty.

    Returns:
      `[S, 256]` int32; 0 is the start, S - 1 is final: a string has been found.
    """
    children: list[dict[int, int]] = [{}]
    complete = [False]
    for string in strings:
        node = 0
        for byte in string:
            if byte not in children[node]:
                children[node][byte] = len(children)
                children.append({})
                complete.append(False)
            node = children[node][byte]
        complete[node] = True
    steps = np.zeros((len(children), 256), np.int32)
    falls = [0] * len(children)  # the longest proper suffix that is a prefix of a string
    waiting = collections.deque([0])
    while waiting:
        node = waiting.popleft()
        if node:
            steps[node] = steps[falls[node]]
        for byte, child in children[node].items():
            falls[child] = int(steps[node, byte]) if node else 0
            complete[child] |= complete[falls[child]]
            waiting.append(child)
            steps[node, byte] = child
    going = [node for node, ends in enumerate(complete) if not ends]
    numbers = np.full(len(children), len(going), np.int32)
    numbers[going] = np.arange(len(going))
    kept = np.full((1, 256), len(going), np.int32)
    return np.concatenate([numbers[steps[going]], kept])


def _over_tokens(
    steps: np.ndarray, count: int, pieces: Sequence[bytes], vocab_size: int
) -> np.ndarray:
    """`[count, V]`, the state after the bytes of each piece, from each of the first states."""
    known = pieces[:vocab_size]
    lengths = np.array([len(piece) for piece in known], np.int64)
    joined, begins = np.frombuffer(b"".join(known), np.uint8), np.cumsum(lengths) - lengths
    order = np.argsort(-lengths, kind="stable")
    states = np.tile(np.arange(count, dtype=np.int32)[:, None], (1, vocab_size))
    for place in range(int(lengths.max(initial=0))):
        # The longest pieces come first.
        longer = order[: np.count_nonzero(lengths > place)]
        bytes_there = joined[begins[longer] + place]
        states[:, longer] = steps[states[:, longer], bytes_there[None]]
    return states


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
