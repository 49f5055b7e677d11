"""Selects settings by their estimates, and chooses among them by successive halving."""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.checks import one_number, whole_number
from specjax.errors import UserError
from specjax.study.demand import Choice, Counts, Demand, Judge, Judged, relative
from specjax.study.drafting_plans import Plan
from specjax.study.expect import Expected
from specjax.study.measure import MeasuringError
from specjax.study.scores import Scores
from specjax.study.tables import pareto
from specjax.text.parts import Part
from specjax.text.setting import Setting

# (setting, number of the round from 0) -> its figures on all texts up to that round.
Look = Callable[[Setting, int], Scores]
# Settings with a lower chance are dropped.
_HOPELESS = 0.01
# A setting with this estimated speed-up may still be faster than the verifier alone.
_LEEWAY = 0.8
# Settings with this share of the highest speed-up may be preferred for the variety of rules.
_NEAR = 0.9
# The number of measured plans among those that differ only in numbers.
_OF_A_KIND = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """How settings are estimated and chosen.

    Attributes:
      demand: see `Demand.of`; None: measure the best settings without a choice.
      held_out: the share of the texts that are not used for the choice.
      confidence: the probability that the chosen setting meets the demand on the held-out texts.
      estimate_limit: the most texts that the verifier decodes for the estimates.
      candidates: the number of estimated settings to measure, at each temperature.
      rounds: the rounds of successive halving; each uses twice as many texts as the last.
      draws: see `expect`.
      seed: the seed of the estimates and of the selection of held-out texts.

    Raises:
      TypeError: a value has a wrong type.
      ValueError: a value is out of range, or the demand cannot be parsed.
    """

    demand: Demand | str | None = None
    held_out: float = 0.5
    confidence: float = 0.9
    estimate_limit: int = 64
    candidates: int = 12
    rounds: int = 3
    draws: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        put = object.__setattr__
        if self.demand is not None:
            put(self, "demand", Demand.of(self.demand))
        span: dict[str, Any] = {"open_low": True, "high": 1.0, "open_high": True, "dtype": float}
        put(self, "held_out", one_number("held_out", self.held_out, low=0.0, **span))
        put(self, "confidence", one_number("confidence", self.confidence, low=0.5, **span))
        for name in ("estimate_limit", "candidates", "rounds", "draws"):
            put(self, name, whole_number(name, getattr(self, name), low=1))
        put(self, "seed", whole_number("seed", self.seed, low=0))

    @property
    def asked(self) -> Demand | None:
        """The parsed demand."""
        assert not isinstance(self.demand, str)
        return self.demand

    def ends(self, rows: int, least: int) -> list[int]:
        """Returns the end of each round's texts; the held-out texts follow.

        Args:
          rows: the number of texts.
          least: the fewest texts of the first round and of the held-out part.

        Raises:
          ValueError: there are too few texts.
        """
        seen = rows - round(rows * self.held_out)
        ends = [max(seen >> (self.rounds - 1 - i), 1) for i in range(self.rounds)]
        if min(ends[0], rows - seen) < least:
            raise UserError(
                f"of {rows} texts, {rows - seen} are held out and {ends[0]} are in the first "
                f"of {self.rounds} rounds; both need at least {least}: add texts, or lower "
                "`rounds` or LATENCY_BATCH_SIZE"
            )
        return ends

    def to_dict(self) -> dict[str, Any]:
        """Returns JSON values."""
        demand = None if self.asked is None else self.asked.described()
        return dataclasses.asdict(self) | {"demand": demand}


def promising(
    estimates: Sequence[Expected], demand: Demand | None, count: int, rows: int = 1
) -> list[Setting]:
    """Selects the settings to measure by their estimates.

    It drops settings that will probably not meet the demand, or not be faster than the verifier
    alone, and settings that another strength of the same rule beats (faster, and closer to the
    verifier). Of plans that differ only in numbers it keeps the two fastest. If quality matters,
    which estimates do not predict, it splits the rest into bands of divergence (of speed, if the
    divergence is infinite), and takes from each band a setting that is almost as fast as the
    fastest, of the rule that was taken least often. Otherwise it takes almost the fastest. The
    fastest remaining lossless setting is always selected.

    Args:
      estimates: the estimates of all settings.
      demand: the demand; None to compare quality, speed and divergence.
      count: the most settings to select.
      rows: the batch size of the estimates; a demand is about the seconds of a single text.

    Returns:
      The settings, lossless first; no model alone.
    """
    clauses = () if demand is None else demand.clauses
    drafts = [x for x in estimates if not x.setting.is_alone]
    # Estimates of speed-ups are rough: these are measured however slow they seem.
    lossless = [x for x in drafts if x.setting.is_lossless]
    kept = (lossless,) if demand is not None else (drafts, lossless)
    fastest = [max(them, key=lambda x: x.speed, default=None) for them in kept]
    fit = [x for x in drafts if not x.speedup <= _LEEWAY or x in fastest]
    fit = [x for x in fit if all(clause.may_hold(x, rows) for clause in clauses)]
    fit = [x for kind in _by_kind(fit).values() for x in kind]
    lossless = [x for x in fit if x.setting.is_lossless]
    taken = sorted(lossless, key=lambda x: -x.speed)[:1]
    left = [x for x in fit if x not in taken]
    more = min(count - len(taken), len(left))
    bands: list[Sequence[Expected]] = [left] * more
    at_once = _OF_A_KIND
    if (demand is None or demand.reads_quality) and more > 0:
        left.sort(key=lambda x: (x.nats_per_token, x.speed))
        bands, at_once = _parts(left, more), 1
    kinds: Counter[Any] = Counter()
    for band in bands:
        rest = [x for x in band if x not in taken]
        enough = _NEAR * max(x.speed for x in rest)
        near = [x for x in rest if x.speed >= enough]
        taken.append(min(near, key=lambda x: (kinds[_kind(x)] // at_once, -x.speed)))
        kinds[_kind(taken[-1])] += 1
    return [x.setting for x in taken]


def _kind(estimate: Expected) -> Any:
    """A key shared by settings that differ only in numbers."""
    setting = estimate.setting
    rule = Part.parse(setting.rule).name
    return rule if setting.drafting is None else (rule, Plan.of(setting).kind)


def _by_kind(estimates: Sequence[Expected]) -> dict[Any, list[Expected]]:
    """The best estimates of each kind."""
    found: dict[Any, list[Expected]] = {}
    for estimate in estimates:
        found.setdefault(_kind(estimate), []).append(estimate)
    for kind, group in found.items():
        if isinstance(kind, str):
            found[kind] = _front(group)
        else:
            found[kind] = sorted(group, key=lambda x: -x.speed)[:_OF_A_KIND]
    return found


def _front(estimates: Sequence[Expected]) -> list[Expected]:
    seconds = [1.0 / x.speed for x in estimates]
    kept = pareto(seconds, [-x.nats_per_token for x in estimates])
    # Infinite divergences, such as of lossy rules at temperature 0, cannot be compared.
    return [
        x for x, stays in zip(estimates, kept, strict=True) if stays or math.isinf(x.nats_per_token)
    ]


def _parts(estimates: Sequence[Expected], count: int) -> list[Sequence[Expected]]:
    """Splits estimates into consecutive parts of similar sizes."""
    ends = np.linspace(0, len(estimates), count + 1).round().astype(int)
    return [estimates[start:stop] for start, stop in itertools.pairwise(ends)]


class HalvingRound(NamedTuple):
    """A round of successive halving.

    Attributes:
      texts: the number of texts so far.
      found: the figures of the measured settings.
      judged: their judgements.
      failed: settings that could not be measured -> why.
    """

    texts: Counts
    found: Mapping[Setting, Scores]
    judged: Mapping[Setting, Judged]
    failed: Mapping[Setting, str]


def halve(
    settings: Sequence[Setting],
    alone: Setting,
    look: Look,
    judge: Judge,
    texts: Sequence[Counts],
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[Choice, list[HalvingRound]]:
    """Successive halving: each round measures more texts with half of the settings.

    Each round keeps the settings with the highest worth: the chance to meet the demand in the last
    round times their speed-up (or quality). It also keeps the fastest lossless setting that may
    meet the demand. The verifier alone is in every round.

    Args:
      settings: the settings to measure.
      alone: the verifier alone.
      look: measures a setting; a `MeasuringError` drops the setting, unless it is `alone`.
      judge: judges the figures.
      texts: the number of texts in each round, with those of earlier rounds.
      tell: called with messages about the progress.

    Returns:
      The choice, and all rounds.

    Source: Karnin et al., Almost Optimal Exploration in Multi-Armed Bandits (ICML 2013).
    """
    left, rounds, failed = list(settings), list[HalvingRound](), dict[Setting, str]()
    for number, here in enumerate(texts):
        tell(
            f"round {number + 1} of {len(texts)}: measuring {len(left)} settings on "
            f"{here.rows} texts ..."
        )
        found = {alone: look(alone, number)}
        for setting in left:
            tell(f"  {setting.described()} ...")
            try:
                found[setting] = look(setting, number)
            except MeasuringError as error:
                failed[setting] = str(error)
                tell(f"  failed: {failed[setting]}")
        judged = judge.judge(found, alone, here)
        rounds.append(HalvingRound(here, found, judged, dict(failed)))
        left = _kept(found, judged, [setting for setting in left if setting in found])
    return judge.choose(rounds[-1].found, alone), rounds


def _kept(
    found: Mapping[Setting, Scores], judged: Mapping[Setting, Judged], settings: Sequence[Setting]
) -> list[Setting]:
    hopeful = [setting for setting in settings if judged[setting].chance >= _HOPELESS]
    ranked = sorted(hopeful, key=lambda setting: -judged[setting].worth)
    count = math.ceil(len(settings) / 2)
    lossless = [setting for setting in hopeful if setting.is_lossless]
    safe = sorted(lossless, key=lambda setting: relative(found[setting]))[:1]
    if not safe or safe[0] in ranked[:count]:
        return ranked[:count]
    return [*ranked[: max(count - 1, 1)], *safe]
