"""The law of a verifier whose random numbers are arguments.

For each draft the outcome is a piecewise constant function on [0, 1]^d. Its breakpoints on each
axis are found by bisection, and the cells of the grid that they make are evaluated at their
centres. 512 points drawn at random must agree with their cells: then what the grid missed has a
volume below ln(1 / delta) / 512 with probability 1 - delta.

Axes: R evaluations, D drafts, L drafted tokens, d = L + 1 coordinates.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from specjax.testing.auditing.criterion import Outcomes
from specjax.testing.auditing.hard_cases import HardCase

# (draft of each row `[R]`, coordinates `[R, d]`) -> outcome codes `[R]`; a code below 0 is invalid.
Evaluate = Callable[[np.ndarray, np.ndarray], np.ndarray]

EDGE = 1e-12
# The largest float32 below 1.
LAST_UNIFORM = 1.0 - 2.0**-24
CHECKED = 512
_MOST_CELLS = 400_000
_ROUNDS = 12


class Partition(NamedTuple):
    """A verifier's outcomes over its uniforms.

    Attributes:
      drafts: `[K]`, the draft of each cell.
      codes: `[K]`, its outcome.
      volumes: `[K]`.
      mismatches: how many of the random points disagree with their cell.
      breaks: all breakpoints.
    """

    drafts: np.ndarray  # [K]
    codes: np.ndarray  # [K]
    volumes: np.ndarray  # [K]
    mismatches: int
    breaks: np.ndarray


def outcomes_of(
    case: HardCase, blocks: np.ndarray, draft: np.ndarray, codes: np.ndarray, weight: np.ndarray
) -> Outcomes:
    """Codes (accepted * V + next token, negative if invalid) as outcomes."""
    valid = codes >= 0
    accepted = np.where(valid, codes // case.vocab, 0)
    following = np.where(valid, codes % case.vocab, -1)
    return Outcomes(blocks[draft], accepted, following, weight)


def partition(
    evaluate: Evaluate,
    weights: np.ndarray,
    dimensions: int,
    rng: np.random.Generator,
    resolution: float = 2.0**-44,
    *,
    probes: int = 22,
) -> Partition:
    """Finds the cells of each draft's outcome.

    Args:
      evaluate: the verifier.
      weights: `[D]`, the probability of each draft; the random points have drafts drawn by it.
      dimensions: d.
      rng: the source of the lines along which breakpoints are looked for.
      resolution: the width to which a breakpoint is found.
      probes: the points of a line at which the outcome is looked at first.

    Returns:
      A `Partition`.
    """
    num_drafts = len(weights)
    breaks = _breakpoints(evaluate, num_drafts, dimensions, rng, resolution, probes)
    edges = [
        [_distinct(breaks.get((draft, axis), []), resolution) for axis in range(dimensions)]
        for draft in range(num_drafts)
    ]
    drafts, centres, volumes = [], [], []
    for draft, own in enumerate(edges):
        if np.prod([len(e) - 1 for e in own], dtype=float) > _MOST_CELLS:
            return Partition(*(np.zeros(0, int),) * 2, np.zeros(0), CHECKED, np.zeros(0))
        middle = [0.5 * (e[1:] + e[:-1]) for e in own]
        width = [np.diff(e) for e in own]
        centres.append(np.array(list(itertools.product(*middle))).reshape(-1, dimensions))
        volumes.append(np.prod(list(itertools.product(*width)), axis=1).reshape(-1))
        drafts.append(np.full(len(centres[-1]), draft))
    index, places = np.concatenate(drafts), np.concatenate(centres)
    codes = evaluate(index, places)
    # The check: random points of random drafts against the cells that they lie in.
    chosen = rng.choice(num_drafts, size=CHECKED, p=weights / weights.sum())
    points = rng.random((CHECKED, dimensions))
    starts = np.concatenate([[0], np.cumsum([len(d) for d in drafts])])
    cell = [starts[d] + _cell(edges[d], point) for d, point in zip(chosen, points, strict=True)]
    mismatches = int((codes[cell] != evaluate(chosen, points)).sum())
    found = np.array([x for values in breaks.values() for x in values])
    return Partition(index, codes, np.concatenate(volumes), mismatches, found)


def faces(num_drafts: int, dimensions: int, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
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
    probes: int,
) -> dict[tuple[int, int], list[float]]:
    """(draft, axis) -> the breakpoints on lines through corners and through random points."""
    corners = list(itertools.product((EDGE, 1.0 - EDGE), repeat=dimensions - 1))
    places = np.array(corners).reshape(len(corners), -1)
    places = np.concatenate([places, rng.random((4, dimensions - 1))])
    steps = np.concatenate([[EDGE], (np.arange(probes) + 0.5) / probes, [1.0 - EDGE]])
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
        keep = np.sort(_first_two(keys))
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


def _first_two(keys: np.ndarray) -> np.ndarray:
    """The first two rows of each distinct key."""
    _, inverse = np.unique(keys, axis=0, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    sorted_keys = inverse[order]
    rank = np.arange(len(order)) - np.searchsorted(sorted_keys, sorted_keys)
    return order[rank < 2]


def _distinct(values: list[float], resolution: float) -> np.ndarray:
    """Sorted edges from 0 to 1, without repetitions."""
    inside = np.sort(values)
    if inside.size:
        inside = inside[np.concatenate([[True], np.diff(inside) > 4 * resolution])]
    return np.concatenate([[0.0], inside, [1.0]])


def _cell(edges: list[np.ndarray], point: np.ndarray) -> int:
    number = 0
    for axis, x in zip(edges, point, strict=True):
        place = min(int(np.searchsorted(axis, x, side="right")) - 1, len(axis) - 2)
        number = number * (len(axis) - 1) + place
    return number
