"""Regular expressions as deterministic automata over the bytes of UTF-8.

Python's `re` reads the expression. outlines-core makes the automaton, in a process whose time and
memory are limited, whatever the expression. An automaton without counters, groups or look-around
reads the language; so these are refused.

Axes: S states, E edges.
"""

import functools
import marshal
import re
import subprocess
import sys
from pathlib import Path
from re import _constants as ops  # type: ignore[attr-defined]
from re import _parser  # type: ignore[attr-defined]
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Int, Int32

from specjax.checks import require, short_repr
from specjax.errors import UserError
from specjax.processors.caches import bounded_cache

MOST_STATES = 20_000
MOST_CHARACTERS = 1 << 21
_MOST_MEMORY = 1 << 30
_SECONDS = 20.0
_SCRIPT = Path(__file__).with_name("automaton_builder.py")
# The number of steps where there is no way: more than any output is long.
FAR = np.int32(2**30)
# U+0000 is in no text: `automaton_builder` marks the ends of texts with it.
_FIRST, _LAST = 1, 0x10FFFF
# They have no encoding.
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
_TOO_MANY = f"takes more than {{}} states: {_SIMPLER}"

Ranges = list[tuple[int, int]]


class ByteAutomaton(NamedTuple):
    """A deterministic automaton; state 0 is the start.

    Attributes:
      steps: the state after each byte; -1 if no text of the language goes on so.
      accepting: whether the text so far belongs to the language.
    """

    steps: Int32[np.ndarray, "S 256"]
    accepting: Bool[np.ndarray, " S"]


def byte_automaton(pattern: str, *, name: str | None = None) -> ByteAutomaton:
    """Compiles a regular expression that whole texts must match, as `re.fullmatch` decides.

    It is in Python's notation, without back-references, look-around, and the flags i, m and L.
    Errors call it `name`, by default `pattern` and its text.
    """
    require("outlines_core", "constraints")
    plain = plain_expression(pattern, name=name)
    try:
        return _compile(plain)
    except UserError as error:
        raise UserError(f"{name or _name_of(pattern)}{error}") from None


@bounded_cache(most_bytes=64 << 20)
def plain_expression(pattern: str, *, ascii_only: bool = False, name: str | None = None) -> str:
    r"""Returns an expression of the same texts that may be part of another, in Python or Rust.

    It has no anchors, names, flags or classes such as `\\d`, which are of ASCII with `ascii_only`,
    as with the flag a; see `byte_automaton`.
    """
    if not isinstance(pattern, str):
        raise UserError(f"pattern must be a text such as '[0-9]+', got {pattern!r}")
    try:
        if len(pattern) > MOST_CHARACTERS:
            raise _RefusedError(f"has more than {MOST_CHARACTERS} characters")
        tree = _parser.parse(pattern, re.ASCII if ascii_only else 0)
        if tree.state.flags & _FLAGS:
            raise _RefusedError(
                "has a flag that is not supported (i, m or L): write the letters of both cases, as "
                "in [aA]"
            )
        writer = _Writer(bool(tree.state.flags & re.DOTALL), bool(tree.state.flags & re.ASCII))
        if writer.size(tree) > 3 * MOST_STATES:  # an estimate
            raise _RefusedError(_TOO_MANY.format(MOST_STATES))
        return writer.sequence(tree, (True, True))
    except RecursionError:
        why = "is nested too deeply: use fewer groups inside groups"
    except (re.error, OverflowError) as error:
        why = f"is not a regular expression: {error}"
    except _RefusedError as error:
        why = str(error)
    raise UserError(f"{name or _name_of(pattern)} {why}")


def _name_of(pattern: str) -> str:
    return f"pattern {short_repr(pattern)}"


class _RefusedError(Exception):
    """Why an expression is not compiled; follows its name."""


class _Writer(NamedTuple):
    """Writes what `re` has parsed."""

    dot_all: bool
    ascii_only: bool

    def sequence(self, parts: Any, outer: tuple[bool, bool] = (False, False)) -> str:
        """The expression of a sequence.

        `outer` tells whether it begins, and ends, where the text does: there ^ and $ are allowed.
        """
        parts = list(parts)
        return "".join(
            self._part(op, value, (outer[0] and i == 0, outer[1] and i == len(parts) - 1))
            for i, (op, value) in enumerate(parts)
        )

    def size(self, parts: Any) -> int:
        """About the states of a sequence whose repeats are written out."""
        total = 0
        for op, value in parts:
            if op is ops.SUBPATTERN:
                total += self.size(value[3])
            elif op is ops.BRANCH:
                total += sum(map(self.size, value[1]))
            elif op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
                low, high, inner = value
                total += self.size(inner) * (max(low, 1) if high is ops.MAXREPEAT else high)
            elif op is ops.IN:  # a class of many ranges, such as \w, has as many states
                total += 1 + len(self._ranges(op, value)) // 4
            elif op in (ops.LITERAL, ops.NOT_LITERAL, ops.ANY):
                total += 1
        return total

    def _part(self, op: Any, value: Any, outer: tuple[bool, bool]) -> str:
        if op is ops.SUBPATTERN:
            _, more, less, inner = value
            if more or less:
                _refuse("flags of a group")
            return self.sequence(inner, outer)
        if op is ops.BRANCH:
            return f"(?:{'|'.join(self.sequence(inner, outer) for inner in value[1])})"
        if op in (ops.MAX_REPEAT, ops.MIN_REPEAT):
            low, high, inner = value
            most = "" if high is ops.MAXREPEAT else high
            return f"(?:{self.sequence(inner)}){{{low},{most}}}"
        if op is ops.AT:
            begins = value in (ops.AT_BEGINNING, ops.AT_BEGINNING_STRING)
            if not (outer[0] if begins else outer[1] and value in (ops.AT_END, ops.AT_END_STRING)):
                _refuse("an anchor inside, such as \\b, ^ or $")
            return ""
        ranges = _others([*_others(self._ranges(op, value)), _SURROGATES])
        if not ranges:
            _refuse("a class of no characters")
        if op is ops.LITERAL:
            return re.escape(chr(value))
        listed = "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in ranges)
        return f"[{listed}]"

    def _ranges(self, op: Any, value: Any) -> Ranges:
        """The code points of a part."""
        if op is ops.LITERAL:
            return [(value, value)]
        if op is ops.NOT_LITERAL:
            return _others([(value, value)])
        if op is ops.ANY:
            return [(_FIRST, _LAST)] if self.dot_all else _others([(10, 10)])
        if op is not ops.IN:
            _refuse(_REFUSED.get(str(op), str(op)))
        listed: Ranges = []
        for kind, of in value:
            if kind is ops.RANGE:
                listed.append(of)
            elif kind is ops.CATEGORY:
                listed += _category(_CATEGORIES[of], self.ascii_only)
            elif kind is ops.LITERAL:
                listed.append((of, of))
        return _others(listed) if value[0][0] is ops.NEGATE else listed


def _refuse(what: str) -> None:
    raise _RefusedError(f"has {what}, which is not supported: leave it out")


@functools.lru_cache
def _category(escape: str, ascii_only: bool) -> Ranges:
    matches = re.compile(escape, re.ASCII if ascii_only else 0).fullmatch
    hits = np.array([bool(matches(chr(code))) for code in range(_LAST + 1)], np.int8)
    changes = np.flatnonzero(np.diff(hits, prepend=0, append=0))
    return [(int(a), int(b) - 1) for a, b in zip(changes[::2], changes[1::2], strict=True)]


def _others(ranges: Ranges) -> Ranges:
    """All code points outside of the ranges, in order."""
    others, at = [], _FIRST
    for low, high in sorted(ranges):
        if low > at:
            others.append((at, low - 1))
        at = max(at, high + 1)
    return [*others, (at, _LAST)] if at <= _LAST else others


def build(name: str, **request: str | int) -> bytes:
    """What `automaton_builder` answers; errors call the expression `name`."""
    limits = {"memory": _MOST_MEMORY, "states": MOST_STATES, "characters": MOST_CHARACTERS}
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-S", str(_SCRIPT)],
            input=marshal.dumps({"path": sys.path, **limits, **request}),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"{name} takes more than {_SECONDS:.0f} s to compile: {_SIMPLER}") from None
    if done.returncode:
        raise UserError(
            f"{name} takes more than {_MOST_MEMORY >> 20} MB to compile, or is nested too deeply: "
            f"{_SIMPLER}"
        )
    return done.stdout


@bounded_cache(most_bytes=128 << 20)
def _compile(plain: str) -> ByteAutomaton:
    """The automaton, without steps after which no text of the language follows."""
    table = np.frombuffer(build("", expression=plain), np.int32).reshape(-1, 257)
    if len(table) > MOST_STATES:
        raise UserError(f" {_TOO_MANY.format(MOST_STATES)}")
    steps, accepting = table[:, :256], table[:, 256] > 0
    sources, _ = np.nonzero(steps >= 0)
    useful = fewest_steps(sources, steps[steps >= 0], accepting) < FAR
    numbers = np.append(np.where(useful, np.cumsum(useful) - 1, -1), -1).astype(np.int32)
    return ByteAutomaton(numbers[steps[useful]], accepting[useful])


def fewest_steps(
    sources: Int[np.ndarray, " E"], targets: Int[np.ndarray, " E"], ends: Bool[np.ndarray, " S"]
) -> Int32[np.ndarray, " S"]:
    """Returns the fewest steps from each state to an end, `FAR` if there is no way."""
    # Imported here because it takes long.
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import dijkstra

    graph = csr_array((np.ones(len(sources), bool), (targets, sources)), (len(ends),) * 2)
    steps = dijkstra(graph, indices=np.flatnonzero(ends), unweighted=True, min_only=True)
    return np.where(np.isinf(steps), FAR, steps).astype(np.int32)


def members(first: np.ndarray, groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (place in `groups`, member) of all members of some groups.

    The members of group i are first[i] .. first[i + 1] - 1.
    """
    counts = first[groups + 1] - first[groups]
    offsets = np.repeat(first[groups] - np.cumsum(counts) + counts, counts)
    return np.repeat(np.arange(groups.size), counts), offsets + np.arange(offsets.size)
