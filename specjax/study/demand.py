"""What a user demands of a way to decode, such as `quality >= 35`, and which settings meet it.

A figure of n texts differs from that of m others of the same kind by s sqrt(1 + n / m), where s is
its standard error on the n. A setting is taken to meet the demand if it does so by z times that on
the texts that were looked at. z is the quantile of the largest standardised error among all
settings that might be chosen, by the bootstrap, whose resamples are the same for all: so it holds
for the one that looks best. Likewise the best one is surely faster than the verifier alone (or
better) if it is so by another such z times its standard error.

Axes: R resamples.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from specjax.evaluation import Bootstrap
from specjax.runs.evaluation import as_json
from specjax.study.expect import Expected
from specjax.study.scores import RELATIVE, Scores
from specjax.text.setting import Setting

QUALITY, LATENCY, NATS, DIFFERENCE = "quality", "latency", "nats_per_token", "difference"
# What passes' times and the verifier's contexts leave open: how far past a bound estimates may be.
_LEEWAY = {LATENCY: 1.3, RELATIVE: 1.3, NATS: 1.5}
_NUMBER = r"([-+]?[0-9.]+(?:e[-+]?[0-9]+)?)"
_FORMS = {
    rf"quality *>= *{_NUMBER}": QUALITY,
    rf"latency *<= *{_NUMBER} *(?:s|seconds?)": LATENCY,
    rf"latency *<= *{_NUMBER} of the verifier(?:'s)?": RELATIVE,
    rf"as good as the verifier(?: within {_NUMBER})?": DIFFERENCE,
    rf"nats per token *<= *{_NUMBER}": NATS,
}
_KNOWN = (
    "'quality >= 35', 'latency <= 0.2 seconds', 'latency <= 0.7 of the verifier', "
    "'as good as the verifier', 'nats per token <= 0.05', or several joined by 'and'"
)

Found = Mapping[Setting, Scores]
DRAFT, DO_NOT_DRAFT, NOT_MET = "draft", "do not draft", "cannot be met"
_PLAIN = Bootstrap()


class Slack(NamedTuple):
    """How far a figure is on the good side of its bound; negative on the other.

    Attributes:
      value: of all texts.
      resampled: `[R]`, of each resample.
    """

    value: float
    resampled: np.ndarray  # [R]

    @property
    def error(self) -> float:
        """The standard error; infinite where there is none."""
        finite = np.isfinite(self.resampled)
        return float(self.resampled.std()) if finite.all() else math.inf


class Clause(NamedTuple):
    """One demand.

    Attributes:
      figure: `QUALITY`, `LATENCY` (seconds of a text), `RELATIVE` (the same over the verifier's),
        `NATS` or `DIFFERENCE` (of the quality from the verifier's).
      bound: the least, or the most.
    """

    figure: str
    bound: float

    @property
    def at_least(self) -> bool:
        """Whether more of the figure is better."""
        return self.figure in (QUALITY, DIFFERENCE)

    @property
    def is_timed(self) -> bool:
        """Whether it is of the texts that are timed."""
        return self.figure in (LATENCY, RELATIVE)

    def described(self) -> str:
        """In words that `Demand.of` reads."""
        bound = f"{self.bound:g}"
        if self.figure == DIFFERENCE:
            return "as good as the verifier" + (f" within {-self.bound:g}" if self.bound else "")
        return {
            QUALITY: f"quality >= {bound}",
            LATENCY: f"latency <= {bound} seconds",
            RELATIVE: f"latency <= {bound} of the verifier",
            NATS: f"nats per token <= {bound}",
        }[self.figure]

    def holds_by_law(self, setting: Setting) -> bool:
        """Whether it holds of a setting because its texts follow the verifier's distribution."""
        of_law = self.figure in (DIFFERENCE, NATS)
        return of_law and setting.is_lossless

    def slack(self, scores: Scores, verifier: Scores, quality: str | None) -> Slack:
        """How far a setting is on the good side.

        Args:
          scores: of the setting.
          verifier: of the verifier alone on the same texts.
          quality: the figure that is called quality; None if there is none, so that nothing is
            known of a demand on it.
        """
        name = quality or "" if self.figure in (QUALITY, DIFFERENCE) else self.figure
        values = _values(scores, name)
        if self.figure == DIFFERENCE:
            values = values - _values(verifier, name)
        apart = values - self.bound if self.at_least else self.bound - values
        return Slack(float(apart[0]), apart[1:])

    def may_hold(self, estimate: Expected, rows: int = 1) -> bool:
        """Whether what is expected of `rows` texts at once leaves it possible."""
        expected = {
            LATENCY: estimate.latency / rows,
            RELATIVE: 1.0 / estimate.speedup,
            NATS: estimate.nats_per_token,
        }.get(self.figure)
        return expected is None or not expected > self.bound * _LEEWAY[self.figure]


class Demand(NamedTuple):
    """What a way to decode must meet: all of the clauses.

    Attributes:
      clauses: at least one.
    """

    clauses: tuple[Clause, ...]

    @classmethod
    def of(cls, text: Any) -> "Demand":
        """Reads a demand.

        Args:
          text: `quality >= x`, `latency <= y seconds`, `latency <= y of the verifier`, `as good as
            the verifier` (also `within d`, for a quality lower by up to d), `nats per token <= e`;
            or several of them joined by `and`.

        Raises:
          TypeError: it is no text.
          ValueError: it is none of these, or a bound is out of range.
        """
        if isinstance(text, Demand):
            return text
        if not isinstance(text, str):
            raise TypeError(f"demand must be a text such as {_KNOWN}, got {text!r}")
        plain = " ".join(text.lower().replace("≥", ">=").replace("≤", "<=").split())
        return cls(tuple(_clause(part, text) for part in plain.split(" and ")))

    def described(self) -> str:
        """In words that `of` reads."""
        return " and ".join(clause.described() for clause in self.clauses)

    @property
    def wants_quality(self) -> bool:
        """Whether the best, and not the fastest, is chosen: where only the latency is bounded."""
        return all(clause.is_timed for clause in self.clauses)

    @property
    def reads_quality(self) -> bool:
        """Whether the choice depends on texts' quality, of which estimates tell nothing."""
        return self.wants_quality or any(clause.at_least for clause in self.clauses)


def _clause(part: str, text: str) -> Clause:
    for form, figure in _FORMS.items():
        if (found := re.fullmatch(form, part)) is None:
            continue
        try:
            bound = float(found[1] or 0.0)
        except ValueError:
            break
        low: Callable[[float], bool] = {
            QUALITY: lambda x: True,
            DIFFERENCE: lambda x: x >= 0,
            NATS: lambda x: x >= 0,
        }.get(figure, lambda x: x > 0)
        if not math.isfinite(bound) or not low(bound):
            raise ValueError(f"demand: the bound in {part!r} is out of range, got {text!r}")
        return Clause(figure, -bound if figure == DIFFERENCE and bound else bound)
    raise ValueError(f"demand must look like {_KNOWN}, got {text!r}")


def _values(scores: Scores, name: str) -> np.ndarray:
    """A figure and its resamples; NaN, which meets nothing, for what is absent or not finite."""
    found = scores.figures.get(name, {}).get("value")
    again = scores.resampled.get(name, np.full(1, math.nan))
    return np.concatenate([[math.nan if found is None else found], again])


class Counts(NamedTuple):
    """How many texts there are.

    Attributes:
      rows: with their quality.
      timed: of these with their times.
    """

    rows: int
    timed: int


class Judged(NamedTuple):
    """What a setting's figures say of the demand, of the clause that is the least sure.

    Attributes:
      clause: that clause.
      slack: how far its figure is on the good side of its bound; infinite where it holds by law.
      error: the standard error of `slack`.
      margin: how far it must be there in the last round.
      chance: that it will be.
      gain: how many times as fast as the verifier alone; its quality, where that is wanted.
    """

    clause: Clause
    slack: float
    error: float
    margin: float
    chance: float
    gain: float

    @property
    def passes(self) -> bool:
        """Whether it is far enough."""
        return self.slack >= self.margin

    @property
    def lead(self) -> float:
        """How far past the margin, in standard errors: clauses have figures of different units."""
        apart = self.slack - self.margin
        if 0.0 < self.error < math.inf:
            return apart / self.error
        return math.inf if apart >= 0.0 else -math.inf

    @property
    def worth(self) -> float:
        """What it may be expected to bring."""
        return self.chance * self.gain


class Choice(NamedTuple):
    """The answer.

    Attributes:
      answer: `DRAFT`, `DO_NOT_DRAFT` or `NOT_MET`.
      setting: to decode with; None for `NOT_MET`.
      why: in words.
    """

    answer: str
    setting: Setting | None
    why: str


# How far a setting leads the verifier alone.
_FASTER, _BETTER = Clause(RELATIVE, 1.0), Clause(DIFFERENCE, 0.0)


class Judge:
    """Judges settings, more surely from round to round.

    Args:
      demand: what is asked.
      quality: the figure that is called quality; None if there is none: then only lossless
        settings are as good as the verifier.
      confidence: how likely what passes meets the demand on held-out texts.
      last: the texts of the last round.
      held_out: the texts of the report.

    Raises:
      ValueError: the demand reads the quality, and there is none.
    """

    def __init__(
        self, demand: Demand, quality: str | None, confidence: float, last: Counts, held_out: Counts
    ):
        of_quality = any(clause.figure == QUALITY for clause in demand.clauses)
        if quality is None and (of_quality or demand.wants_quality):
            raise ValueError(
                f"demand={demand.described()!r} needs a measured quality: give references and "
                "METRICS"
            )
        self.demand, self.quality, self.confidence = demand, quality or "", confidence
        self._last, self._held_out = last, held_out
        self._z = 0.0
        # Of the lead over the verifier alone in speed and in quality.
        leads = (_FASTER, _BETTER) if demand.wants_quality else (_FASTER,)
        self._z_of_lead = dict.fromkeys(leads, 0.0)

    def judge(self, found: Found, alone: Setting, now: Counts) -> dict[Setting, Judged]:
        """What is to be thought of each setting.

        Args:
          found: the figures of all settings that are left, with the verifier alone.
          alone: the verifier alone.
          now: the texts of this round.

        Returns:
          The same settings.
        """
        slacks = {
            (setting, clause): clause.slack(scores, found[alone], self.quality)
            for setting, scores in found.items()
            for clause in self.demand.clauses
            if not clause.holds_by_law(setting)
        }
        # Settings that have left the race were in it: z does not fall with their number.
        self._z = max(self._z, self._quantile(slacks.values()))
        for lead, z in self._z_of_lead.items():
            leads = [
                lead.slack(scores, found[alone], self.quality)
                for setting, scores in found.items()
                if setting != alone
            ]
            self._z_of_lead[lead] = max(z, self._quantile(leads))
        judged = {}
        for setting, scores in found.items():
            gain = self._gain(scores)
            parts = []
            for clause in self.demand.clauses:
                if (slack := slacks.get((setting, clause))) is None:
                    parts.append(Judged(clause, math.inf, 0.0, 0.0, 1.0, gain))
                else:
                    parts.append(self._judged(clause, slack.value, slack.error, now, gain))
            judged[setting] = min(parts, key=lambda one: (one.chance, one.lead))
        return judged

    def _quantile(self, slacks: Iterable[Slack]) -> float:
        """Of the largest standardised error; 0 where there is none."""
        errors = [
            (slack.resampled - slack.value) / slack.error
            for slack in slacks
            if 0.0 < slack.error < math.inf and math.isfinite(slack.value)
        ]
        return float(np.quantile(np.max(errors, axis=0), self.confidence)) if errors else 0.0

    def _judged(
        self, clause: Clause, value: float, error: float, now: Counts, gain: float
    ) -> Judged:
        which = int(clause.is_timed)
        seen, last, held_out = now[which], self._last[which], self._held_out[which]
        if not math.isfinite(value) or error == math.inf:
            return Judged(clause, -math.inf, error, 0.0, 0.0, gain)
        share = min(seen / last, 1.0)
        margin = self._z * error * math.sqrt(share * (1.0 + last / held_out))
        spread = error * math.sqrt(1.0 - share)  # of the last round's figure, seen from here
        apart = value - margin
        chance = _normal(apart / spread) if spread else float(apart >= 0.0)
        return Judged(clause, value, error, margin, chance, gain)

    def _gain(self, scores: Scores) -> float:
        name = self.quality if self.demand.wants_quality else RELATIVE
        value = scores.figures[name]["value"]
        if value is None:
            return 0.0
        return value if self.demand.wants_quality else 1.0 / value

    def choose(self, found: Found, alone: Setting) -> Choice:
        """The best setting that passes in the last round.

        The fastest; the one of the best quality where the demand bounds the latency alone. Where
        the verifier alone passes too, and that one may be no faster (or no better): the verifier
        alone, or a lossless setting that is surely faster.

        Args:
          found: the figures of all settings that are left, with the verifier alone.
          alone: the verifier alone.

        Returns:
          The answer.
        """
        judged = self.judge(found, alone, self._last)
        passing = [setting for setting, one in judged.items() if one.passes]
        if not passing:
            return Choice(NOT_MET, None, self._why_not(judged))
        best = max(passing, key=lambda setting: judged[setting].gain)
        lead = _BETTER if self.demand.wants_quality else _FASTER
        told, surely = self._compared(lead, found[best], found[alone])
        if best != alone and (surely or alone not in passing):
            return Choice(DRAFT, best, f"it is {told}")
        lossless = [setting for setting in passing if setting.is_lossless]
        safe = min(lossless, key=lambda setting: relative(found[setting]))
        if self.demand.wants_quality and safe != alone:
            free, surely = self._compared(_FASTER, found[safe], found[alone])
            if surely:
                return Choice(
                    DRAFT, safe, f"it is {free}, and lossless: its quality is the verifier's"
                )
        if best == alone:
            others = [setting for setting in passing if setting != alone]
            reason = "is better" if self.demand.wants_quality else "is faster"
            told = f"no other setting that meets the demand {reason}"
            if not others:
                told = "it meets the demand, and no other measured setting reliably does"
            return Choice(DO_NOT_DRAFT, alone, told)
        told = f"the best other setting, {best.described()}, is {told}: this may be chance"
        return Choice(DO_NOT_DRAFT, alone, told)

    def _compared(self, lead: Clause, best: Scores, alone: Scores) -> tuple[str, bool]:
        """How a setting compares with the verifier alone, and whether it surely leads."""
        found = lead.slack(best, alone, self.quality)
        least = found.value - self._z_of_lead[lead] * found.error
        if lead == _BETTER:
            told = f"{found.value:+.3g} {self.quality} over the verifier alone"
            return f"{told} (at least {least:+.3g})", least > 0.0
        told = f"{1.0 / (1.0 - found.value):.3g} times as fast as the verifier alone"
        return f"{told} (at least {1.0 / (1.0 - least):.3g})", least > 0.0

    def _why_not(self, judged: Mapping[Setting, Judged]) -> str:
        finite = {setting: one for setting, one in judged.items() if math.isfinite(one.slack)}
        if not finite:
            return "no setting has the figures that the demand needs"
        nearest = max(finite, key=lambda setting: finite[setting].lead)
        one = finite[nearest]
        about = f"{nearest.described()} comes closest to {one.clause.described()!r}: "
        if one.slack < 0.0:
            return about + f"it misses the bound by {-one.slack:.3g}"
        return about + (
            f"it meets the bound by {one.slack:.3g} on {self._last.rows} texts, but needs a "
            f"margin of {one.margin:.3g}: relax the demand, or add texts"
        )


def relative(scores: Scores) -> float:
    """The latency over the verifier's; infinite where there is none."""
    value = scores.figures[RELATIVE]["value"]
    return math.inf if value is None else value


def _normal(x: float) -> float:
    """The normal distribution."""
    return 0.5 * (1.0 + math.erf(x / math.sqrt(2.0)))


def verdict(
    demand: Demand,
    setting: Setting,
    scores: Scores,
    verifier: Scores,
    quality: str | None,
    bootstrap: Bootstrap = _PLAIN,
) -> list[dict[str, Any]]:
    """What texts that were not looked at say of each clause.

    Args:
      demand: what was asked.
      setting: what was chosen.
      scores: its figures there.
      verifier: those of the verifier alone.
      quality: the figure that is called quality.
      bootstrap: the resampling of the figures.

    Returns:
      Of each clause `demand`; `slack` with `low` and `high`, how far its figure is on the good side
      of the bound; `by_law`, whether it holds because the texts follow the verifier's distribution;
      `met`, whether it holds by law or the slack is not below 0.
    """
    told = []
    for clause in demand.clauses:
        slack = clause.slack(scores, verifier, quality)
        found = as_json(bootstrap.summary(slack.value, slack.resampled))
        by_law = clause.holds_by_law(setting)
        told.append(
            {
                "demand": clause.described(),
                "slack": found["value"],
                "low": found["low"],
                "high": found["high"],
                "by_law": by_law,
                "met": by_law or slack.value >= 0.0,
            }
        )
    return told
