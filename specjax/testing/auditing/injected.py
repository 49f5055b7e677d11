"""The law of a verifier whose random numbers are arguments.

For each draft the outcome is a piecewise constant function on [0, 1]^d. Its breakpoints on each
axis are found by bisection, and the cells of the grid that they make are evaluated at their
centres. 512 points drawn at random must agree with their cells: then what the grid missed has a
volume below ln(1 / delta) / 512 with probability 1 - delta.

Axes: R evaluations, L drafted tokens, d = L + 1 coordinates.
"""

import dataclasses
import itertools
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from specjax.testing.auditing.calling import LAST_UNIFORM, BadOutcomeError, Calling
from specjax.testing.auditing.criterion import Outcomes, outcomes_of
from specjax.testing.auditing.hard_cases import HardCase, VerifyArguments

# (draft of each row `[R]`, coordinates `[R, d]`) -> outcome codes `[R]`; a code below 0 is invalid.
Evaluate = Callable[[np.ndarray, np.ndarray], np.ndarray]

CHECKED = 512
_RESOLUTIONS = {"float64": 2.0**-44, "float32": 2.0**-30}
_EDGE = 1e-12
_PROBES = 22  # the points of a line at which the outcome is looked at first
_ROUNDS = 12
_MOST_CELLS = 400_000
_MOST_ENTRIES = 2_000_000  # of one call's probabilities
_POINTS = 65_536
_ALONE = 24
_NOT_REPEATED = (
    "two calls with the same uniforms have other outcomes: it draws numbers of its own; audit it "
    "as a black box"
)


class OutOfTimeError(Exception):
    """The audit's time is spent."""


@dataclasses.dataclass
class AuditClock:
    """The audit's time, and how many rows were judged."""

    ends: float = float("inf")
    evaluations: int = 0

    def count(self, rows: int) -> None:
        """Counts rows; raises OutOfTimeError once the time is spent."""
        self.evaluations += rows
        if time.monotonic() > self.ends:
            raise OutOfTimeError


class CaseLaw(NamedTuple):
    """The outcomes of a case.

    Attributes:
      outcomes: all of them, with their probabilities or shares.
      edges: those on the faces of the uniforms' cube; the weights are not read.
      samples: how many draws the shares are of; None if the probabilities are computed.
      single: whether the verifier rounds its uniforms to float32.
    """

    outcomes: Outcomes
    edges: Outcomes | None = None
    samples: int | None = None
    single: bool = False


def is_coupled(
    calling: Calling, case: HardCase, drafts: str, rng: np.random.Generator, clock: AuditClock
) -> bool:
    """Whether rows alone have other outcomes than in a batch; checks that calls repeat."""
    blocks, _ = case.blocks(drafts)
    draft = rng.integers(len(blocks), size=_ALONE)
    rows = case.rows(blocks[draft], rng.random((_ALONE, case.length + 1)))

    def one_by_one() -> np.ndarray:
        codes = []
        for i in range(_ALONE):
            row = VerifyArguments(*(x[i : i + 1] for x in rows))
            codes.append(calling.outcomes(row)[0])
            clock.count(1)
        return np.array(codes)

    first, second = (calling.outcomes(case.with_others(rows)) for _ in range(2))
    clock.count(2 * _ALONE)
    if not np.array_equal(first, second):
        raise BadOutcomeError(_NOT_REPEATED)
    alone = one_by_one()
    if np.array_equal(first[-_ALONE:], alone):
        return False
    # A rare draw of its own differs from itself, too.
    for _ in range(8):
        if not np.array_equal(one_by_one(), alone):
            raise BadOutcomeError(_NOT_REPEATED)
    return True


def injected_law(
    calling: Calling, case: HardCase, drafts: str, rng: np.random.Generator, clock: AuditClock
) -> CaseLaw:
    """The law of a verifier that gets its uniforms.

    Raises:
      BadOutcomeError: the function raises, or its result cannot be read.
      OutOfTimeError: the time is spent.
    """
    blocks, weights = case.blocks(drafts)
    count, dimensions = len(blocks), case.length + 1
    most = max(1, min(8192, _MOST_ENTRIES // (case.vocab * (case.max_draft + 1))))

    def evaluate(draft: np.ndarray, coordinates: np.ndarray) -> np.ndarray:
        parts = [np.zeros(0, np.int64)]
        for start in range(0, len(draft), most):
            now = slice(start, start + most)
            rows = case.rows(blocks[draft[now]], coordinates[now])
            parts.append(calling.outcomes(rows))
            clock.count(len(rows.tokens))
        return np.concatenate(parts)

    if not case.law:
        return _impossible_only(evaluate, case, blocks, weights)
    resolution = _RESOLUTIONS[calling.dtype]
    breaks = _breakpoints(evaluate, count, dimensions, rng, resolution)
    drafted, points = _faces(count, dimensions, rng)
    codes = evaluate(drafted, points)
    edges = outcomes_of(case, blocks, drafted, codes, np.ones(len(codes)))

    # The cells of the grid that the breakpoints make.
    axes = [
        [_axis(breaks.get((draft, axis), []), resolution) for axis in range(dimensions)]
        for draft in range(count)
    ]
    sizes = [math.prod(len(axis) - 1 for axis in each) for each in axes]
    agrees = max(sizes) <= _MOST_CELLS
    if agrees:
        middles, widths = (
            [list(itertools.product(*(of(axis) for axis in each))) for each in axes]
            for of in (lambda axis: 0.5 * (axis[1:] + axis[:-1]), np.diff)
        )
        index = np.repeat(np.arange(count), sizes)
        codes = evaluate(index, np.concatenate(middles).reshape(-1, dimensions))
        # The check: random points of random drafts against the cells that they lie in.
        drafted = rng.choice(count, size=CHECKED, p=weights / weights.sum())
        points = rng.random((CHECKED, dimensions))
        starts = np.cumsum([0, *sizes])
        cells = [starts[d] + _cell(axes[d], x) for d, x in zip(drafted, points, strict=True)]
        agrees = bool((codes[cells] == evaluate(drafted, points)).all())
    if not agrees:
        # Its acceptance is no product of intervals: shares of random points stand for volumes.
        draft = rng.choice(count, size=_POINTS, p=weights / weights.sum())
        codes = evaluate(draft, rng.random((_POINTS, dimensions)))
        outcomes = outcomes_of(case, blocks, draft, codes, np.full(_POINTS, 1.0 / _POINTS))
        return CaseLaw(outcomes, edges, _POINTS)
    volumes = np.prod(np.concatenate(widths).reshape(-1, dimensions), axis=1)
    outcomes = outcomes_of(case, blocks, index, codes, weights[index] * volumes)
    every = np.array([x for values in breaks.values() for x in values])
    single = calling.dtype == "float64" and is_single(every, resolution)
    return CaseLaw(outcomes, edges, None, single)


def _impossible_only(
    evaluate: Evaluate, case: HardCase, blocks: np.ndarray, weights: np.ndarray
) -> CaseLaw:
    """Stratified points: a share of impossible tokens of 1e-3 cannot hide."""
    count = 1024
    # Only a rejected token shows the residual.
    rejected = np.flatnonzero(blocks[:, 0] != np.argmax(case.target[0]))
    shown = rejected if rejected.size else np.arange(len(blocks))
    draft = np.repeat(shown, count)
    coordinates = np.full((len(draft), 2), 0.9)
    coordinates[:, 1] = np.tile((np.arange(count) + 0.5) / count, len(shown))
    codes = evaluate(draft, coordinates)
    outcomes = outcomes_of(case, blocks, draft, codes, weights[draft] / count)
    return CaseLaw(outcomes, samples=count)


def _faces(num_drafts: int, dimensions: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Points on the faces of [0, 1)^d: drafts `[R]` and coordinates `[R, d]`.

    A uniform in float32 is 0 with probability 2^-23 or 2^-24, and 1 - 2^-24 likewise.
    """
    middle = (0.05, 0.35, 0.65, 0.95)
    points = [
        point
        for point in itertools.product((0.0, LAST_UNIFORM, None), repeat=dimensions)
        if any(x is not None for x in point)
    ]
    rows = np.array(
        [[m if x is None else x for x in point] for point in points for m in middle], float
    )
    if len(rows) * num_drafts > 20_000:
        rows = rows[rng.permutation(len(rows))[: max(1, 20_000 // num_drafts)]]
    return np.repeat(np.arange(num_drafts), len(rows)), np.tile(rows, (num_drafts, 1))


def is_single(breaks: np.ndarray, resolution: float) -> bool:
    """Whether a verifier rounds its uniforms to float32: it then changes halfway between two."""
    inner = breaks[(breaks > 1e-3) & (breaks < 1.0 - 1e-3)]
    if not inner.size:
        return False
    nearest = inner.astype(np.float32).astype(np.float64)
    other = np.where(nearest > inner, -np.inf, np.inf).astype(np.float32)
    beside = np.nextafter(nearest.astype(np.float32), other).astype(np.float64)
    return bool((np.abs(0.5 * (nearest + beside) - inner) <= 4 * resolution).all())


def _breakpoints(
    evaluate: Evaluate,
    num_drafts: int,
    dimensions: int,
    rng: np.random.Generator,
    resolution: float,
) -> dict[tuple[int, int], list[float]]:
    """(draft, axis) -> the breakpoints on lines through corners and through random points."""
    corners = list(itertools.product((_EDGE, 1.0 - _EDGE), repeat=dimensions - 1))
    places = np.array(corners).reshape(len(corners), -1)
    places = np.concatenate([places, rng.random((4, dimensions - 1))])
    steps = np.concatenate([[_EDGE], (np.arange(_PROBES) + 0.5) / _PROBES, [1.0 - _EDGE]])
    breaks: dict[tuple[int, int], list[float]] = {}
    # All lines of all drafts and axes: their draft, axis and the other coordinates.
    lines = [(d, a, i) for d in range(num_drafts) for a in range(dimensions) for i in places]
    draft = np.array([d for d, _, _ in lines])
    axis = np.array([a for _, a, _ in lines])
    bases = np.array([np.insert(i, a, 0.0) for _, a, i in lines])

    def along(line: np.ndarray, at: np.ndarray) -> np.ndarray:
        points = bases[line].copy()
        points[np.arange(len(line)), axis[line]] = at
        return evaluate(draft[line], points)

    number = np.repeat(np.arange(len(lines)), len(steps))
    codes = along(number, np.tile(steps, len(lines))).reshape(len(lines), len(steps))
    line, step = np.nonzero(codes[:, 1:] != codes[:, :-1])
    low, high = steps[step], steps[step + 1]
    left, right = codes[line, step], codes[line, step + 1]
    for _ in range(_ROUNDS):
        if not line.size:
            break
        # Lines with the same change between the same probes have the same breakpoint; two are kept.
        keys = np.stack([draft[line], axis[line], low, high, left, right], axis=1)
        _, change = np.unique(keys, axis=0, return_inverse=True)
        order = np.argsort(change, kind="stable")
        rank = np.arange(len(order)) - np.searchsorted(change[order], change[order])
        keep = np.sort(order[rank < 2])
        line, low, high, left, right = (x[keep] for x in (line, low, high, left, right))
        end, reached = high.copy(), right.copy()
        while (high - low).max() > resolution:
            middle = 0.5 * (low + high)
            code = along(line, middle)
            same = code == left
            low, high = np.where(same, middle, low), np.where(same, high, middle)
            reached = np.where(same, reached, code)
        for i, at in zip(line, 0.5 * (low + high), strict=True):
            breaks.setdefault((int(draft[i]), int(axis[i])), []).append(float(at))
        # Between the breakpoint and the probe there may be another.
        more = reached != right
        line, low, left = line[more], high[more], reached[more]
        high, right = end[more], right[more]
    return breaks


def _axis(values: list[float], resolution: float) -> np.ndarray:
    """Sorted edges from 0 to 1, without repetitions."""
    inside = np.sort(values)
    if inside.size:
        inside = inside[np.concatenate([[True], np.diff(inside) > 4 * resolution])]
    return np.concatenate([[0.0], inside, [1.0]])


def _cell(axes: list[np.ndarray], point: np.ndarray) -> int:
    """The number of the cell that a point lies in."""
    number = 0
    for axis, x in zip(axes, point, strict=True):
        place = min(int(np.searchsorted(axis, x, side="right")) - 1, len(axis) - 2)
        number = number * (len(axis) - 1) + place
    return number
