"""Regular expressions as deterministic automata over the bytes of UTF-8.

Python's `re` reads the expression. An automaton without counters, groups or look-around reads its
language; so these are refused. States are limited, so no expression takes long.

Axes: S states.
"""

import functools
import re
import time
from collections.abc import Iterator
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

import numpy as np

MOST_STATES = 20_000
_MOST_NODES = 400_000
_SECONDS = 20.0
_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_REFUSED = {
    "GROUPREF": "a back-reference such as \\1",
    "GROUPREF_EXISTS": "a condition such as (?(1)...)",
    "ASSERT": "look-around such as (?=...)",
    "ASSERT_NOT": "look-around such as (?!...)",
    "ATOMIC_GROUP": "an atomic group (?>...)",
    "POSSESSIVE_REPEAT": "a possessive repeat such as a*+",
}
_FLAGS = re.IGNORECASE | re.MULTILINE | re.LOCALE
_CATEGORIES = {
    ops.CATEGORY_DIGIT: r"\d",
    ops.CATEGORY_NOT_DIGIT: r"\D",
    ops.CATEGORY_SPACE: r"\s",
    ops.CATEGORY_NOT_SPACE: r"\S",
    ops.CATEGORY_WORD: r"\w",
    ops.CATEGORY_NOT_WORD: r"\W",
}

Ranges = list[tuple[int, int]]


class ByteAutomaton(NamedTuple):
    """A deterministic automaton; state 0 is the start.

    Attributes:
      steps: `[S, 256]` int32, the state after each byte; -1 if no text of the language goes on so.
      accepting: `[S]` bool, whether the text so far belongs to the language.
    """

    steps: np.ndarray
    accepting: np.ndarray


@functools.lru_cache(maxsize=64)
def byte_automaton(pattern: str) -> ByteAutomaton:
    """Compiles a regular expression that whole texts must match, as `re.fullmatch` decides.

    Args:
      pattern: in Python's notation, without back-references, look-around, and the flags i, m and L.

    Raises:
      TypeError: `pattern` is not a text.
      ValueError: it is not a supported expression, or takes too many states or too long.
    """
    if not isinstance(pattern, str):
        raise TypeError(f"pattern must be a text such as '[0-9]+', got {pattern!r}")
    try:
        tree = _parser.parse(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(
            f"pattern {_short(pattern)} is not a regular expression: {error}"
        ) from None
    if tree.state.flags & _FLAGS:
        raise ValueError(
            f"pattern {_short(pattern)} has a flag that is not supported (i, m or L): write the "
            "letters of both cases, as in [aA]"
        )
    graph = _Graph(pattern, bool(tree.state.flags & re.DOTALL), bool(tree.state.flags & re.ASCII))
    end = graph.add(tree, graph.node(), (True, True))
    return _determined(graph, end)


def _short(pattern: str) -> str:
    shown = repr(pattern)
    return shown if len(shown) <= 60 else shown[:57] + "..."


class _Graph:
    """A nondeterministic automaton that grows part by part; node 0 is the start.

    Attributes:
      jumps: for each node the nodes that it becomes without a byte.
      edges: for each node (first byte, last byte, next node).
    """

    def __init__(self, pattern: str, dot_all: bool, ascii_only: bool) -> None:
        self.pattern, self.dot_all, self.ascii_only = pattern, dot_all, ascii_only
        self.jumps: list[list[int]] = []
        self.edges: list[list[tuple[int, int, int]]] = []

    def node(self) -> int:
        if len(self.jumps) >= _MOST_NODES:
            raise ValueError(
                f"pattern {_short(self.pattern)} is too large: use smaller numbers of repeats"
            )
        self.jumps.append([])
        self.edges.append([])
        return len(self.jumps) - 1

    def add(self, parts: Any, start: int, outer: tuple[bool, bool] = (False, False)) -> int:
        """Adds a sequence after `start`; returns its last node.

        `outer` tells whether it begins, and ends, where the text does: there ^ and $ are allowed.
        """
        given = list(parts)
        for i, (op, value) in enumerate(given):
            at = outer[0] and i == 0, outer[1] and i == len(given) - 1
            start = self._part(op, value, start, at)
        return start

    def _part(self, op: Any, value: Any, start: int, outer: tuple[bool, bool]) -> int:
        if op is ops.SUBPATTERN:
            _, more, less, inner = value
            if more or less:
                self._refuse("flags of a group")
            return self.add(inner, start, outer)
        if op is ops.BRANCH:
            end = self.node()
            for inner in value[1]:
                first = self.node()
                self.jumps[start].append(first)
                self.jumps[self.add(inner, first, outer)].append(end)
            return end
        if op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            low, high, inner = value
            return self._repeat(low, high, inner, start)
        if op is ops.AT:
            begins = value in (ops.AT_BEGINNING, ops.AT_BEGINNING_STRING)
            if not (outer[0] if begins else outer[1] and value in (ops.AT_END, ops.AT_END_STRING)):
                self._refuse("an anchor inside, such as \\b, ^ or $")
            return start
        if str(op) in _REFUSED:
            self._refuse(_REFUSED[str(op)])
        return self._characters(_ranges(op, value, self.dot_all, self.ascii_only), start)

    def _refuse(self, what: str) -> None:
        raise ValueError(
            f"pattern {_short(self.pattern)} has {what}, which is not supported: leave it out"
        )

    def _repeat(self, low: int, high: Any, inner: Any, start: int) -> int:
        for _ in range(low):
            start = self.add(inner, start)
        if high is ops.MAXREPEAT:
            loop = self.node()
            self.jumps[start].append(loop)
            self.jumps[self.add(inner, loop)].append(loop)
            return loop
        end = self.node()
        for _ in range(high - low):
            self.jumps[start].append(end)
            start = self.add(inner, start)
        self.jumps[start].append(end)
        return end

    def _characters(self, ranges: Ranges, start: int) -> int:
        end = self.node()
        for low, high in ranges:
            for sequence in _utf8(low, high):
                node = start
                for i, (first, last) in enumerate(sequence):
                    following = end if i == len(sequence) - 1 else self.node()
                    self.edges[node].append((first, last, following))
                    node = following
        return end


def _ranges(op: Any, value: Any, dot_all: bool, ascii_only: bool) -> Ranges:
    """The code points of a part, in order."""
    if op is ops.LITERAL:
        return [(value, value)]
    if op is ops.NOT_LITERAL:
        return _others([(value, value)])
    if op is ops.ANY:
        return [(0, _LAST)] if dot_all else _others([(10, 10)])
    if op is not ops.IN:
        raise ValueError(f"a regular expression with {op} is not supported: leave it out")
    found: Ranges = []
    for kind, of in value:
        if kind is ops.RANGE:
            found.append(of)
        elif kind is ops.CATEGORY:
            found += _category(_CATEGORIES[of], ascii_only)
        elif kind is ops.LITERAL:
            found.append((of, of))
    return _others(found) if value[0][0] is ops.NEGATE else found


@functools.lru_cache
def _category(escape: str, ascii_only: bool) -> Ranges:
    matches = re.compile(escape, re.ASCII if ascii_only else 0).fullmatch
    hits = np.array([bool(matches(chr(code))) for code in range(_LAST + 1)], np.int8)
    changes = np.flatnonzero(np.diff(hits, prepend=0, append=0))
    return [(int(a), int(b) - 1) for a, b in zip(changes[::2], changes[1::2], strict=True)]


def _others(ranges: Ranges) -> Ranges:
    """All code points outside of the ranges."""
    found, at = [], 0
    for low, high in sorted(ranges):
        if low > at:
            found.append((at, low - 1))
        at = max(at, high + 1)
    return [*found, (at, _LAST)] if at <= _LAST else found


def _utf8(low: int, high: int) -> Iterator[list[tuple[int, int]]]:
    """Sequences of ranges of bytes: together the encodings of the code points."""
    first, last = _SURROGATES
    # Surrogates have no encoding; then lengths; then whole ranges of the last bytes.
    if low <= last and high >= first:
        if low < first:
            yield from _utf8(low, first - 1)
        if high > last:
            yield from _utf8(last + 1, high)
        return
    for edge in (0x7F, 0x7FF, 0xFFFF):
        if low <= edge < high:
            yield from _utf8(low, edge)
            yield from _utf8(edge + 1, high)
            return
    for bits in (6, 12, 18):
        below = (1 << bits) - 1
        if low > 0x7F and low & ~below != high & ~below:
            if low & below:
                yield from _utf8(low, low | below)
                yield from _utf8((low | below) + 1, high)
                return
            if high & below != below:
                yield from _utf8(low, (high & ~below) - 1)
                yield from _utf8(high & ~below, high)
                return
    yield list(zip(chr(low).encode(), chr(high).encode(), strict=True))


def _determined(graph: _Graph, end: int) -> ByteAutomaton:
    """The deterministic automaton, without states from which no text of the language follows."""
    cuts = sorted({0, 256, *(x for edge in graph.edges for a, b, _ in edge for x in (a, b + 1))})
    kind = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))
    after = functools.lru_cache(maxsize=None)(functools.partial(_closure, graph, end))
    first = after(frozenset([0]))
    numbers, waiting = {first: 0}, [first]
    steps: list[np.ndarray] = []
    deadline = time.monotonic() + _SECONDS
    for state in waiting:
        targets: list[set[int]] = [set() for _ in cuts[:-1]]
        for node in state:
            for a, b, following in graph.edges[node]:
                for i in range(kind[a], kind[b] + 1):
                    targets[i].add(following)
        row = np.full(len(targets), -1, np.int32)
        for i, nodes in enumerate(targets):
            if nodes:
                new = after(frozenset(nodes))
                if new not in numbers:
                    numbers[new] = len(numbers)
                    waiting.append(new)
                row[i] = numbers[new]
        steps.append(row)
        if len(numbers) > MOST_STATES or time.monotonic() > deadline:
            why = f"more than {MOST_STATES} states" if len(numbers) > MOST_STATES else "too long"
            raise ValueError(
                f"pattern {_short(graph.pattern)} takes {why}: use smaller numbers of repeats, or "
                "a simpler expression"
            )
    accepting = np.array([end in state for state in waiting])
    return _trimmed(np.stack(steps)[:, kind], accepting)


def _closure(graph: _Graph, end: int, nodes: frozenset[int]) -> frozenset[int]:
    """The nodes that bytes leave, or that accept, reachable without a byte."""
    seen, waiting = set(nodes), list(nodes)
    while waiting:
        for following in graph.jumps[waiting.pop()]:
            if following not in seen:
                seen.add(following)
                waiting.append(following)
    return frozenset(node for node in seen if graph.edges[node] or node == end)


def _trimmed(steps: np.ndarray, accepting: np.ndarray) -> ByteAutomaton:
    useful = accepting.copy()
    sources, _ = np.nonzero(steps >= 0)
    targets = steps[steps >= 0]
    while True:
        more = useful.copy()
        more[sources[useful[targets]]] = True
        if (more == useful).all():
            break
        useful = more
    return ByteAutomaton(np.where(np.append(useful, False)[steps], steps, -1), accepting)
