"""What a verifier does in one case: all its outcomes with their probabilities."""

import dataclasses
import time
from typing import NamedTuple

import numpy as np

from specjax.testing.auditing.calling import BadOutcomeError, Calling
from specjax.testing.auditing.criterion import Outcomes
from specjax.testing.auditing.hard_cases import HardCase, VerifyArguments
from specjax.testing.auditing.injected import (
    Evaluate,
    faces,
    is_single,
    outcomes_of,
    partition,
)

RESOLUTIONS = {"float64": 2.0**-44, "float32": 2.0**-30}
_CHUNK_ENTRIES = 2_000_000
_POINTS, _COUPLED_POINTS = 65_536, 1024
_ALONE = 24
_NOT_REPEATED = (
    "two calls with the same uniforms have other outcomes: it draws numbers of its own; audit it "
    "with hooks or as a black box"
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
      outcomes: all outcomes, with their probabilities or shares.
      edges: outcomes on the faces of the uniforms' cube; the weights are not read.
      coupled: whether a row's outcome depends on others; None if it was not tried.
      samples: how many draws the shares are of; None if the probabilities are computed.
      single: whether the verifier rounds its uniforms to float32.
    """

    outcomes: Outcomes
    edges: Outcomes | None = None
    coupled: bool | None = None
    samples: int | None = None
    single: bool = False


def injected_law(
    calling: Calling, case: HardCase, drafts: str, rng: np.random.Generator, clock: AuditClock
) -> CaseLaw:
    """The law of a verifier that gets its uniforms.

    Raises:
      BadOutcomeError: the function raises, its result cannot be read, or it is not deterministic.
      OutOfTimeError: the time is spent.
    """
    blocks, weights = case.blocks(drafts)
    dimensions = case.length + 1
    if not case.law:
        return _impossible_only(calling, case, drafts, clock)
    evaluate = _batched(calling, case, blocks, clock)
    coupled = _is_coupled(calling, case, blocks, rng, clock)
    if coupled:
        alone = _after_others(calling, case, blocks, clock)
        # The same points in each audit: equal verifiers then have equal shares.
        fixed = np.random.default_rng(0)
        return _by_points(alone, case, blocks, weights, fixed, _COUPLED_POINTS, True)
    coupling = coupled if calling.is_batched else None
    resolution = RESOLUTIONS[calling.dtype]
    found = partition(evaluate, weights, dimensions, rng, resolution)
    drafted, points = faces(len(blocks), dimensions, rng)
    codes = evaluate(drafted, points)
    edges = outcomes_of(case, blocks, drafted, codes, np.ones(len(codes)))
    if found.mismatches:
        law = _by_points(evaluate, case, blocks, weights, rng, _POINTS, coupling)
        return law._replace(edges=edges)
    probability = weights[found.drafts] * found.volumes
    outcomes = outcomes_of(case, blocks, found.drafts, found.codes, probability)
    single = calling.dtype == "float64" and is_single(found.breaks, resolution)
    return CaseLaw(outcomes, edges, coupling, None, single)


def _batched(calling: Calling, case: HardCase, blocks: np.ndarray, clock: AuditClock) -> Evaluate:
    """Evaluates rows in batches, after the case's other rows."""
    most = max(1, min(8192, _CHUNK_ENTRIES // (case.vocab * (case.max_draft + 1))))
    if not calling.is_batched:
        most = 1

    def evaluate(draft: np.ndarray, coordinates: np.ndarray) -> np.ndarray:
        parts = [np.zeros(0, np.int64)]
        for start in range(0, len(draft), most):
            now = slice(start, start + most)
            rows = case.rows(blocks[draft[now]], coordinates[now])
            parts.append(calling.outcomes(rows))
            clock.count(len(rows.tokens))
        return np.concatenate(parts)

    return evaluate


def _after_others(
    calling: Calling, case: HardCase, blocks: np.ndarray, clock: AuditClock
) -> Evaluate:
    """Evaluates each row in a batch of its own: the case's other rows, then the row."""

    def evaluate(draft: np.ndarray, coordinates: np.ndarray) -> np.ndarray:
        found = []
        for each, point in zip(draft, coordinates, strict=True):
            rows = case.rows(blocks[each][None], point[None])
            found.append(calling.outcomes(case.with_others(rows))[-1])
            clock.count(1)
        return np.array(found, np.int64)

    return evaluate


def _is_coupled(
    calling: Calling,
    case: HardCase,
    blocks: np.ndarray,
    rng: np.random.Generator,
    clock: AuditClock,
) -> bool:
    """Whether rows alone have other outcomes than in a batch; checks that calls repeat."""
    draft = rng.integers(len(blocks), size=_ALONE)
    rows = case.rows(blocks[draft], rng.random((_ALONE, case.length + 1)))
    single = [VerifyArguments(*(x[i : i + 1] for x in rows)) for i in range(_ALONE)]

    def one_by_one() -> np.ndarray:
        found = []
        for row in single:
            found.append(calling.outcomes(row)[0])
            clock.count(1)
        return np.array(found)

    if not calling.is_batched:
        first, second = one_by_one(), one_by_one()
    else:
        first, second = (calling.outcomes(case.with_others(rows)) for _ in range(2))
        clock.count(2 * _ALONE)
    if not np.array_equal(first, second):
        raise BadOutcomeError(_NOT_REPEATED)
    if not calling.is_batched:
        return False
    alone = one_by_one()
    if np.array_equal(first[-_ALONE:], alone):
        return False
    # A rare draw of its own differs from itself, too.
    for _ in range(8):
        if not np.array_equal(one_by_one(), alone):
            raise BadOutcomeError(_NOT_REPEATED)
    return True


def _by_points(
    evaluate: Evaluate,
    case: HardCase,
    blocks: np.ndarray,
    weights: np.ndarray,
    rng: np.random.Generator,
    count: int,
    coupled: bool | None,
) -> CaseLaw:
    draft = rng.choice(len(blocks), size=count, p=weights / weights.sum())
    codes = evaluate(draft, rng.random((count, case.length + 1)))
    outcomes = outcomes_of(case, blocks, draft, codes, np.full(count, 1.0 / count))
    return CaseLaw(outcomes, None, coupled, count)


def _impossible_only(calling: Calling, case: HardCase, drafts: str, clock: AuditClock) -> CaseLaw:
    """Stratified points: a share of impossible tokens of 1e-3 cannot hide."""
    blocks, weights = case.blocks(drafts)
    count = 1024
    evaluate = _batched(calling, case, blocks, clock)
    # Only a rejected token shows the residual.
    rejected = np.flatnonzero(blocks[:, 0] != np.argmax(case.target[0]))
    shown = rejected if rejected.size else np.arange(len(blocks))
    draft = np.repeat(shown, count)
    coordinates = np.full((len(draft), 2), 0.9)
    coordinates[:, 1] = np.tile((np.arange(count) + 0.5) / count, len(shown))
    codes = evaluate(draft, coordinates)
    outcomes = outcomes_of(case, blocks, draft, codes, weights[draft] / count)
    return CaseLaw(outcomes, None, None, count)


def impossible_mass(
    case: HardCase, target: tuple[np.ndarray, ...], outcomes: Outcomes
) -> tuple[float, int]:
    """The weight, and the number, of outcomes with a token that the target cannot emit, or none."""
    wrong = outcomes.following < 0
    for n in range(case.length + 1):
        now = (outcomes.accepted == n) & (outcomes.following >= 0)
        draft, token = outcomes.draft[now], outcomes.following[now]
        bad = target[n][(*draft[:, :n].T, token)] == 0.0
        for i in range(n):
            bad |= target[i][tuple(draft[:, : i + 1].T)] == 0.0
        wrong[now] = bad
    return float(outcomes.weight[wrong].sum()), int(wrong.sum())
