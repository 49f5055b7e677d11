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
MOST_BYTES = 1 << 30
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

    The sizes S and C are powers of two, so that programs are few. No token is of an added class,
    and no text leads to an added state.

    Attributes:
      table: the state after a token of each class; -1 if the token must not follow. In state S - 1
        the text has ended, and any token may follow.
      classes: the class of each token.
      distances: the fewest tokens to a state in which the text may end.
    """

    table: Int32[np.ndarray, "S C"]
    classes: Int32[np.ndarray, " V"]
    distances: Int32[np.ndarray, " S"]


def token_automaton(
    languages: Sequence[ByteAutomaton],
    pieces: Pieces,
    vocab_size: int,
    eos_ids: Sequence[int],
    *,
    goes_on: bool = False,
) -> tuple[TokenAutomaton, Int32[np.ndarray, " K"]]:
    """Compiles K languages for a tokenizer, with the first state of each.

    Ids without a piece never follow, and tokens that end a text only a text of the language.
    `goes_on` says whether texts continue the text of a prompt.
    """
    starts = np.cumsum([0, *(len(x.accepting) for x in languages[:-1])])
    steps = np.concatenate(
        [
            np.where(x.steps >= 0, x.steps + start, -1)
            for x, start in zip(languages, starts, strict=True)
        ]
    )
    accepting = np.concatenate([x.accepting for x in languages])
    kinds, first, later, ending = _kinds(steps, pieces, vocab_size, eos_ids)
    walks = [(np.arange(len(steps)), _prefixes(later))]
    if not goes_on:
        # The first states read the first token, which may lose its space.
        walks.append((starts, _prefixes(first)))
        accepting = np.append(accepting, accepting[starts])
        starts = len(steps) + np.arange(len(starts))
    size = padded_size(len(accepting) + 1, _LEAST[0])
    ends = np.zeros(size, bool)
    ends[: len(accepting)], ends[-1] = accepting, True
    deadline = time.monotonic() + _SECONDS

    def pairs() -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """(state, token, next state) of all tokens that may follow."""
        offset = 0
        for states, tree in walks:
            for place, token, following in _follow(steps, states, tree):
                yield place + offset, token, following
                if time.monotonic() > deadline:
                    raise UserError(
                        f"the constraint takes more than {_SECONDS:.0f} s to compile for this "
                        "tokenizer: use a simpler pattern or schema"
                    )
            offset += len(states)
        (which,) = np.nonzero(accepting)
        for eos in ending:
            yield which, np.full(which.size, eos), np.full(which.size, size - 1)

    classes = _classes(pairs, size, len(later))
    table = _table(pairs, size, classes)
    distances = _distances(table, ends)
    table[~np.append(distances < FAR, False)[table]] = -1
    if (empty := np.flatnonzero(distances[starts] >= FAR)).size:
        which = f"entry {empty[0]}: " if len(starts) > 1 else ""
        raise UserError(
            f"{which}the tokenizer's tokens can write no text that matches: check the pattern or "
            "schema, and that its characters are in the vocabulary"
        )
    return TokenAutomaton(table, classes[kinds], distances), starts.astype(np.int32)


def _kinds(
    steps: np.ndarray, pieces: Pieces, vocab_size: int, eos_ids: Sequence[int]
) -> tuple[Int32[np.ndarray, " V"], list[bytes], list[bytes], list[int]]:
    """Kinds of tokens whose bytes act alike, as letters do in a string; one stands for all.

    Returns the kind of each token; of each kind the bytes at the start of a text, and elsewhere;
    and the kinds that end a text.
    """
    columns = np.unique(steps, axis=1, return_inverse=True)[1].reshape(-1)
    letters = bytes(columns.astype(np.uint8).tolist())
    numbers: dict[tuple[bytes, bytes, bool], int] = {}
    kinds = np.zeros(vocab_size, np.int32)
    firsts, laters = [], []
    for token in range(vocab_size):
        ends = token in eos_ids
        has_text = token < len(pieces.later) and not ends
        first, later = (x[token] if has_text else b"" for x in (pieces.first, pieces.later))
        key = first.translate(letters), later.translate(letters), ends
        if key not in numbers:
            numbers[key] = len(numbers)
            firsts.append(first)
            laters.append(later)
        kinds[token] = numbers[key]
    return kinds, firsts, laters, [number for key, number in numbers.items() if key[2]]


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


def _follow(
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
    count = padded_size(int(classes.max()) + 1, _LEAST[1])
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


def _distances(table: Int32[np.ndarray, "S C"], ends: np.ndarray) -> Int32[np.ndarray, " S"]:
    """The fewest tokens to a state in which the text may end, `FAR` if there is no way."""
    size = len(table)
    some = max(1, _ENTRIES // table.shape[1])
    edges = []
    for first in range(0, size, some):
        rows = table[first : first + some]
        places, _ = np.nonzero(rows >= 0)
        edges.append(np.unique((places + first) * size + rows[rows >= 0]))
    sources, targets = np.divmod(np.concatenate(edges), size)
    return fewest_steps(sources, targets, ends)
