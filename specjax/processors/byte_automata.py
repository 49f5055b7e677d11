"""Regular expressions as deterministic automata over the bytes of UTF-8.

Python's `re` reads the expression. An automaton without counters, groups or look-around reads its
language; so these are refused. Time and memory are limited, whatever the expression.

Axes: S states, E edges.
"""

import functools
import re
import time
from collections.abc import Collection, Iterator
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32

from specjax.errors import UserError
from specjax.processors.caches import bounded_cache

MOST_STATES = 20_000
MOST_CHARACTERS = 1 << 21
# Of the nondeterministic automaton.
_MOST_NODES = 400_000
_MOST_EDGES = 1_500_000
# Nodes in the sets that are kept, and in those that follow one state.
_MOST_KEPT = 32_000_000
_MOST_FOLLOWING = 4_000_000
_SECONDS = 20.0
# The number of steps where there is no way: more than any output is long.
FAR = np.int32(2**30)
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

_SIMPLER = "use smaller numbers of repeats, or a simpler expression"

Ranges = list[tuple[int, int]]


class ByteAutomaton(NamedTuple):
    """A deterministic automaton; state 0 is the start.

    Attributes:
      steps: the state after each byte; -1 if no text of the language goes on so.
      accepting: whether the text so far belongs to the language.
    """

    steps: Int32[np.ndarray, "S 256"]
    accepting: Bool[np.ndarray, " S"]


def byte_automaton(
    pattern: str, *, ascii_only: bool = False, name: str | None = None
) -> ByteAutomaton:
    r"""Compiles a regular expression that whole texts must match, as `re.fullmatch` decides.

    Args:
      pattern: in Python's notation, without back-references, look-around, and the flags i, m and L.
      ascii_only: whether classes such as `\\d` are of ASCII, as with the flag a.
      name: what errors call the expression; None: `pattern` and its text.

    Raises:
      UserError: it is not a supported expression, or takes too many states, too much memory or too
        long.
    """
    if not isinstance(pattern, str):
        raise UserError(f"pattern must be a text such as '[0-9]+', got {pattern!r}")
    try:
        return _compiled(pattern, ascii_only)
    except _RefusedError as error:
        raise UserError(f"{name or 'pattern ' + shortened(repr(pattern))} {error}") from None


def shortened(text: str, most: int = 60) -> str:
    """The beginning of a long text, for a message."""
    return text if len(text) <= most else text[: most - 3] + "..."


class _RefusedError(Exception):
    """Why an expression is not compiled; follows its name."""


@bounded_cache(most_bytes=128 << 20)
def _compiled(pattern: str, ascii_only: bool) -> ByteAutomaton:
    if len(pattern) > MOST_CHARACTERS:
        raise _RefusedError(f"has {len(pattern)} characters, at most {MOST_CHARACTERS} are allowed")
    try:
        tree = _parser.parse(pattern, re.ASCII if ascii_only else 0)
        if tree.state.flags & _FLAGS:
            raise _RefusedError(
                "has a flag that is not supported (i, m or L): write the letters of both cases, as "
                "in [aA]"
            )
        graph = _Graph(bool(tree.state.flags & re.DOTALL), bool(tree.state.flags & re.ASCII))
        end = graph.add(tree, graph.node(), (True, True))
    except RecursionError:
        raise _RefusedError("is nested too deeply: use fewer groups inside groups") from None
    except (re.error, OverflowError) as error:
        raise _RefusedError(f"is not a regular expression: {error}") from None
    return _determined(graph, end)


class _Budget:
    """The time of one expression."""

    def __init__(self) -> None:
        self.deadline = time.monotonic() + _SECONDS
        self.steps = 0

    def spend(self, steps: int) -> None:
        self.steps += steps
        if self.steps >= 20_000:
            self.steps = 0
            if time.monotonic() > self.deadline:
                raise _RefusedError(f"takes more than {_SECONDS:.0f} s to compile: {_SIMPLER}")


class _Graph:
    """A nondeterministic automaton that grows part by part; node 0 is the start.

    Attributes:
      jumps: for each node the nodes that it becomes without a byte.
      edges: for each node (first byte, last byte, next node).
    """

    def __init__(self, dot_all: bool, ascii_only: bool) -> None:
        self.dot_all, self.ascii_only = dot_all, ascii_only
        self.budget = _Budget()
        self.jumps: list[list[int]] = []
        self.edges: list[list[tuple[int, int, int]]] = []
        self.count = 0

    def node(self) -> int:
        if len(self.jumps) >= _MOST_NODES or self.count > _MOST_EDGES:
            raise _RefusedError("is too large: use smaller numbers of repeats")
        self.jumps.append([])
        self.edges.append([])
        return len(self.jumps) - 1

    def add(self, parts: Any, start: int, outer: tuple[bool, bool] = (False, False)) -> int:
        """Adds a sequence after `start`; returns its last node.

        `outer` tells whether it begins, and ends, where the text does: there ^ and $ are allowed.
        """
        parts = list(parts)
        self.budget.spend(1 + len(parts))
        for i, (op, value) in enumerate(parts):
            at = outer[0] and i == 0, outer[1] and i == len(parts) - 1
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
        raise _RefusedError(f"has {what}, which is not supported: leave it out")

    def _repeat(self, low: int, high: Any, inner: Any, start: int) -> int:
        for _ in range(low):
            before, start = start, self.add(inner, start)
            if start == before:  # it is empty
                return start
        if high is ops.MAXREPEAT:
            loop = self.node()
            self.jumps[start].append(loop)
            self.jumps[self.add(inner, loop)].append(loop)
            return loop
        end = self.node()
        for _ in range(high - low):
            self.jumps[start].append(end)
            before, start = start, self.add(inner, start)
            if start == before:
                break
        self.jumps[start].append(end)
        return end

    def _characters(self, ranges: Ranges, start: int) -> int:
        end = self.node()
        # Nodes from which the same bytes follow are one node.
        nodes: dict[tuple[tuple[int, int], ...], int] = {(): end}
        for low, high in ranges:
            for sequence in _utf8(low, high):
                following = end
                for i in range(len(sequence) - 1, -1, -1):
                    rest = tuple(sequence[i:])
                    node = start if i == 0 else nodes.get(rest, -1)
                    if node < 0:
                        node = nodes[rest] = self.node()
                    if i == 0 or not self.edges[node]:
                        self.edges[node].append((*sequence[i], following))
                        self.count += 1
                    following = node
        self.budget.spend(len(ranges))
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
        raise _RefusedError(f"has {op}, which is not supported: leave it out")
    listed: Ranges = []
    for kind, of in value:
        if kind is ops.RANGE:
            listed.append(of)
        elif kind is ops.CATEGORY:
            listed += _category(_CATEGORIES[of], ascii_only)
        elif kind is ops.LITERAL:
            listed.append((of, of))
    others = _others(listed)
    return others if value[0][0] is ops.NEGATE else _others(others)


@functools.lru_cache
def _category(escape: str, ascii_only: bool) -> Ranges:
    matches = re.compile(escape, re.ASCII if ascii_only else 0).fullmatch
    hits = np.array([bool(matches(chr(code))) for code in range(_LAST + 1)], np.int8)
    changes = np.flatnonzero(np.diff(hits, prepend=0, append=0))
    return [(int(a), int(b) - 1) for a, b in zip(changes[::2], changes[1::2], strict=True)]


def _others(ranges: Ranges) -> Ranges:
    """All code points outside of the ranges."""
    others, at = [], 0
    for low, high in sorted(ranges):
        if low > at:
            others.append((at, low - 1))
        at = max(at, high + 1)
    return [*others, (at, _LAST)] if at <= _LAST else others


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
    kind = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts)).tolist()
    states = _States(graph, end)
    states.number([0])
    steps: list[np.ndarray] = []
    for state in states.nodes:
        targets: list[set[int]] = [set() for _ in cuts[:-1]]
        for node in np.frombuffer(state, np.int32).tolist():
            for a, b, following in graph.edges[node]:
                for i in range(kind[a], kind[b] + 1):
                    targets[i].add(following)
                graph.budget.spend(kind[b] - kind[a] + 1)
            if len(state) * len(targets) > 4 * _MOST_FOLLOWING:
                _check_memory(sum(map(len, targets)), _MOST_FOLLOWING)
        row = [states.number(nodes) if nodes else -1 for nodes in targets]
        steps.append(np.array(row, np.int32))
        graph.budget.spend(len(row))
    accepting = np.array(states.accepting)
    return _trimmed(np.stack(steps)[:, kind], accepting)


def _check_memory(nodes: int, most: int) -> None:
    if nodes > most:
        raise _RefusedError(f"takes too much memory: {_SIMPLER}")


class _States:
    """Numbers for sets of nodes, in the order in which they are found.

    Attributes:
      nodes: for each state its nodes that bytes leave, or that accept, as bytes of int32.
      accepting: for each state whether it has the last node.
    """

    def __init__(self, graph: _Graph, end: int) -> None:
        self.graph, self.end = graph, end
        self.nodes: list[bytes] = []
        self.accepting: list[bool] = []
        self.numbers: dict[bytes, int] = {}
        self.reached: dict[bytes, int] = {}  # by the nodes that a byte leads to
        self.kept = 0

    def number(self, nodes: Collection[int]) -> int:
        """The state of nodes and of those that they become without a byte."""
        reached = np.array(sorted(nodes), np.int32).tobytes()
        if reached not in self.reached:
            self.reached[reached] = self._number(nodes)
            self._keep(len(nodes))
        return self.reached[reached]

    def _number(self, nodes: Collection[int]) -> int:
        seen, waiting = set(nodes), list(nodes)
        while waiting:
            jumps = self.graph.jumps[waiting.pop()]
            self.graph.budget.spend(1 + len(jumps))
            for following in jumps:
                if following not in seen:
                    seen.add(following)
                    waiting.append(following)
        some = sorted(node for node in seen if self.graph.edges[node] or node == self.end)
        state = np.array(some, np.int32).tobytes()
        if state not in self.numbers:
            if len(self.nodes) == MOST_STATES:
                raise _RefusedError(f"takes more than {MOST_STATES} states: {_SIMPLER}")
            self.numbers[state] = len(self.nodes)
            self.nodes.append(state)
            self.accepting.append(self.end in seen)
            self._keep(len(some))
        return self.numbers[state]

    def _keep(self, nodes: int) -> None:
        self.kept += nodes
        _check_memory(self.kept, _MOST_KEPT)


def _trimmed(steps: np.ndarray, accepting: np.ndarray) -> ByteAutomaton:
    """The automaton without steps after which no text of the language follows."""
    sources, _ = np.nonzero(steps >= 0)
    useful = fewest_steps(sources, steps[steps >= 0], accepting) < FAR
    return ByteAutomaton(np.where(np.append(useful, False)[steps], steps, np.int32(-1)), accepting)


def fewest_steps(
    sources: Int[np.ndarray, " E"], targets: Int[np.ndarray, " E"], ends: Bool[np.ndarray, " S"]
) -> Int32[np.ndarray, " S"]:
    """Returns the fewest steps from each state to an end, `FAR` if there is no way.

    It searches backwards from the ends, so that each edge is followed once.
    """
    order = np.argsort(targets, kind="stable")
    sources = sources[order]
    first = np.searchsorted(targets, np.arange(len(ends) + 1), sorter=order)
    distances = np.where(ends, np.int32(0), FAR)
    front = np.flatnonzero(ends)
    while front.size:
        near = np.unique(sources[members(first, front)[1]])
        front, distance = near[distances[near] == FAR], distances[front[0]] + 1
        distances[front] = distance
    return distances


def members(first: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (place in `groups`, member) of all members of some groups.

    The members of group i are first[i] .. first[i + 1] - 1.
    """
    counts = first[groups + 1] - first[groups]
    offsets = np.repeat(first[groups] - np.cumsum(counts) + counts, counts)
    return np.repeat(np.arange(groups.size), counts), offsets + np.arange(offsets.size)
