"""Demands of a user, such as `quality >= 35`, and the settings that meet them.

The difference of a figure on n texts and on m other texts has the standard error s sqrt(1 + n / m),
where s is the standard error on the n texts. A setting passes if it meets the demand by z times
this on the measured texts. z is the quantile of the largest standardised error among all settings
that might be chosen, from the bootstrap, whose resamples all settings share: so it is valid for the
best setting, too. Likewise a setting is reliably faster (or better) than the verifier alone if its
lead is another such z times its standard error.

Axes: R resamples.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from specjax.errors import UserError
from specjax.evaluation import Bootstrap
from specjax.rules import KLBall
from specjax.runs.evaluation import as_json
from specjax.study.expect import Expected
from specjax.study.scores import RELATIVE, Scores
from specjax.text.setting import Setting

QUALITY, LATENCY, NATS, DIFFERENCE = "quality", "latency", "nats_per_token", "difference"
# How far past a bound an estimate may be, because times and contexts differ from measurements.
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
    """The distance of a figure from its bound; negative if the bound is missed.

    Attributes:
      value: on all texts.
      resampled: `[R]`, on each resample.
    """

    value: float
    resampled: np.ndarray  # [R]

    @property
    def error(self) -> float:
        """The standard error; infinite if undefined."""
        finite = np.isfinite(self.resampled)
        return float(self.resampled.std()) if finite.all() else math.inf


class Clause(NamedTuple):
    """A single demand.

    Attributes:
      figure: `QUALITY`, `LATENCY` (seconds of a text), `RELATIVE` (latency over the verifier's),
        `NATS` or `DIFFERENCE` (quality minus the verifier's).
      bound: the smallest or the largest value.
    """

    figure: str
    bound: float

    @property
    def at_least(self) -> bool:
        """Whether larger figures are better."""
        return self.figure in (QUALITY, DIFFERENCE)

    @property
    def is_timed(self) -> bool:
        """Whether it is a figure of the timed texts."""
        return self.figure in (LATENCY, RELATIVE)

    def described(self) -> str:
        """Returns the text for `Demand.of`."""
        bound = _exact(abs(self.bound) if self.figure == DIFFERENCE else self.bound)
        if self.figure == DIFFERENCE:
            return "as good as the verifier" + (f" within {bound}" if self.bound else "")
        return {
            QUALITY: f"quality >= {bound}",
            LATENCY: f"latency <= {bound} seconds",
            RELATIVE: f"latency <= {bound} of the verifier",
            NATS: f"nats per token <= {bound}",
        }[self.figure]

    def holds_by_law(self, setting: Setting) -> bool:
        """Whether a setting certainly meets it: it is lossless, or its rule has such a bound."""
        if self.figure == NATS and setting.method is None:
            rule = setting.made("rule")
            if isinstance(rule, KLBall) and setting.strength is not None:
                return setting.strength <= self.bound
        return self.figure in (DIFFERENCE, NATS) and setting.is_lossless

    def slack(self, scores: Scores, verifier: Scores, quality: str | None) -> Slack:
        """Returns the distance of a setting's figure from the bound.

        Args:
          scores: the setting's figures.
          verifier: the figures of the verifier alone on the same texts.
          quality: the name of the quality figure; None: the slack of a quality is NaN.
        """
        name = quality or "" if self.figure in (QUALITY, DIFFERENCE) else self.figure
        values = _values(scores, name)
        if self.figure == DIFFERENCE:
            values = values - _values(verifier, name)
        apart = values - self.bound if self.at_least else self.bound - values
        return Slack(float(apart[0]), apart[1:])

    def may_hold(self, estimate: Expected, rows: int = 1) -> bool:
        """Whether a setting may meet it, by an estimate for a batch of `rows` texts."""
        expected = {
            LATENCY: estimate.latency / rows,
            RELATIVE: 1.0 / estimate.speedup,
            NATS: estimate.nats_per_token,
        }.get(self.figure)
        return expected is None or not expected > self.bound * _LEEWAY[self.figure]


class Demand(NamedTuple):
    """A demand: a setting must meet all clauses.

    Attributes:
      clauses: at least one clause.
    """

    clauses: tuple[Clause, ...]

    @classmethod
    def of(cls, text: Any) -> "Demand":
        """Parses a demand.

        Args:
          text: `quality >= x`, `latency <= y seconds`, `latency <= y of the verifier`, `as good as
            the verifier` (also `within d`, for a quality lower by up to d), `nats per token <= e`;
            or several of these joined by `and`.

        Raises:
          TypeError: `text` is not a text.
          ValueError: it has another form, or a bound is out of range.
        """
        if isinstance(text, Demand):
            return text
        if not isinstance(text, str):
            raise UserError(f"demand must be a text such as {_KNOWN}, got {text!r}")
        plain = " ".join(text.lower().replace("≥", ">=").replace("≤", "<=").split())
        return cls(tuple(_clause(part, text) for part in plain.split(" and ")))

    def described(self) -> str:
        """Returns the text for `of`."""
        return " and ".join(clause.described() for clause in self.clauses)

    @property
    def wants_quality(self) -> bool:
        """Whether to choose the best and not the fastest setting: if only latency is bounded."""
        return all(clause.is_timed for clause in self.clauses)

    @property
    def reads_quality(self) -> bool:
        """Whether the choice depends on the quality, which estimates do not predict."""
        return self.wants_quality or any(clause.at_least for clause in self.clauses)

    def check_quality(self, quality: str | None) -> None:
        """Raises ValueError if the demand needs a quality, even of lossless settings.

        Args:
          quality: the name of the figure of quality; None if there is none.
        """
        of_quality = any(clause.figure == QUALITY for clause in self.clauses)
        if quality is None and (of_quality or self.wants_quality):
            raise UserError(
                f"demand={self.described()!r} needs a measured quality: give references and METRICS"
            )


def _exact(number: float) -> str:
    """The shortest text of exactly this number: 35, not 35.0."""
    short = f"{number:g}"
    return short if float(short) == number else repr(number)


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
            raise UserError(f"demand: the bound in {part!r} is out of range, got {text!r}")
        return Clause(figure, -bound if figure == DIFFERENCE and bound else bound)
    raise UserError(f"demand must look like {_KNOWN}, got {text!r}")


def _values(scores: Scores, name: str) -> np.ndarray:
    """A figure and its resamples; NaN, which meets no demand, for a missing figure."""
    found = scores.figures.get(name, {}).get("value")
    again = scores.resampled.get(name, np.full(1, math.nan))
    return np.concatenate([[math.nan if found is None else found], again])


class Counts(NamedTuple):
    """Numbers of texts.

    Attributes:
      rows: all texts, which have a quality.
      timed: the timed texts among them.
    """

    rows: int
    timed: int


class Judged(NamedTuple):
    """The judgement of a setting, for the clause with the lowest chance.

    Attributes:
      clause: this clause.
      slack: the distance of its figure from the bound; infinite if it certainly meets it.
      error: the standard error of `slack`.
      margin: the required slack in the last round.
      chance: the probability of at least that slack in the last round.
      gain: the speed-up over the verifier alone; the quality if `Demand.wants_quality`.
    """

    clause: Clause
    slack: float
    error: float
    margin: float
    chance: float
    gain: float

    @property
    def passes(self) -> bool:
        """Whether the slack is large enough."""
        return self.slack >= self.margin

    @property
    def lead(self) -> float:
        """The slack minus the margin, in standard errors, to compare clauses of different units."""
        apart = self.slack - self.margin
        if 0.0 < self.error < math.inf:
            return apart / self.error
        return math.inf if apart >= 0.0 else -math.inf

    @property
    def worth(self) -> float:
        """The expected gain."""
        return self.chance * self.gain


class Choice(NamedTuple):
    """The answer.

    Attributes:
      answer: `DRAFT`, `DO_NOT_DRAFT` or `NOT_MET`.
      setting: the chosen setting; None for `NOT_MET`.
      why: the reason.
    """

    answer: str
    setting: Setting | None
    why: str


# The lead over the verifier alone.
_FASTER, _BETTER = Clause(RELATIVE, 1.0), Clause(DIFFERENCE, 0.0)


class Judge:
    """Judges settings, round by round.

    Args:
      demand: the demand.
      quality: the name of the quality figure; None: only lossless settings are as good as the
        verifier.
      confidence: the probability that a passing setting meets the demand on the held-out texts.
      last: the texts of the last round.
      held_out: the held-out texts.

    Raises:
      ValueError: the demand needs a quality, but there is none.
    """

    def __init__(
        self, demand: Demand, quality: str | None, confidence: float, last: Counts, held_out: Counts
    ):
        demand.check_quality(quality)
        self.demand, self.quality, self.confidence = demand, quality or "", confidence
        self._last, self._held_out = last, held_out
        self._z = 0.0
        # z for the lead over the verifier alone in speed and in quality.
        leads = (_FASTER, _BETTER) if demand.wants_quality else (_FASTER,)
        self._z_of_lead = dict.fromkeys(leads, 0.0)

    def judge(self, found: Found, alone: Setting, now: Counts) -> dict[Setting, Judged]:
        """Judges all settings of a round.

        Args:
          found: the figures of the remaining settings, with the verifier alone.
          alone: the verifier alone.
          now: the texts of this round.

        Returns:
          Setting -> its judgement.
        """
        slacks = {
            (setting, clause): clause.slack(scores, found[alone], self.quality)
            for setting, scores in found.items()
            for clause in self.demand.clauses
            if not clause.holds_by_law(setting)
        }
        # z counts dropped settings, too: it must not decrease.
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
            judged[setting] = min(parts, key=lambda part: (part.chance, part.lead))
        return judged

    def _quantile(self, slacks: Iterable[Slack]) -> float:
        """The quantile of the largest standardised error; 0 without errors."""
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
        spread = error * math.sqrt(1.0 - share)  # of the last round's figure, given this round's
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
        """Chooses a setting that passes in the last round.

        The choice is the fastest setting, or the best if the demand bounds only the latency. If the
        verifier alone also passes, and that setting is not reliably faster (or better), the choice
        is the verifier alone, or a lossless setting that is reliably faster.

        Args:
          found: the figures of the remaining settings, with the verifier alone.
          alone: the verifier alone.

        Returns:
          The answer.
        """
        judged = self.judge(found, alone, self._last)
        passing = [setting for setting, judgement in judged.items() if judgement.passes]
        if not passing:
            return Choice(NOT_MET, None, self._why_not(judged))
        best = max(passing, key=lambda setting: judged[setting].gain)
        lead = _BETTER if self.demand.wants_quality else _FASTER
        text, surely = self._compared(lead, found[best], found[alone])
        if best != alone and (surely or alone not in passing):
            return Choice(DRAFT, best, f"it is {text}")
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
            why = f"no other setting that meets the demand {reason}"
            if not others:
                why = "it meets the demand, and no other measured setting reliably does"
            return Choice(DO_NOT_DRAFT, alone, why)
        why = f"the best other setting, {best.described()}, is {text}: this may be chance"
        return Choice(DO_NOT_DRAFT, alone, why)

    def _compared(self, lead: Clause, best: Scores, alone: Scores) -> tuple[str, bool]:
        """A text on a setting and the verifier alone, and whether the setting reliably leads."""
        found = lead.slack(best, alone, self.quality)
        least = found.value - self._z_of_lead[lead] * found.error
        if lead == _BETTER:
            text = f"{found.value:+.3g} {self.quality} over the verifier alone"
            return f"{text} (at least {least:+.3g})", least > 0.0
        text = f"{1.0 / (1.0 - found.value):.3g} times as fast as the verifier alone"
        return f"{text} (at least {1.0 / (1.0 - least):.3g})", least > 0.0

    def _why_not(self, judged: Mapping[Setting, Judged]) -> str:
        finite = {setting: x for setting, x in judged.items() if math.isfinite(x.slack)}
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
    """Returns the latency over the verifier's; infinite if unknown."""
    value = scores.figures[RELATIVE]["value"]
    return math.inf if value is None else value


def _normal(x: float) -> float:
    """The standard normal distribution function."""
    return 0.5 * (1.0 + math.erf(x / math.sqrt(2.0)))


def verdict(
    demand: Demand,
    setting: Setting,
    scores: Scores,
    verifier: Scores,
    quality: str | None,
    bootstrap: Bootstrap = _PLAIN,
) -> list[dict[str, Any]]:
    """Evaluates each clause on the held-out texts.

    Args:
      demand: the demand.
      setting: the chosen setting.
      scores: its figures on these texts.
      verifier: the figures of the verifier alone.
      quality: the name of the quality figure, or None.
      bootstrap: the resampling of the figures.

    Returns:
      For each clause: `demand`; `slack` with `low` and `high`, the distance from the bound;
      `by_law`, whether the setting certainly meets it; `met`, whether `by_law` or the slack
      is at least 0.
    """
    verdicts = []
    for clause in demand.clauses:
        slack = clause.slack(scores, verifier, quality)
        found = as_json(bootstrap.summary(slack.value, slack.resampled))
        by_law = clause.holds_by_law(setting)
        verdicts.append(
            {
                "demand": clause.described(),
                "slack": found["value"],
                "low": found["low"],
                "high": found["high"],
                "by_law": by_law,
                "met": by_law or slack.value >= 0.0,
            }
        )
    return verdicts
