"""What one round of verification emits, and how far that is from what it must emit.

One round is followed by the target itself. If the law of L + 1 tokens is then the target's own,
all rounds are exact, and only then (for a verifier without a carry).

If the random numbers are arguments, the outcome of each draft is a piecewise constant function on
[0, 1]^d. Its breakpoints on each axis are found by bisection, and the cells of the grid that they
make are evaluated at their centres. 512 points drawn at random must agree with their cells: then
what the grid missed has a volume below ln(1 / delta) / 512 with probability 1 - delta. The law of a
verifier that draws its own random numbers is sampled.

Axes: K outcomes, R evaluations, L drafted tokens, d = L + 1 coordinates, V vocabulary.
"""

import dataclasses
import importlib
import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float64, Int

from specjax.testing.auditing.calling import LAST_UNIFORM, BadOutcomeError, Calling
from specjax.testing.auditing.hard_cases import HardCase, VerifyArguments
from specjax.testing.auditing.report import SheetRow
from specjax.testing.enumeration import total_variation
from specjax.types import Rule

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
_SAMPLES_AT_ONCE = 1000
_NOT_REPEATED = (
    "two calls with the same uniforms have other outcomes: it draws numbers of its own; audit it "
    "as a black box"
)


class Outcomes(NamedTuple):
    """What a verifier did with each draft.

    Attributes:
      draft: the drafted tokens.
      accepted: how many of them were accepted.
      following: the next token; -1 if the outcome is invalid.
      weight: the probability of the draft and of this outcome.
    """

    draft: Int[np.ndarray, "K L"]
    accepted: Int[np.ndarray, " K"]
    following: Int[np.ndarray, " K"]
    weight: Float64[np.ndarray, " K"]


def outcomes_of(
    case: HardCase, blocks: np.ndarray, draft: np.ndarray, codes: np.ndarray, weight: np.ndarray
) -> Outcomes:
    """Codes (accepted * V + next token, negative if invalid) as outcomes."""
    valid = codes >= 0
    accepted = np.where(valid, codes // case.vocab, 0)
    following = np.where(valid, codes % case.vocab, -1)
    return Outcomes(blocks[draft], accepted, following, weight)


def emitted(outcomes: Outcomes, target: Sequence[np.ndarray]) -> np.ndarray:
    """The law of L + 1 tokens: a round's, then the target's; its sum is below 1 by invalid ones."""
    length, vocab = len(target) - 1, target[0].shape[-1]
    partial = [np.zeros((vocab,) * (depth + 1)) for depth in range(length + 1)]
    valid = outcomes.following >= 0
    for n in range(length + 1):
        now = valid & (outcomes.accepted == n)
        index = (*outcomes.draft[now, :n].T, outcomes.following[now])
        np.add.at(partial[n], index, outcomes.weight[now])
    law = partial[0]
    for depth in range(1, length + 1):
        law = partial[depth] + law[..., None] * target[depth]
    return law


def joint_law(target: Sequence[np.ndarray]) -> np.ndarray:
    """The target's own law of L + 1 tokens."""
    law = target[0]
    for table in target[1:]:
        law = law[..., None] * table
    return law


def score(
    case: HardCase, target: Sequence[np.ndarray], outcomes: Outcomes, tolerance: float
) -> SheetRow:
    """The scores of the emitted law against the target's."""
    law, wanted = emitted(outcomes, target), joint_law(target)
    lost = float(outcomes.weight[outcomes.following < 0].sum())
    first = 0
    for k in range(1, law.ndim + 1):
        axes = tuple(range(k, law.ndim))
        if total_variation(law.sum(axis=axes), wanted.sum(axis=axes)) > tolerance:
            first = k
            break
    return SheetRow(
        case.name,
        case.length,
        case.vocab,
        variation=total_variation(law, wanted) + 0.5 * lost,
        impossible=float(law[wanted == 0.0].sum()),
        lost=lost,
        accepted=float((outcomes.accepted * outcomes.weight)[outcomes.following >= 0].sum()),
        first_wrong=first,
    )


def impossible_mass(
    case: HardCase, target: tuple[np.ndarray, ...], outcomes: Outcomes
) -> tuple[float, int]:
    """The weight and the number of outcomes with no token, or one that the target cannot emit."""
    wrong = outcomes.following < 0
    for n in range(case.length + 1):
        now = (outcomes.accepted == n) & (outcomes.following >= 0)
        draft, token = outcomes.draft[now], outcomes.following[now]
        bad = target[n][(*draft[:, :n].T, token)] == 0.0
        for i in range(n):
            bad |= target[i][tuple(draft[:, : i + 1].T)] == 0.0
        wrong[now] = bad
    return float(outcomes.weight[wrong].sum()), int(wrong.sum())


def declared_target(case: HardCase, rule: Rule | None) -> tuple[np.ndarray, ...]:
    """The distributions that must be emitted: p, or a rule's at the drafted positions.

    The bonus token's is p, for a verifier that follows a rule too: it does not get q there.
    """
    if rule is None:
        return case.target
    tables = []
    for q, p in zip(case.draft, case.target[:-1], strict=True):
        flat = [jnp.asarray(x.reshape(-1, x.shape[-1]), jnp.float32) for x in (q, p)]
        pi = np.asarray(jax.vmap(lambda a, b: rule(a, b, a, b))(*flat), np.float64)
        tables.append((pi / pi.sum(axis=-1, keepdims=True)).reshape(q.shape))
    return (*tables, case.target[-1])


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
    """

    outcomes: Outcomes
    edges: Outcomes | None = None
    samples: int | None = None


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
    """The law of a verifier that gets its uniforms."""
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
        # Stratified points: a share of impossible tokens of 1e-3 cannot hide.
        each = 1024
        # Only a rejected token shows the residual.
        rejected = np.flatnonzero(blocks[:, 0] != np.argmax(case.target[0]))
        shown = rejected if rejected.size else np.arange(count)
        draft = np.repeat(shown, each)
        coordinates = np.full((len(draft), 2), 0.9)
        coordinates[:, 1] = np.tile((np.arange(each) + 0.5) / each, len(shown))
        codes = evaluate(draft, coordinates)
        return CaseLaw(outcomes_of(case, blocks, draft, codes, weights[draft] / each), samples=each)
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
    return CaseLaw(outcomes, edges)


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


def generator_of(arrays: str, seed: int) -> Any:
    """The random generator of a library: NumPy's, PyTorch's, or a key of JAX."""
    if arrays == "torch":
        return importlib.import_module("torch").Generator().manual_seed(seed)
    if arrays == "jax":
        return importlib.import_module("jax").random.key(seed)
    return np.random.default_rng(seed)


def sampled_law(
    calling: Calling,
    case: HardCase,
    drafts: str,
    rng: np.random.Generator,
    clock: AuditClock,
    samples: int,
) -> CaseLaw:
    """Draws drafts and calls the verifier; rows after the case's other rows."""
    blocks, weights = case.blocks(drafts)
    if not case.law:
        samples = min(samples, 1024)
    draft = rng.choice(len(blocks), size=samples, p=weights / weights.sum())
    size = min(_SAMPLES_AT_ONCE, max(1, 4_000_000 // (case.vocab * (case.max_draft + 1))))
    codes = []
    generator = generator_of(calling.arrays, int(rng.integers(2**31)))
    for start in range(0, samples, size):
        now = draft[start : start + size]
        rows = case.rows(blocks[now], rng.random((len(now), case.length + 1)))
        rows = case.with_others(rows, float(rng.random()))
        if calling.arrays == "jax" and "generator" in calling.takes:
            generator = generator_of("jax", int(rng.integers(2**31)))
        codes.append(calling.outcomes(rows, generator)[-len(now) :])
        clock.count(len(now))
    shares = np.full(samples, 1.0 / samples)
    outcomes = outcomes_of(case, blocks, draft, np.concatenate(codes), shares)
    return CaseLaw(outcomes, samples=samples)


def half_width(target: tuple[np.ndarray, ...], samples: int, level: float) -> float:
    """How far an estimated total variation may be from the true one, with chance 1 - level.

    The mean of the empirical law's error over K texts is at most sqrt((K - 1) / n) / 2, and by
    McDiarmid's inequality it is not exceeded by much.
    """
    cells = target[0].shape[-1] ** len(target)
    return 0.5 * math.sqrt((cells - 1) / samples) + math.sqrt(math.log(2 / level) / (2 * samples))
