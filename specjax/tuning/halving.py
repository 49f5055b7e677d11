"""Which of many screened settings are measured, and successive halving among these."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specjax.sweeping.scores import Scores
from specjax.sweeping.tables import pareto
from specjax.tuning.demand import Demand
from specjax.tuning.judging import Choice, Judge, Judged, Texts, relative
from specjax.tuning.screen import Screened
from specjax.tuning.settings import Setting

# A chance that is none.
_HOPELESS = 0.01
# What is expected to be so fast may still be faster than the verifier alone.
_LEEWAY = 0.8
# What has this share of the highest speed-up may be taken for another rule's sake.
_NEAR = 0.9


class MeasuringError(Exception):
    """A setting could not be measured, as where the memory is full or a model gives NaN.

    Args:
      error: what was raised.
    """

    def __init__(self, error: Exception):
        super().__init__(f"{type(error).__name__}: {' '.join(str(error).split())}")


# The setting, the number of the round from 0 -> its figures on all texts up to that round's.
Look = Callable[[Setting, int], Scores]


def promising(
    screened: Sequence[Screened], demand: Demand, count: int, rows: int = 1
) -> list[Setting]:
    """The settings that are worth measuring.

    Those that cannot be expected to meet the demand, or to be faster than the verifier alone, are
    left out, and so are those that another one of the same rule beats: faster, and nearer to the
    verifier. Where quality matters, of which screening tells nothing, the rest is cut into bands of
    divergence (of speed, where that is endless), and each gives one that is about as fast as its
    fastest, of the rule that was taken least often. Elsewhere about the fastest are taken. Of the
    lossless ones that are left, the fastest is always there.

    Args:
      screened: with times.
      demand: what is asked.
      count: the most that are taken.
      rows: how many texts were screened at once; a demand is of the seconds of one.

    Returns:
      The settings, lossless first.
    """
    drafting = [one for one in screened if one.setting.max_draft and one.speedup > _LEEWAY]
    fit = [one for one in drafting if all(clause.may_hold(one, rows) for clause in demand.clauses)]
    fit = [one for rule in _by_rule(fit).values() for one in _front(rule)]
    lossless = [one for one in fit if one.setting.rule == "Lossless"]
    taken = sorted(lossless, key=lambda one: -one.speedup)[:1]
    left = [one for one in fit if one not in taken]
    more = min(count - len(taken), len(left))
    bands: list[Sequence[Screened]] = [left] * more
    at_once = 2
    if demand.reads_quality and more > 0:
        left.sort(key=lambda one: (one.nats_per_token, one.speedup))
        bands, at_once = _parts(left, more), 1
    rules: Counter[str] = Counter()
    for band in bands:
        rest = [one for one in band if one not in taken]
        enough = _NEAR * max(one.speedup for one in rest)
        near = [one for one in rest if one.speedup >= enough]
        taken.append(min(near, key=lambda one: (rules[one.setting.rule] // at_once, -one.speedup)))
        rules[taken[-1].setting.rule] += 1
    return [one.setting for one in taken]


def _by_rule(screened: Sequence[Screened]) -> dict[str, list[Screened]]:
    found: dict[str, list[Screened]] = {}
    for one in screened:
        found.setdefault(one.setting.rule, []).append(one)
    return found


def _front(screened: Sequence[Screened]) -> list[Screened]:
    kept = pareto(
        [1.0 / one.speedup for one in screened], [-one.nats_per_token for one in screened]
    )
    # Endless divergences, as those of lossy rules at temperature 0, order nothing.
    return [
        one
        for one, stays in zip(screened, kept, strict=True)
        if stays or math.isinf(one.nats_per_token)
    ]


def _parts(screened: Sequence[Screened], count: int) -> list[Sequence[Screened]]:
    """As many parts, one after the other, of about one length."""
    ends = np.linspace(0, len(screened), count + 1).round().astype(int)
    return [screened[start:stop] for start, stop in itertools.pairwise(ends)]


class Round(NamedTuple):
    """One round.

    Attributes:
      texts: what was looked at.
      found: the figures of those that were in it.
      judged: what was thought of them.
      failed: the settings that could not be measured -> why.
    """

    texts: Texts
    found: Mapping[Setting, Scores]
    judged: Mapping[Setting, Judged]
    failed: Mapping[Setting, str]


def halve(
    settings: Sequence[Setting],
    alone: Setting,
    look: Look,
    judge: Judge,
    texts: Sequence[Texts],
    tell: Callable[[str], None] = lambda _: None,
) -> tuple[Choice, list[Round]]:
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
    left, rounds, failed = list(settings), list[Round](), dict[Setting, str]()
    for number, here in enumerate(texts):
        tell(f"round {number + 1} of {len(texts)}: {len(left)} settings on {here.rows} texts ...")
        found = {alone: look(alone, number)}
        for setting in left:
            tell(f"  {setting.described()} ...")
            try:
                found[setting] = look(setting, number)
            except MeasuringError as error:  # the others go on
                failed[setting] = str(error)
                tell(f"  failed: {failed[setting]}")
        judged = judge.judge(found, alone, here)
        rounds.append(Round(here, found, judged, dict(failed)))
        left = _kept(found, judged, [setting for setting in left if setting in found])
    return judge.choose(rounds[-1].found, alone), rounds


def _kept(
    found: Mapping[Setting, Scores], judged: Mapping[Setting, Judged], settings: Sequence[Setting]
) -> list[Setting]:
    hopeful = [setting for setting in settings if judged[setting].chance >= _HOPELESS]
    ranked = sorted(hopeful, key=lambda setting: -judged[setting].worth)
    count = math.ceil(len(settings) / 2)
    lossless = [setting for setting in hopeful if setting.rule == "Lossless"]
    safe = sorted(lossless, key=lambda setting: relative(found[setting]))[:1]
    if not safe or safe[0] in ranked[:count]:
        return ranked[:count]
    return [*ranked[: max(count - 1, 1)], *safe]
