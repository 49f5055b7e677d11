"""Automata over the tokens of a tokenizer, from automata over bytes.

Most tokens act alike: in a JSON string nearly every word does. Tokens that lead from every state to
the same state are a class, so the table has a column per class and not per token.

Axes: S states, V vocabulary, C classes of tokens, K languages.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from specjax.errors import UserError
from specjax.processors.byte_automata import FAR, ByteAutomaton, fewest_steps, members
from specjax.processors.common import padded_size
from specjax.tokenizers.tokenizer import Pieces

# The largest table, in bytes.
MOST_BYTES = 512 << 20
# Pairs of a state and a token that are followed together.
_PAIRS = 4_000_000
# Entries of a table that are read together.
_ENTRIES = 1 << 22
_SECONDS = 120.0
# The fewest states and classes of a padded table.
_LEAST = (256, 64)

Pairs = Callable[[], Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]]


class TokenAutomaton(NamedTuple):
    """What each token does to a text.

    Attributes:
      table: the state after a token of each class; -1 if the token must not follow. In state S - 1
        the text has ended, and any token may follow.
      classes: the class of each token.
      distances: the fewest tokens to a state in which the text may end.
      starts: the first state of each language.
    """

    table: Int32[np.ndarray, "S C"]
    classes: Int32[np.ndarray, " V"]
    distances: Int32[np.ndarray, " S"]
    starts: Int32[np.ndarray, " K"]


class TokenTable(NamedTuple):
    """A `TokenAutomaton` without its starts, with powers of two of states and classes.

    No token is of an added class, and no text leads to an added state.
    """

    table: Int32[np.ndarray, "S C"]
    classes: Int32[np.ndarray, " V"]
    distances: Int32[np.ndarray, " S"]


def padded(automaton: TokenAutomaton) -> TokenTable:
    """Returns the table of an automaton, in one of few shapes."""
    states, classes = automaton.table.shape
    size, width = map(padded_size, automaton.table.shape, _LEAST)
    table, distances = np.full((size, width), -1, np.int32), np.full(size, FAR)
    moved = np.where(automaton.table == states - 1, size - 1, automaton.table)
    table[: states - 1, :classes] = moved[:-1]
    table[-1] = size - 1
    distances[: states - 1], distances[-1] = automaton.distances[:-1], automaton.distances[-1]
    return TokenTable(table, automaton.classes, distances)


def token_automaton(
    languages: Sequence[ByteAutomaton],
    pieces: Pieces,
    vocab_size: int,
    eos_ids: Sequence[int],
    *,
    goes_on: bool = False,
) -> TokenAutomaton:
    """Compiles languages for a tokenizer. A text ends with an end-of-sequence token.

    Args:
      languages: K automata.
      pieces: the bytes of each token.
      vocab_size: V; ids without a piece never follow.
      eos_ids: the tokens that end a text; they follow only a text of the language.
      goes_on: whether texts continue the text of a prompt.

    Raises:
      UserError: no text of the tokenizer's tokens belongs to a language, or the table is too
        large, or takes too long.
    """
    steps, accepting, starts = _joined(languages)
    alike = _alike(steps, pieces, vocab_size, eos_ids)
    texts, vocab_size, eos_ids = alike.texts, len(alike.texts[0]), alike.eos_ids
    # The first states read the first token, which may lose its space.
    walks = [(np.arange(len(steps)), _prefixes(texts[1]))]
    walks += [] if goes_on else [(starts, _prefixes(texts[0]))]
    size = len(steps) + (0 if goes_on else len(starts)) + 1
    deadline = time.monotonic() + _SECONDS

    def pairs() -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(state, token, next state) of all tokens that may follow."""
        offset = 0
        for states, tree in walks:
            for place, token, following in _followed(steps, states, tree):
                yield place + offset, token, following
                if time.monotonic() > deadline:
                    raise UserError(
                        f"the constraint takes more than {_SECONDS:.0f} s to compile for this "
                        "tokenizer: use a simpler pattern or schema"
                    )
            offset += len(states)
        (which,) = np.nonzero(np.append(accepting, () if goes_on else accepting[_at(languages)]))
        for eos in eos_ids:
            full = np.full(which.size, eos), np.full(which.size, size - 1)
            yield which, *full

    classes = _classes(pairs, size, vocab_size)
    table = _table(pairs, size, classes)
    if not goes_on:
        starts = len(steps) + np.arange(len(starts))
    distances = _distances(
        table, np.append(accepting, () if goes_on else accepting[_at(languages)])
    )
    table[~np.append(distances < FAR, False)[table]] = -1
    if (empty := np.flatnonzero(distances[starts] >= FAR)).size:
        which = f"entry {empty[0]}: " if len(starts) > 1 else ""
        raise UserError(
            f"{which}the tokenizer's tokens can write no text that matches: check the pattern or "
            "schema, and that its characters are in the vocabulary"
        )
    classes = classes[alike.kinds]
    return TokenAutomaton(table, classes, distances, starts.astype(np.int32))


class _Alike(NamedTuple):
    """Tokens whose bytes act alike, as letters do in a string; one stands for all.

    Attributes:
      kinds: the kind of each token.
      texts: of each kind the bytes at the start of a text, and elsewhere.
      eos_ids: the kinds that end a text.
    """

    kinds: Int32[np.ndarray, " V"]
    texts: tuple[list[bytes], list[bytes]]
    eos_ids: list[int]


def _alike(steps: np.ndarray, pieces: Pieces, vocab_size: int, eos_ids: Sequence[int]) -> _Alike:
    columns = np.unique(steps, axis=1, return_inverse=True)[1].reshape(-1)
    letters = bytes(columns.astype(np.uint8).tolist())
    numbers: dict[tuple[bytes, bytes, bool], int] = {}
    kinds, texts = np.zeros(vocab_size, np.int32), ([], [])  # type: ignore[var-annotated]
    for token in range(vocab_size):
        ends = token in eos_ids
        has_text = token < len(pieces.later) and not ends
        first, later = (x[token] if has_text else b"" for x in (pieces.first, pieces.later))
        key = first.translate(letters), later.translate(letters), ends
        if key not in numbers:
            numbers[key] = len(numbers)
            texts[0].append(first)
            texts[1].append(later)
        kinds[token] = numbers[key]
    return _Alike(kinds, texts, [number for key, number in numbers.items() if key[2]])


def _at(languages: Sequence[ByteAutomaton]) -> np.ndarray:
    """The places of the languages' first states among all states."""
    return np.cumsum([0, *(len(x.accepting) for x in languages[:-1])])


def _joined(languages: Sequence[ByteAutomaton]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """One automaton of all languages: steps, accepting, and the first states."""
    starts = _at(languages)
    steps = [
        np.where(x.steps >= 0, x.steps + start, -1)
        for x, start in zip(languages, starts, strict=True)
    ]
    return np.concatenate(steps), np.concatenate([x.accepting for x in languages]), starts


class _Prefixes(NamedTuple):
    """The beginnings of texts as a tree, level by level; 0 is the empty one.

    Attributes:
      first: the beginnings with one byte more than i are first[i] .. first[i + 1] - 1.
      last: the last byte of each.
      first_text, texts: those equal to i are texts[first_text[i]] .. texts[first_text[i + 1] - 1].
      widest: how many a level has at most.
    """

    first: np.ndarray
    last: np.ndarray
    first_text: np.ndarray
    texts: np.ndarray
    widest: int


def _prefixes(texts: Sequence[bytes]) -> _Prefixes:
    parents, last, widest = [-1], [0], 1
    of_text = np.zeros(len(texts), np.int64)
    numbers, rest = {b"": 0}, [i for i, text in enumerate(texts) if text]
    for length in range(1, max(map(len, texts), default=0) + 1):
        level = sorted({texts[i][:length] for i in rest})
        parents += [numbers[text[:-1]] for text in level]
        last += [text[-1] for text in level]
        numbers = {text: len(parents) - len(level) + i for i, text in enumerate(level)}
        ends = [i for i in rest if len(texts[i]) == length]
        of_text[ends] = [numbers[texts[i]] for i in ends]
        rest = [i for i in rest if len(texts[i]) > length]
        widest = max(widest, len(level))
    order, groups = np.argsort(of_text, kind="stable"), np.arange(len(parents) + 1)
    return _Prefixes(
        np.searchsorted(parents, groups),
        np.array(last),
        np.searchsorted(of_text, groups, sorter=order),
        order,
        widest,
    )


def _followed(
    steps: np.ndarray, states: np.ndarray, tree: _Prefixes
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(place in `states`, token, state after its text) of the tokens that may follow."""
    many = max(1, _PAIRS // tree.widest)
    for begin in range(0, len(states), many):
        now = states[begin : begin + many]
        place, prefix = np.arange(now.size), np.zeros(now.size, np.int64)
        while now.size:
            of, prefix = members(tree.first, prefix)
            place, now = place[of], steps[now[of], tree.last[prefix]]
            alive = now >= 0
            place, prefix, now = place[alive], prefix[alive], now[alive]
            of, ends = members(tree.first_text, prefix)
            if of.size:
                yield place[of] + begin, tree.texts[ends], now[of]


def _classes(pairs: Pairs, size: int, vocab_size: int) -> Int32[np.ndarray, " V"]:
    """Equal numbers for tokens with equal columns, by two sums of random 64-bit numbers."""
    rng = np.random.default_rng(0)
    of_state, of_next = (
        rng.integers(2**64, size=(2, size), dtype=np.uint64) | np.uint64(1) for _ in range(2)
    )
    sums = np.zeros((2, vocab_size), np.uint64)
    for state, token, following in pairs():
        for i in range(2):
            np.add.at(sums[i], token, of_state[i, state] * of_next[i, following])
    return np.unique(sums, axis=1, return_inverse=True)[1].reshape(-1).astype(np.int32)


def _table(pairs: Pairs, size: int, classes: np.ndarray) -> Int32[np.ndarray, "S C"]:
    """The state after a token of each class, or -1."""
    count = int(classes.max()) + 1
    if size * count * 4 > MOST_BYTES:
        raise UserError(
            f"the constraint takes a table of {size} states x {count} classes of tokens, "
            f"{size * count * 4 >> 20} MB, and at most {MOST_BYTES >> 20} MB are allowed: use a "
            "simpler pattern or schema"
        )
    table = np.full((size, count), -1, np.int32)
    members, seen = np.bincount(classes, minlength=count), 0
    for state, token, following in pairs():
        table[state, classes[token]] = following
        assert (table[state, classes[token]] == following).all()
        seen += state.size
    # Every token of a class follows wherever one does: the sums that made them equal are exact.
    assert seen == int(((table >= 0) * members).sum())
    table[-1] = size - 1
    return table


def _distances(table: Int32[np.ndarray, "S C"], accepting: np.ndarray) -> Int32[np.ndarray, " S"]:
    """The fewest tokens to an accepting state, `FAR` if there is no way."""
    size = len(table)
    some = max(1, _ENTRIES // table.shape[1])
    edges = [_edges(table[first : first + some], first, size) for first in range(0, size, some)]
    sources, targets = np.concatenate(edges, axis=1)
    return fewest_steps(sources, targets, np.append(accepting.astype(bool), True))


def _edges(rows: np.ndarray, first: int, size: int) -> Int32[np.ndarray, "2 E"]:
    """The sources and targets of the different edges of some rows."""
    places, _ = np.nonzero(rows >= 0)
    edges = np.unique((places + first) * size + rows[rows >= 0])
    return np.stack(np.divmod(edges, size)).astype(np.int32)
