"""The figures of measured settings, with intervals.

Axes: n texts, c timed chunks, R resamples.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from specjax.evaluation import Bootstrap, Sums, ratio
from specjax.evaluation.bootstrap import divided, mean
from specjax.runs.evaluation import as_json, decoding_figures, pooled_figures, predictions_of
from specjax.study.measure import Bench, Measured, Times
from specjax.text.setting import DRAFTER_ALONE, Setting

RELATIVE, NATS, DEFERRALS = "relative_latency", "nats_per_token", "deferrals_per_token"
# Figures of the verifier, which `specjax.evaluation` also has for a drafter alone.
_OF_A_VERIFIER = (
    "tokens_per_verifier_call",
    DEFERRALS,
    NATS,
    "impossible_share",
)


class Scores(NamedTuple):
    """Figures and their resamples.

    Attributes:
      figures: name -> `value`, `low`, `high`, `error`: JSON values, None if undefined.
      resampled: name -> the figure of each resample of the texts.
    """

    figures: Mapping[str, Mapping[str, float | None]]
    resampled: Mapping[str, Float[np.ndarray, " R"]]

    def value(self, name: str) -> float:
        """The value of a figure, or NaN."""
        value = self.figures.get(name, {}).get("value")
        return math.nan if value is None else value

    def has(self, name: str) -> bool:
        return not math.isnan(self.value(name))


def score(setting: Setting, measured: Measured, bench: Bench) -> Scores:
    """Returns all figures of a measured setting.

    They are the figures of `specjax evaluate`, pooled over all seeds, and
      `latency`: seconds of a text: the mean over samples of the median over repeats.
      `latency_mean`: the same with the mean over repeats.
      `relative_latency`: `latency` over the verifier's, both measured in turns on the same texts.
      `relative_time_per_token`: the same per emitted token.

    The bootstrap resamples the texts, each with the outputs of all seeds.

    Raises:
      UserError: a figure cannot be computed.
    """
    costs = prices(setting, bench.measuring.costs)
    runs = []
    for rows in measured.rows:
        run = predictions_of(rows, setting.described())
        known = costs is not None and run.counts is not None and {*run.counts.calls} <= {*costs}
        runs.append((run, decoding_figures(run, costs if known else None)))
    sums_of = pooled_figures(runs, bench.measuring.scorers(bench.texts))
    sums_of |= _latency(measured.times, measured.verifier_times, bench)
    if setting.method == DRAFTER_ALONE:
        # A model that decodes alone counts as the verifier, but this model is the drafter.
        sums_of = {name: sums for name, sums in sums_of.items() if name not in _OF_A_VERIFIER}
    bootstrap = bench.measuring.bootstrap
    resampled = {key: bootstrap.replicates(sums) for key, sums in sums_of.items()}
    return Scores(
        {key: as_json(bootstrap.summary(sums_of[key].value, resampled[key])) for key in sums_of},
        resampled,
    )


def prices(setting: Setting, costs: Mapping[str, float] | None) -> dict[str, float] | None:
    """Returns the cost of a pass of each model of a setting; None if its drafter has no cost."""
    if costs is None or setting.drafter not in costs:
        return None
    if setting.method == DRAFTER_ALONE:  # a model that decodes alone counts as the verifier
        return {"verifier": costs[setting.drafter]}
    return {**costs, "drafter": costs[setting.drafter]}


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
    if not (scores.has(name) and other.has(name)):
        return as_json(bootstrap.summary(np.nan, np.zeros(1)))
    difference = scores.resampled[name] - other.resampled[name]
    return as_json(bootstrap.summary(scores.value(name) - other.value(name), difference))
