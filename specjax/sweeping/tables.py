"""What a sweep says of each method: table 2 of Faster Cascades, and which points are on the front.

Axes: m points of one curve in the order of their strengths, R resamples.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from specjax.evaluation import Bootstrap, Interval
from specjax.runs.evaluation import as_json
from specjax.sweeping.points import REFERENCES, VERIFIER, Point
from specjax.sweeping.scores import RELATIVE, Scores

Scored = Mapping[Point, Scores]


def least_cost(cost: np.ndarray, quality: np.ndarray, wanted: ArrayLike) -> np.ndarray:
    """The least cost on a curve at which the quality is as wanted, or better.

    The curve is straight between neighbouring points; of a single point it is that point.

    Args:
      cost: `[..., m]`.
      quality: `[..., m]`, of the same points.
      wanted: `[...]`.

    Returns:
      `[...]`, NaN where no part of the curve is as good.
    """
    level = np.asarray(wanted, np.float64)[..., None]
    found = np.where(quality >= level, cost, np.inf)
    before, after = quality[..., :-1] - level, quality[..., 1:] - level
    crosses = (before < 0) != (after < 0)
    # How far along the piece its quality is the wanted one.
    share = np.divide(before, before - after, out=np.zeros_like(before), where=crosses)
    there = cost[..., :-1] + share * (cost[..., 1:] - cost[..., :-1])
    found = np.concatenate([found, np.where(crosses, there, np.inf)], axis=-1)
    least = found.min(axis=-1)
    return np.where(np.isfinite(least), least, np.nan)


def best_quality(cost: np.ndarray, quality: np.ndarray, most: ArrayLike) -> np.ndarray:
    """The best quality on a curve at no more than a cost; see `least_cost`.

    Args:
      cost: `[..., m]`.
      quality: `[..., m]`.
      most: `[...]`, the cost.

    Returns:
      `[...]`, NaN where every part of the curve costs more.
    """
    return -least_cost(-quality, -cost, -np.asarray(most, np.float64))


def pareto(cost: ArrayLike, quality: ArrayLike) -> np.ndarray:
    """Which points nothing beats: no other is cheaper and as good, or better and as cheap.

    Args:
      cost: `[m]`.
      quality: `[m]`.

    Returns:
      `[m]` bool.
    """
    x, y = np.asarray(cost, np.float64), np.asarray(quality, np.float64)
    as_good = (x[:, None] <= x) & (y[:, None] >= y)
    better = (x[:, None] < x) | (y[:, None] > y)
    return np.logical_not((as_good & better).any(axis=0))


def curves(points: Sequence[Point]) -> dict[Point, list[Point]]:
    """The points of each curve, in the order of their strengths; the models alone are none."""
    found: dict[Point, list[Point]] = {}
    for point in points:
        if point.method not in REFERENCES:
            found.setdefault(point.curve, []).append(point)
    for of_one in found.values():
        of_one.sort(key=lambda point: point.strength or 0.0)
    return found


def table_2(scored: Scored, quality: str, bootstrap: Bootstrap) -> list[dict[str, Any]]:
    """Table 2: one row for each curve whose verifier was measured at its temperature.

    `latency_reduction`: the verifier's latency over the least latency at which a method is as good
    as the verifier. `best_quality`: the best quality that it has within the verifier's latency.
    Both by straight lines between the points of neighbouring strengths. Their intervals are of the
    same on resampled texts; `matched` and `within` say in which share of these there is such a
    point; a resample without one is left out. `measured_reduction` is of the fastest point, none in
    between, whose quality is not shown to be below the verifier's: the paired interval of the
    difference does not lie below 0. Its interval is of that point's latency; the choice stays.

    Args:
      scored: the points that have figures.
      quality: the figure that is called quality.
      bootstrap: the resampling, that of the figures.

    Returns:
      The rows.

    Source: Faster Cascades via Speculative Decoding (arXiv 2405.19261), table 2.
    """
    rows = []
    for curve, points in curves(list(scored)).items():
        verifier = scored.get(Point(method=VERIFIER, temperature=curve.temperature))
        known = [p for p in points if _has(scored[p], RELATIVE) and _has(scored[p], quality)]
        if verifier is None or not known or not _has(verifier, quality):
            continue
        row: dict[str, Any] = {"curve": curve.to_dict(), "points": len(known)}
        cost, cost_again = _columns(scored, known, RELATIVE)
        good, good_again = _columns(scored, known, quality)
        wanted = _value(verifier, quality)
        made = {
            "latency_reduction": (
                1.0 / least_cost(cost, good, wanted),
                1.0 / least_cost(cost_again, good_again, verifier.resampled[quality]),
            ),
            "best_quality": (
                best_quality(cost, good, 1.0),
                best_quality(cost_again, good_again, np.ones(len(cost_again))),
            ),
        }
        for name, (value, again) in made.items():
            row[name] = as_json(bootstrap.summary(float(value), again))
        row["matched"], row["within"] = (
            float(np.isfinite(again).mean()) for _, again in made.values()
        )
        row |= _measured(scored, known, verifier, quality, bootstrap)
        rows.append(row)
    return rows


def _measured(
    scored: Scored, points: list[Point], verifier: Scores, quality: str, bootstrap: Bootstrap
) -> dict[str, Any]:
    """The fastest of the measured points that are not shown to be worse than the verifier."""
    wanted = _value(verifier, quality)

    def kept(point: Point) -> bool:
        apart = scored[point].resampled[quality] - verifier.resampled[quality]
        value = _value(scored[point], quality) - wanted
        return bootstrap.summary(value, apart).high >= 0.0

    def latency(point: Point) -> float:
        return _value(scored[point], RELATIVE)

    best = min(filter(kept, points), key=latency, default=None)
    if best is None:
        nothing = Interval(np.nan, np.nan, np.nan, np.nan)
        return {"measured_reduction": as_json(nothing), "measured_strength": None}
    again = 1.0 / scored[best].resampled[RELATIVE]
    return {
        "measured_reduction": as_json(bootstrap.summary(1.0 / latency(best), again)),
        "measured_strength": best.strength,
    }


def _columns(scored: Scored, points: list[Point], name: str) -> tuple[np.ndarray, np.ndarray]:
    """A figure of a curve's points `[m]`, and its resamples `[R, m]`."""
    values = np.asarray([scored[point].figures[name]["value"] for point in points], np.float64)
    return values, np.stack([scored[point].resampled[name] for point in points], axis=-1)


def _value(scores: Scores, name: str) -> float:
    value = scores.figures[name]["value"]
    assert value is not None  # see _has
    return value


def _has(scores: Scores, name: str) -> bool:
    return scores.figures.get(name, {}).get("value") is not None
