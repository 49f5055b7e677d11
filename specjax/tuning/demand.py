"""What is asked of a way to decode: `quality >= 35`, `as good as the verifier` and so on.

Axes: R resamples.
"""

import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from specjax.sweeping.scores import RELATIVE, Scores
from specjax.tuning.screen import Screened
from specjax.tuning.settings import Setting

QUALITY, LATENCY, NATS, DIFFERENCE = "quality", "latency", "nats_per_token", "difference"
# What passes' times and the verifier's contexts leave open: how far past a bound screening may be.
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
        return of_law and setting.rule == "Lossless"

    def slack(self, scores: Scores, verifier: Scores, quality: str) -> Slack:
        """How far a setting is on the good side.

        Args:
          scores: of the setting.
          verifier: of the verifier alone on the same texts.
          quality: the figure that is called quality.
        """
        name = quality if self.figure in (QUALITY, DIFFERENCE) else self.figure
        values = np.concatenate([[_value(scores, name)], scores.resampled[name]])
        if self.figure == DIFFERENCE:
            values = values - [_value(verifier, name), *verifier.resampled[name]]
        apart = values - self.bound if self.at_least else self.bound - values
        return Slack(float(apart[0]), apart[1:])

    def may_hold(self, screened: Screened, rows: int = 1) -> bool:
        """Whether what screening expects of `rows` texts at once leaves it possible."""
        expected = {
            LATENCY: screened.latency / rows,
            RELATIVE: 1.0 / screened.speedup,
            NATS: screened.nats_per_token,
        }.get(self.figure)
        return expected is None or not expected > self.bound * _LEEWAY[self.figure]


class Demand(NamedTuple):
    """What is asked of a way to decode: all of the clauses.

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
        """Whether the choice depends on texts' quality, of which screening tells nothing."""
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
            raise ValueError(f"demand: the bound of {part!r} is out of range: got {text!r}")
        return Clause(figure, -bound if figure == DIFFERENCE and bound else bound)
    raise ValueError(f"demand must be such as {_KNOWN}, got {text!r}")


def _value(scores: Scores, name: str) -> float:
    """A figure; NaN, which meets nothing, for what is not finite, such as endless divergence."""
    found = scores.figures.get(name, {}).get("value")
    return math.nan if found is None else found
