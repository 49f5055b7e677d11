"""The figures of what was measured, with intervals.

Axes: n texts, c timed chunks, R resamples.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.evaluation import Bootstrap, Sums, mean, ratio
from specjax.evaluation.bootstrap import divided
from specjax.runs.evaluation import as_json, decoding_figures, pooled_figures
from specjax.runs.predictions import predictions_of
from specjax.sweeping.measurement import Bench, Measured, Times
from specjax.sweeping.points import DRAFTER, Point

RELATIVE = "relative_latency"
# What `specjax.evaluation` says of a model that decodes alone as of a verifier.
_OF_A_VERIFIER = (
    "tokens_per_verifier_call",
    "deferral_rate",
    "deferrals_per_token",
    "nats_per_token",
    "impossible_share",
)
DEFERRALS = "deferrals_per_token"


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """Figures and their resamples.

    Attributes:
      figures: name -> `value`, `low`, `high`, `error`: JSON values, None where there is none.
      resampled: name -> `[R]`, the figure of each resample of the texts.
    """

    figures: Mapping[str, Mapping[str, float | None]]
    resampled: Mapping[str, np.ndarray]

    def of_a_drafter(self) -> "Scores":
        """The same without what would say that the drafter alone was its own verifier."""
        kept = [name for name in self.figures if name not in _OF_A_VERIFIER]
        return Scores(
            {name: self.figures[name] for name in kept},
            {name: self.resampled[name] for name in kept},
        )


def score(
    measured: Measured, bench: Bench, name: str, costs: Mapping[str, float] | None = None
) -> Scores:
    """All figures of what was measured.

    Those of `specjax evaluate`, over the texts of all seeds together, and
      `latency`: seconds of a text; of its repeats the median, of its seeds the mean.
      `latency_mean`: the same with the mean of the repeats.
      `relative_latency`: `latency` over the verifier's, both measured in turns on the same texts.
      `relative_time_per_token`: the same per emitted token.

    Args:
      measured: what was measured.
      bench: on what.
      name: what messages call it.
      costs: what a pass of each model costs; unless all that ran are there, none is told.

    Returns:
      The figures. What is resampled are the texts, each with the outputs of all seeds.

    Raises:
      ValueError: a figure cannot be computed.
    """
    runs = []
    for records in measured.records:
        run = predictions_of(records, name)
        known = costs is not None and run.counts is not None and {*run.counts.calls} <= {*costs}
        runs.append((run, decoding_figures(run, costs if known else None)))
    made = pooled_figures(runs, bench.scorers)
    made |= _latency(measured.times, measured.verifier_times, bench)
    bootstrap = bench.measuring.bootstrap
    resampled = {key: bootstrap.replicates(sums) for key, sums in made.items()}
    return Scores(
        {key: as_json(bootstrap.summary(made[key].value, resampled[key])) for key in made},
        resampled,
    )


def prices(point: Point, costs: Mapping[str, float] | None) -> dict[str, float] | None:
    """What a pass of each of a point's models costs.

    Args:
      point: the point.
      costs: see `Measuring`.

    Returns:
      Model's name -> cost; None where the point's drafter has none.
    """
    own = "drafter" if point.drafter is None else point.drafter
    if costs is None or own not in costs:
        return None
    if point.method == DRAFTER:  # a model that decodes alone counts as the verifier
        return {"verifier": costs[own]}
    return {**costs, "drafter": costs[own]}


def _latency(times: Times, verifier: Times | None, bench: Bench) -> dict[str, Sums]:
    per_text = 1.0 / bench.measuring.latency_batch_size
    other = times if verifier is None else verifier
    both = [times.usual, times.tokens.sum(axis=0), other.usual, other.tokens.sum(axis=0)]

    def per_token(sums: np.ndarray) -> np.ndarray:
        return divided(sums[:, 0] * sums[:, 3], sums[:, 1] * sums[:, 2])

    return {
        "latency": mean(times.usual, per_text),
        "latency_mean": mean(times.mean, per_text),
        RELATIVE: ratio(times.usual, other.usual),
        "relative_time_per_token": Sums(np.stack(both, axis=1).astype(np.float64), per_token),
    }


def over(one: Scores, other: Scores, name: str, bootstrap: Bootstrap) -> dict[str, Any]:
    """How much a figure of one is above that of the other; paired: both are resampled alike."""
    ours, theirs = one.figures[name]["value"], other.figures[name]["value"]
    if ours is None or theirs is None:
        return as_json(bootstrap.summary(np.nan, np.zeros(1)))
    apart = one.resampled[name] - other.resampled[name]
    return as_json(bootstrap.summary(ours - theirs, apart))
