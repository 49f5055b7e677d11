"""Stop strings: a row ends when its text has a stop string, which may span several tokens.

An automaton reads the bytes of the text (Aho & Corasick 1975). A table has its state after each
token, so the loop needs no text: a row ends inside a block, at the completing token.

Axes: S states, V vocabulary.
"""

import collections
import dataclasses
import functools
import warnings
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int, Int32

from specjax.errors import UserError
from specjax.text.results import Row
from specjax.text.text_models import TextModel
from specjax.tokenizers import Tokenizer, added_text
from specjax.tokenizers.tokenizer import common_prefix
from specjax.types import Array

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# The fewest states of the table of an engine. More are a power of two, so few shapes are compiled.
_FEWEST = 32
# Bytes of an engine's or a prompt's texts; the table has a row for each.
_MOST = 4096


def check_stops(stop: Any) -> tuple[str, ...]:
    """Returns the checked stop strings."""
    strings = (stop,) if isinstance(stop, str) else stop
    if strings is None:
        return ()
    if not isinstance(strings, list | tuple) or not all(isinstance(s, str) for s in strings):
        raise UserError(f"stop must be texts such as ('\\n\\n', 'Q:'), got {stop!r}")
    for string in strings:
        if not string:
            raise UserError("stop has an empty text: leave it out")
        if _REPLACEMENT in string or any("\ud800" <= char <= "\udfff" for char in string):
            raise UserError(
                f"stop has {string!r}, with a replacement character or half a surrogate pair: "
                "leave it out"
            )
    if (size := sum(len(string.encode()) for string in strings)) > _MOST:
        raise UserError(
            f"stop has {size:,} bytes, more than {_MOST:,}: give shorter or fewer texts"
        )
    return tuple(dict.fromkeys(strings))


def cut(text: str, strings: Sequence[str]) -> str:
    """Cuts a text before the stop string that is completed first; of several before the longest.

    So the result does not depend on the tokens of the text.
    """
    places = [(text.find(string), string) for string in strings]
    ends = [(start + len(string), start) for start, string in places if start >= 0]
    return text[: min(ends)[1]] if ends else text


def stop_table(strings: Sequence[str], model: TextModel) -> Int[np.ndarray, "S V"]:
    """Returns `token_table` for a model's outputs."""
    goes_on = model.continues_prompts
    return token_table(strings, model.tokenizer, model.model.vocab_size, goes_on=goes_on)


class StopBlocks:
    """A table for rows with different stop strings: each set's automaton is a block of its states.

    The automaton of `strings`, those of rows without their own, begins at state 0. `starts` maps
    the strings of a row to its state before the first token.
    """

    def __init__(self, model: TextModel, strings: tuple[str, ...]) -> None:
        self._model, self._vocab_size = model, model.model.vocab_size
        self._blocks = {strings: self._block(strings)}
        self.starts, self._size = {strings: 0}, _FEWEST
        self._table: Array | None = None

    @property
    def table(self) -> Array:
        """`[S, V]`, for `Method.run`; another array after new strings."""
        if self._table is None:
            final = self._size - 1
            table = np.full((self._size, self._vocab_size), final, np.int32)
            for strings, start in self.starts.items():
                block = self._blocks[strings]
                table[start : start + len(block)] = np.where(block < 0, final, block + start)
            self._table = self._model.place(table.astype(_integers(self._size)))
        return self._table

    def add(self, strings: tuple[str, ...], used: Collection[tuple[str, ...]]) -> None:
        """Adds the strings of a row; none for a row that no string ends.

        The states of strings that are not in `used`, those of all rows, may be used again.
        """
        if strings in self.starts:
            return
        block, (_, *others) = self._block(strings), self.starts
        for old in others:
            if old not in used:
                del self.starts[old], self._blocks[old]
        place = 0
        for other, start in sorted(self.starts.items(), key=lambda item: item[1]):
            if start - place >= len(block):
                break
            place = start + len(self._blocks[other])
        while place + len(block) >= self._size:
            self._size *= 2
        self._blocks[strings], self.starts[strings], self._table = block, place, None

    def _block(self, strings: tuple[str, ...]) -> Int32[np.ndarray, "S V"]:
        """The automaton without its final state, which is -1."""
        if not strings:
            return np.zeros((1, self._vocab_size), np.int32)
        table = stop_table(strings, self._model)
        return np.where(table == len(table) - 1, -1, table)[:-1].astype(np.int32)


def _integers(states: int) -> type:
    return np.int16 if states <= 2**15 else np.int32


def token_table(
    strings: Sequence[str], tokenizer: Tokenizer, vocab_size: int, *, goes_on: bool = False
) -> Int[np.ndarray, "S V"]:
    """Returns the automaton's next state for each state and token.

    State 0 is the state before the first token; S - 1 is final: a stop string is complete. A
    special token adds no text, but completes a stop string that is its own text.

    `goes_on`: the texts continue the text of a prompt. Ids that the tokenizer does not know add no
    text. Entries are int16, or int32 if there are too many states.

    Raises:
      UserError: the text of a token depends on other tokens.
    """
    pieces = tokenizer.all_pieces
    special = _special_tokens(strings, tokenizer, pieces.later[:vocab_size])
    steps = automaton([string.encode() for string in strings])
    final = len(steps) - 1
    later = _over_tokens(steps, len(steps), pieces.later, vocab_size)
    later[:, special] = final
    if goes_on:
        return later.astype(_integers(final + 2))
    # After a token without text the text is still empty.
    empty = np.ones(vocab_size, bool)
    without_text = [not piece for piece in pieces.later[:vocab_size]]
    empty[: len(without_text)] = without_text
    (first,) = _over_tokens(steps, 1, pieces.first, vocab_size) + 1
    first[empty] = 0
    first[special] = final + 1
    table = np.concatenate([first[None], later + 1])
    return table.astype(_integers(final + 2))


def _special_tokens(
    strings: Sequence[str], tokenizer: Tokenizer, pieces: Sequence[bytes]
) -> list[int]:
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
                stacklevel=6,
            )
    return [ids[string] for string in strings if string in ids]


def automaton(strings: Sequence[bytes]) -> Int32[np.ndarray, "S 256"]:
    """Returns the next states of Aho and Corasick's automaton for each byte.

    State 0 is the start; S - 1 is final: one of the strings, none of them empty, has been found.
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
    last = np.full((1, 256), len(going), np.int32)
    return np.concatenate([numbers[steps[going]], last])


def _over_tokens(
    steps: np.ndarray, count: int, pieces: Sequence[bytes], vocab_size: int
) -> np.ndarray:
    """`[count, V]`, the state after the bytes of each piece, from each of the first states."""
    pieces = pieces[:vocab_size]
    lengths = np.array([len(piece) for piece in pieces], np.int64)
    joined, begins = np.frombuffer(b"".join(pieces), np.uint8), np.cumsum(lengths) - lengths
    order = np.argsort(-lengths, kind="stable")
    states = np.tile(np.arange(count, dtype=np.int32)[:, None], (1, vocab_size))
    for place in range(int(lengths.max(initial=0))):
        # The longest pieces come first.
        longer = order[: np.count_nonzero(lengths > place)]
        bytes_there = joined[begins[longer] + place]
        states[:, longer] = steps[states[:, longer], bytes_there[None]]
    return states


@dataclasses.dataclass(frozen=True, eq=False)
class Added:
    """The text that a row got in a step; the texts of a row together are its `text`.

    `index` and `sample` are the row's, `emitted` its number of tokens so far. `row` is the row,
    once it is finished.
    """

    index: int
    sample: int
    text: str
    emitted: int
    row: Row | None = None


class StreamedText:
    """The text of a row, token by token.

    It holds back incomplete characters, and the beginning of a text that may become a stop string.
    """

    def __init__(self, model: TextModel, prompt: np.ndarray, stop: Sequence[str]) -> None:
        self._words = model.tokenizer
        self._before = prompt.tolist() if model.continues_prompts else []
        self._stop, self._read, self._text, self._sent = stop, 0, "", 0

    def more(self, tokens: np.ndarray) -> str:
        """Returns the text that became certain, from all tokens of the unfinished row."""
        by_token, breaks = _breaking(self._words)
        new = tokens[self._read :].tolist()
        if not by_token or not new:
            return ""
        text = certain = added_text(self._words, self._before, new)
        if breaks is not None:
            # Some decoders read a run of bytes as a whole, so a later byte may change all of it.
            broken = added_text(self._words, self._before, [*new, breaks])
            certain = common_prefix(text, broken).rstrip(_REPLACEMENT)
        whole = self._text + certain
        if certain and certain == text:
            # The next tokens are read after these alone: reading all again would take longer.
            self._text, self._before, self._read = whole, new, len(tokens)
        until_stop = cut(whole, self._stop)
        # A stop string across bytes that are left out of the text does not end the row.
        end = len(until_stop)
        if until_stop == whole:
            end -= _pending(whole, self._stop)
        added, self._sent = whole[self._sent : end], max(self._sent, end)
        return added

    def rest(self, text: str) -> str:
        """Returns what `more` has held back of the finished row's text."""
        return text[self._sent :]


def _pending(text: str, strings: Sequence[str]) -> int:
    """The length of the longest end of `text` with which a string may begin."""
    ends = (
        length
        for string in strings
        for length in range(min(len(string) - 1, len(text)), 0, -1)
        if text.endswith(string[:length])
    )
    return max(ends, default=0)


@functools.lru_cache(maxsize=8)
def _breaking(tokenizer: Tokenizer) -> tuple[bool, int | None]:
    """Whether texts can be read token by token, and a token that is not a whole character."""
    try:
        pieces = tokenizer.all_pieces.later
    except ValueError:
        return False, None
    parts = [i for i, piece in enumerate(pieces) if _REPLACEMENT in piece.decode(errors="replace")]
    return True, min(parts, key=lambda i: pieces[i] != b"\xff", default=None)
