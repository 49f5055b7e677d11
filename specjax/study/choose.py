"""Which of many estimated settings are measured, and successive halving among these."""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.checks import one_number, whole_number
from specjax.study.demand import Choice, Counts, Demand, Judge, Judged, relative
from specjax.study.drafting_plans import Plan
from specjax.study.expect import Expected
from specjax.study.measure import MeasuringError
from specjax.study.scores import Scores
from specjax.study.tables import pareto
from specjax.text.parts import Part
from specjax.text.setting import Setting

# The setting, the number of the round from 0 -> its figures on all texts up to that round's.
Look = Callable[[Setting, int], Scores]
# A chance that is none.
_HOPELESS = 0.01
# What is expected to be so fast may still be faster than the verifier alone.
_LEEWAY = 0.8
# What has this share of the highest speed-up may be taken for another rule's sake.
_NEAR = 0.9
# Of plans that differ in numbers alone so many are measured.
_OF_A_KIND = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """How settings are estimated and chosen.

    Attributes:
      demand: see `Demand.of`; None to measure the best without a choice.
      held_out: the share of the texts that a choice does not see.
      confidence: how likely what is chosen meets the demand on these.
      estimate_limit: how many of the other texts the verifier decodes for the estimates.
      candidates: how many settings are measured.
      rounds: of successive halving; each looks at twice as many texts as the one before.
      draws: see `expect`.
      seed: of estimates, and of which texts are held out.

    Raises:
      TypeError: for a value of the wrong type.
      ValueError: for one out of range, or a demand that cannot be read.
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
        """The demand as it was read."""
        assert not isinstance(self.demand, str)
        return self.demand

    def ends(self, rows: int, least: int) -> list[int]:
        """Where each round's texts end, of so many; the held-out ones follow.

        Each round looks at twice as many texts as the one before.

        Args:
          rows: all texts.
          least: how many the first round and the held-out part need.

        Raises:
          ValueError: there are too few.
        """
        seen = rows - round(rows * self.held_out)
        ends = [max(seen >> (self.rounds - 1 - i), 1) for i in range(self.rounds)]
        if min(ends[0], rows - seen) < least:
            raise ValueError(
                f"of {rows} texts, {rows - seen} are held out and {ends[0]} are in the first "
                f"of {self.rounds} rounds; both need at least {least}: add texts, or lower "
                "`rounds` or LATENCY_BATCH_SIZE"
            )
        return ends

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        asked = None if self.asked is None else self.asked.described()
        return dataclasses.asdict(self) | {"demand": asked}


def promising(
    estimates: Sequence[Expected], demand: Demand | None, count: int, rows: int = 1
) -> list[Setting]:
    """The settings that are worth measuring.

    Those that cannot be expected to meet the demand, or to be faster than the verifier alone, are
    left out, and so are those that another one of the same rule beats: faster, and nearer to the
    verifier. Of plans that differ in their numbers alone the two fastest stay. Where quality
    matters, of which estimates tell nothing, the rest is cut into bands of divergence (of speed,
    where that is endless), and each gives one that is about as fast as its fastest, of the rule
    that was taken least often. Elsewhere about the fastest are taken. Of the lossless ones that are
    left, the fastest is always there.

    Args:
      estimates: of all settings.
      demand: what is demanded; None where quality, speed and divergence are to be compared.
      count: the most that are taken.
      rows: how many texts were estimated at once; a demand is of the seconds of one.

    Returns:
      The settings, lossless first; no model alone.
    """
    clauses = () if demand is None else demand.clauses
    fit = [one for one in estimates if not (one.setting.is_alone or one.speedup <= _LEEWAY)]
    fit = [one for one in fit if all(clause.may_hold(one, rows) for clause in clauses)]
    fit = [one for kind in _by_kind(fit).values() for one in kind]
    lossless = [one for one in fit if one.setting.is_lossless]
    taken = sorted(lossless, key=lambda one: -one.speed)[:1]
    left = [one for one in fit if one not in taken]
    more = min(count - len(taken), len(left))
    bands: list[Sequence[Expected]] = [left] * more
    at_once = _OF_A_KIND
    if (demand is None or demand.reads_quality) and more > 0:
        left.sort(key=lambda one: (one.nats_per_token, one.speed))
        bands, at_once = _parts(left, more), 1
    kinds: Counter[Any] = Counter()
    for band in bands:
        rest = [one for one in band if one not in taken]
        enough = _NEAR * max(one.speed for one in rest)
        near = [one for one in rest if one.speed >= enough]
        taken.append(min(near, key=lambda one: (kinds[_kind(one)] // at_once, -one.speed)))
        kinds[_kind(taken[-1])] += 1
    return [one.setting for one in taken]


def _kind(one: Expected) -> Any:
    """What a setting has in common with those that have other numbers alone."""
    rule = Part.parse(one.setting.rule).name
    return rule if one.setting.drafting is None else (rule, Plan.of(one.setting).kind)


def _by_kind(estimates: Sequence[Expected]) -> dict[Any, list[Expected]]:
    """Those of each kind that no other of it beats."""
    found: dict[Any, list[Expected]] = {}
    for one in estimates:
        found.setdefault(_kind(one), []).append(one)
    for kind, group in found.items():
        if isinstance(kind, str):
            found[kind] = _front(group)
        else:
            found[kind] = sorted(group, key=lambda one: -one.speed)[:_OF_A_KIND]
    return found


def _front(estimates: Sequence[Expected]) -> list[Expected]:
    seconds = [1.0 / one.speed for one in estimates]
    kept = pareto(seconds, [-one.nats_per_token for one in estimates])
    # Endless divergences, as those of lossy rules at temperature 0, order nothing.
    return [
        one
        for one, stays in zip(estimates, kept, strict=True)
        if stays or math.isinf(one.nats_per_token)
    ]


def _parts(estimates: Sequence[Expected], count: int) -> list[Sequence[Expected]]:
    """As many parts, one after the other, of about one length."""
    ends = np.linspace(0, len(estimates), count + 1).round().astype(int)
    return [estimates[start:stop] for start, stop in itertools.pairwise(ends)]


class HalvingRound(NamedTuple):
    """One round.

    Attributes:
      texts: what was looked at.
      found: the figures of those that were in it.
      judged: what was thought of them.
      failed: the settings that could not be measured -> why.
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
    """Successive halving: each round looks at more texts and at half of the settings.

    Those go on that may be expected to bring most: the chance that they meet the demand in the last
    round times how much faster (or better) they are. The fastest lossless one that may meet it goes
    on too: its texts are the verifier's by law. The verifier alone is in every round.

    Args:
      settings: what is measured.
      alone: the verifier alone.
      look: measures; a `MeasuringError` of another setting than `alone` ends that setting alone.
      judge: says what the figures are worth.
      texts: how many texts each round looks at, those of the rounds before among them.
      tell: is told how far it is.

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
            except MeasuringError as error:  # the others go on
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
