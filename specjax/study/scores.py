"""The figures of measured settings, with intervals.

Axes: n texts, c timed chunks, R resamples.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.evaluation import Bootstrap, Sums, ratio
from specjax.evaluation.bootstrap import divided, mean
from specjax.runs.evaluation import as_json, decoding_figures, pooled_figures
from specjax.runs.scored import predictions_of
from specjax.study.measure import Bench, Measured, Times
from specjax.text.setting import DRAFTER_ALONE, Setting

RELATIVE, NATS = "relative_latency", "nats_per_token"
# Figures of the verifier, which `specjax.evaluation` also has for a drafter alone.
_OF_A_VERIFIER = (
    "tokens_per_verifier_call",
    "deferrals_per_token",
    "nats_per_token",
    "impossible_share",
)
DEFERRALS = "deferrals_per_token"


@dataclasses.dataclass(frozen=True, eq=False)
class Scores:
    """Figures and their resamples.

    Attributes:
      figures: name -> `value`, `low`, `high`, `error`: JSON values, None if undefined.
      resampled: name -> `[R]`, the figure of each resample of the texts.
    """

    figures: Mapping[str, Mapping[str, float | None]]
    resampled: Mapping[str, np.ndarray]


def score(setting: Setting, measured: Measured, bench: Bench) -> Scores:
    """Returns all figures of a measured setting.

    They are the figures of `specjax evaluate`, pooled over all seeds, and
      `latency`: seconds of a text: the mean over samples of the median over repeats.
      `latency_mean`: the same with the mean over repeats.
      `relative_latency`: `latency` over the verifier's, both measured in turns on the same texts.
      `relative_time_per_token`: the same per emitted token.

    Args:
      setting: the setting.
      measured: its measurements.
      bench: the texts and the metrics.

    Returns:
      The figures. The bootstrap resamples the texts, each with the outputs of all seeds.

    Raises:
      ValueError: a figure cannot be computed.
    """
    costs = prices(setting, bench.measuring.costs)
    runs = []
    for rows in measured.rows:
        run = predictions_of(rows, setting.described())
        known = costs is not None and run.counts is not None and {*run.counts.calls} <= {*costs}
        runs.append((run, decoding_figures(run, costs if known else None)))
    made = pooled_figures(runs, bench.measuring.scorers(bench.texts))
    made |= _latency(measured.times, measured.verifier_times, bench)
    if setting.method == DRAFTER_ALONE:
        # A model that decodes alone counts as the verifier, but this model is the drafter.
        made = {name: sums for name, sums in made.items() if name not in _OF_A_VERIFIER}
    bootstrap = bench.measuring.bootstrap
    resampled = {key: bootstrap.replicates(sums) for key, sums in made.items()}
    return Scores(
        {key: as_json(bootstrap.summary(made[key].value, resampled[key])) for key in made},
        resampled,
    )


def prices(setting: Setting, costs: Mapping[str, float] | None) -> dict[str, float] | None:
    """Returns the cost of a pass of each model of a setting.

    Args:
      setting: the setting.
      costs: see `Measuring`.

    Returns:
      Model's name -> cost; None if the setting's drafter has no cost.
    """
    if costs is None or setting.drafter not in costs:
        return None
    own = costs[setting.drafter]
    if setting.method == DRAFTER_ALONE:  # a model that decodes alone counts as the verifier
        return {"verifier": own}
    return {**costs, "drafter": own}


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


def over(scores: Scores, other: Scores, name: str, bootstrap: Bootstrap) -> dict[str, Any]:
    """Returns the paired difference of a figure to that of another setting."""
    ours, theirs = scores.figures[name]["value"], other.figures[name]["value"]
    if ours is None or theirs is None:
        return as_json(bootstrap.summary(np.nan, np.zeros(1)))
    apart = scores.resampled[name] - other.resampled[name]
    return as_json(bootstrap.summary(ours - theirs, apart))
