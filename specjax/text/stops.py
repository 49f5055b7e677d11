"""Stop strings: a row ends as soon as its text has one, which may lie across tokens.

An automaton reads the bytes of the text (Aho & Corasick 1975). What it does at a token is one entry
of a table, so that the loop needs no text: a row ends inside a block, at the very token.

Axes: S states, V vocabulary.
"""

import collections
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from specjax.decoding import Method
from specjax.text.text_models import TextModel
from specjax.tokenizers import Tokenizer
from specjax.tokenizers.tokenizer import Pieces
from specjax.types import Array

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def check_stops(stop: Any) -> tuple[str, ...]:
    """The strings that end a row.

    Raises:
      TypeError: if `stop` is no text and no tuple of them.
      ValueError: if one is empty, or has characters that stand for what is no text.
    """
    strings = (stop,) if isinstance(stop, str) else stop
    if strings is None:
        return ()
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) for s in strings):
        raise TypeError(f"stop must be texts such as ('\\n\\n', 'Q:'), got {stop!r}")
    for string in strings:
        if not string:
            raise ValueError("stop has an empty text, which every text contains: leave it out")
        if _REPLACEMENT in string or not _is_unicode(string):
            raise ValueError(
                f"stop has {string!r}, with a character that stands for what is no text: leave it "
                "out"
            )
    return tuple(dict.fromkeys(strings))


def cut(text: str, strings: Sequence[str]) -> str:
    """What stands before the stop string that is the first to be complete; of several the longest.

    So what is cut does not depend on how the text was split into tokens.

    Args:
      text: a text.
      strings: the stop strings.

    Returns:
      The beginning of `text`, all of it if it has none of them.
    """
    places = [(text.find(string), string) for string in strings]
    ends = [(start + len(string), start) for start, string in places if start >= 0]
    return text[: min(ends)[1]] if ends else text


def token_table(
    strings: Sequence[str], tokenizer: Tokenizer, vocab_size: int, *, goes_on: bool = False
) -> np.ndarray:
    """The automaton's state after each token in each state.

    State 0 is that of a text without a token, and S - 1 is kept once a stop string is complete.

    Args:
      strings: the stop strings, at least one.
      tokenizer: whose tokens the texts have.
      vocab_size: V; ids that the tokenizer does not know add no text.
      goes_on: whether the texts go on with that of a prompt.

    Returns:
      `[S, V]` int16, or int32 where there are that many states.

    Raises:
      ValueError: if what a token adds to a text depends on the others.
    """
    pieces = tokenizer.pieces()
    steps = automaton([string.encode() for string in strings])
    found = len(steps) - 1
    size = np.int16 if found + 1 < 2**15 else np.int32
    later = _over_tokens(steps, pieces.later, vocab_size)
    if goes_on:
        return later.astype(size)
    # A token without text leaves a text as empty as it was.
    empty = np.ones(vocab_size, bool)
    known = [not piece for piece in pieces.later[:vocab_size]]
    empty[: len(known)] = known
    first = np.where(empty, 0, _first(steps, pieces, vocab_size))
    table = np.concatenate([first[None], later + 1])
    return table.astype(size)


def stop_table(strings: Sequence[str], model: TextModel, method: Method) -> Array:
    """`token_table` of a model's outputs, where the method computes."""
    goes_on = model.continues_prompts
    table = token_table(strings, model.tokenizer, method.vocab_size, goes_on=goes_on)
    where = method.partitioner
    return jax.device_put(table) if where is None else where.replicate(table)


def automaton(strings: Sequence[bytes]) -> np.ndarray:
    """The states of Aho and Corasick's automaton after each byte.

    Args:
      strings: what is looked for, none of them empty.

    Returns:
      `[S, 256]` int32; 0 is the start, S - 1 is kept once one has been found.
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
    falls = [0] * len(children)  # the longest proper ending that is a beginning of a string
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


def _first(steps: np.ndarray, pieces: Pieces, vocab_size: int) -> np.ndarray:
    """`[V]`, the numbers in the table of the states after a first token."""
    return _over_tokens(steps, pieces.first, vocab_size)[0] + 1


def _over_tokens(steps: np.ndarray, pieces: Sequence[bytes], vocab_size: int) -> np.ndarray:
    """`[S, V]`, the automaton's state after the bytes of each piece."""
    known = pieces[:vocab_size]
    order = sorted(range(len(known)), key=lambda i: len(known[i]), reverse=True)
    lengths = np.array([len(known[i]) for i in order])
    states = np.tile(np.arange(len(steps), dtype=np.int32)[:, None], (1, vocab_size))
    for place in range(int(lengths.max(initial=0))):
        # The longest come first.
        longer = order[: int(np.sum(lengths > place))]
        bytes_there = np.array([known[i][place] for i in longer], np.intp)
        states[:, longer] = steps[states[:, longer], bytes_there[None]]
    return states


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
