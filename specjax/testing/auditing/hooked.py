"""The law of a verifier whose random generators are replaced while it runs.

Uniforms are coordinates, as in `injected`. In a cell of the coordinates the outcome is not one
token but a law: the weights of its draws, which are noted, or of its races, which are measured.
"""

from typing import Any

import numpy as np

from specjax.testing.auditing.calling import AuditLimitError, Calling
from specjax.testing.auditing.case_laws import RESOLUTIONS, AuditClock, CaseLaw
from specjax.testing.auditing.criterion import Outcomes
from specjax.testing.auditing.generators import MOST_UNIFORMS, Script, replaced, scripted_argument
from specjax.testing.auditing.hard_cases import HardCase
from specjax.testing.auditing.injected import faces, is_single, outcomes_of, partition

# More coordinates than these are not noise of single tests: too many corners to look from.
_MOST_COORDINATES = 7
_POINTS = 8192
CHECKED_LAWS = 64  # random points of a case
_PROBES = 6  # each is a call of its own
# Noise that surely wins or loses a race, also in float32.
_AHEAD, _BEHIND = 1e-18, 1e18
_HALVINGS = 45


class _Runs:
    """Runs a verifier on single rows by scripts."""

    def __init__(
        self, calling: Calling, case: HardCase, blocks: np.ndarray, clock: AuditClock
    ) -> None:
        self.calling, self.case, self.blocks, self.clock = calling, case, blocks, clock
        self.script = Script(np.zeros(0))
        self.signatures: dict[tuple[object, ...], int] = {}
        self.laws: list[dict[int, float]] = []
        self.most = 0  # uniforms of one run

    def run(self, draft: int, script: Script) -> int:
        """The outcome's code of one draft."""
        self.script = script
        half = np.full((1, self.case.length + 1), 0.5)
        taken = self.calling.takes
        if "uniforms" in taken:  # it gets those and draws others
            half[0, :-1] = script.uniforms((self.case.length,))
        if "uniform_next" in taken:
            half[0, -1] = script.uniforms(())
        rows = self.case.rows(self.blocks[draft : draft + 1], half)
        generator = scripted_argument(self.calling.arrays, script)
        code = int(self.calling.outcomes(rows, generator)[0])
        self.clock.count(1)
        self.most = max(self.most, script.asked)
        return code

    def evaluate(self, draft: np.ndarray, coordinates: np.ndarray) -> np.ndarray:
        """Numbers of `laws`: what is known of each point; `[R]`."""
        found = []
        for each, point in zip(draft, coordinates, strict=True):
            script = Script(point)
            code = self.run(int(each), script)
            weights = tuple(fork.round(12).tobytes() for fork in script.forks)
            races = [self.run(int(each), Script(point, {}, x)) for x in _noises(script.races)]
            signature = int(each), code, weights, *races
            if signature not in self.signatures:
                self.signatures[signature] = len(self.laws)
                self.laws.append(self.law(int(each), point))
            found.append(self.signatures[signature])
        return np.array(found, np.int64)

    def law(self, draft: int, point: np.ndarray) -> dict[int, float]:
        """The probability of each outcome's code at a point."""
        found: dict[int, float] = {}
        pending: list[tuple[dict[int, int], dict[int, np.ndarray], float, int, int]]
        pending = [({}, {}, 1.0, 0, 0)]
        while pending:
            choices, noise, chance, fork, race = pending.pop()
            script = Script(point, choices, noise)
            code = self.run(draft, script)
            if fork < len(script.forks):
                weights = script.forks[fork]
                pending += [
                    ({**choices, fork: int(v)}, noise, chance * weights[v], fork + 1, race)
                    for v in np.flatnonzero(weights)
                ]
            elif race < len(script.races):
                for own, weight in self.race(
                    draft, point, choices, noise, race, script.races[race]
                ):
                    more = noise if own is None else {**noise, race: own}
                    pending.append((choices, more, chance * weight, fork, race + 1))
            else:
                found[code] = found.get(code, 0.0) + chance
        return found

    def race(
        self,
        draft: int,
        point: np.ndarray,
        choices: dict[int, int],
        noise: dict[int, np.ndarray],
        race: int,
        size: int,
    ) -> list[tuple[np.ndarray | None, float]]:
        """(noise that lets a token win, its probability) for each token of a race.

        argmax(w / E) is v with probability w_v / sum(w). Of two tokens alone, the one with noise t
        wins against noise 1 while t is below the ratio of their weights.
        """

        def outcome(own: np.ndarray) -> int:
            return self.run(draft, Script(point, choices, {**noise, race: own}))

        def only(ahead: dict[Any, float]) -> np.ndarray:
            own = np.full(size, _BEHIND)
            for v, t in ahead.items():
                own[v] = t
            return own

        alone = [outcome(only({v: _AHEAD})) for v in range(size)]
        if len(set(alone)) == 1:
            return [(None, 1.0)]
        default = outcome(np.ones(size))
        # Behind the others, the winner no longer wins; a token without weight changes nothing.
        behind = np.where(np.eye(size, dtype=bool), _BEHIND, 1.0)
        first = next(
            (v for v in range(size) if alone[v] == default and outcome(behind[v]) != default), None
        )
        if first is None:
            raise AuditLimitError(
                "exponential noise is not used as argmax(weights / noise): audit it as a black box"
            )
        weights = np.zeros(size)
        weights[first] = 1.0
        for v in range(size):
            if alone[v] == alone[first]:
                continue
            low, high = np.log(1e-12), np.log(1e12)
            if outcome(only({first: 1.0, v: float(np.exp(low))})) == alone[first]:
                continue  # it has no weight
            for _ in range(_HALVINGS):
                middle = 0.5 * (low + high)
                wins = outcome(only({first: 1.0, v: float(np.exp(middle))})) != alone[first]
                low, high = (middle, high) if wins else (low, middle)
            weights[v] = np.exp(0.5 * (low + high))
        weights /= weights.sum()
        return [(only({v: _AHEAD}), float(weights[v])) for v in np.flatnonzero(weights)]


def _noises(races: list[int]) -> list[dict[int, np.ndarray]]:
    """A few fixed noises of races: whose winners differ has other weights."""
    if not races:
        return []
    rng = np.random.Generator(np.random.PCG64(0))  # default_rng is replaced
    return [{i: rng.exponential(size=v) for i, v in enumerate(races)} for _ in range(4)]


def hooked_law(
    calling: Calling, case: HardCase, drafts: str, rng: np.random.Generator, clock: AuditClock
) -> CaseLaw:
    """The law of a verifier that draws its own numbers.

    Raises:
      BadOutcomeError: the function raises, or its result cannot be read.
      AuditLimitError: the hooks do not see all of its random numbers, or do not know their use.
      OutOfTimeError: the time is spent.
    """
    blocks, weights = case.blocks(drafts)
    runs = _Runs(calling, case, blocks, clock)
    law, dimensions = None, 0
    with replaced(lambda: runs.script):
        _look_around(runs, len(blocks), rng)
        while law is None or runs.most > dimensions:  # branches that few runs take may draw more
            dimensions = runs.most
            law = _law(runs, case, blocks, weights, dimensions, rng)
    return law


def _look_around(runs: _Runs, num_drafts: int, rng: np.random.Generator) -> None:
    """Finds how many uniforms a run draws, and checks that runs repeat."""
    for draft in range(num_drafts):
        for level in (1e-12, 1.0 - 1e-12):
            runs.run(draft, Script(np.full(MOST_UNIFORMS, level)))
        points = rng.random((max(4, 64 // num_drafts), MOST_UNIFORMS))
        first, second = ([runs.run(draft, Script(x)) for x in points] for _ in range(2))
        if first != second:
            raise AuditLimitError(
                "the hooks do not see all of its random numbers: audit it as a black box"
            )


def _law(
    runs: _Runs,
    case: HardCase,
    blocks: np.ndarray,
    weights: np.ndarray,
    dimensions: int,
    rng: np.random.Generator,
) -> CaseLaw:
    """The law, if no run draws more uniforms than `dimensions`."""
    runs.signatures, runs.laws = {}, []
    if not dimensions:
        index = np.arange(len(blocks))
        codes = runs.evaluate(index, np.zeros((len(blocks), 0)))
        return CaseLaw(_spread(runs, case, blocks, index, codes, weights))
    _check_laws(runs, len(blocks), dimensions, rng)
    if dimensions > _MOST_COORDINATES:
        return _at_points(runs, case, blocks, weights, rng)
    resolution = RESOLUTIONS[runs.calling.dtype]
    found = partition(runs.evaluate, weights, dimensions, rng, resolution, probes=_PROBES)
    if found.mismatches:
        return _at_points(runs, case, blocks, weights, rng)
    drafted, points = faces(len(blocks), dimensions, rng)
    codes = runs.evaluate(drafted, points)
    edges = _spread(runs, case, blocks, drafted, codes, np.ones(len(codes)))
    probability = weights[found.drafts] * found.volumes
    outcomes = _spread(runs, case, blocks, found.drafts, found.codes, probability)
    single = runs.calling.dtype == "float64" and is_single(found.breaks, resolution)
    return CaseLaw(outcomes, edges, None, None, single)


def _check_laws(runs: _Runs, num_drafts: int, dimensions: int, rng: np.random.Generator) -> None:
    """Checks that runs of the same default outcome have the same law, as `evaluate` takes it."""
    for _ in range(CHECKED_LAWS):
        draft, point = int(rng.integers(num_drafts)), rng.random(dimensions)
        law = runs.law(draft, point)
        known = runs.laws[runs.evaluate(np.array([draft]), point[None])[0]]
        if any(abs(law.get(x, 0.0) - known.get(x, 0.0)) > 1e-6 for x in law | known):
            raise AuditLimitError(
                "what it does with a token that it drew depends on its uniforms in ways that hooks "
                "do not see: audit it as a black box"
            )


def _at_points(
    runs: _Runs,
    case: HardCase,
    blocks: np.ndarray,
    weights: np.ndarray,
    rng: np.random.Generator,
) -> CaseLaw:
    draft = rng.choice(len(blocks), size=_POINTS, p=weights / weights.sum())
    codes = runs.evaluate(draft, rng.random((_POINTS, MOST_UNIFORMS)))
    shares = np.full(_POINTS, 1.0 / _POINTS)
    outcomes = _spread(runs, case, blocks, draft, codes, shares)
    return CaseLaw(outcomes, None, None, _POINTS)


def _spread(
    runs: _Runs,
    case: HardCase,
    blocks: np.ndarray,
    draft: np.ndarray,
    numbers: np.ndarray,
    weight: np.ndarray,
) -> Outcomes:
    """Each point's law as outcomes."""
    entries = [
        (d, code, w * chance)
        for d, number, w in zip(draft, numbers, weight, strict=True)
        for code, chance in runs.laws[number].items()
    ]
    index, codes, mass = (np.array(x) for x in zip(*entries, strict=True))
    return outcomes_of(case, blocks, index, codes, mass)
