"""Figures 1 to 3 of Faster Cascades for the points of a sweep, and quality against divergence."""

import io
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.checks import require
from specjax.sweeping.points import DRAFTER, REFERENCES, VERIFIER, Point, common
from specjax.sweeping.scores import DEFERRALS, RELATIVE, Scores
from specjax.sweeping.tables import curves, pareto

# File -> the figure on the horizontal axis, and its words.
PLOTS: Mapping[str, tuple[str, str]] = {
    "quality_deferrals.png": (DEFERRALS, "deferrals to the verifier per token"),
    "quality_latency.png": (RELATIVE, "latency relative to the verifier alone"),
    "quality_rejections.png": ("rejection_rate", "rejection rate of drafted tokens"),
    "quality_cost.png": ("cost_per_token", "cost of all passes per token"),
    "quality_nats.png": ("nats_per_token", "nats per token from the verifier"),
}
# Their numbers have no common factor: 52 curves differ.
_MARKS, _LINES = "os^vDP*X<>phd", ("-", "--", "-.", ":")
_DPI = 130


def check() -> None:
    """Raises ImportError unless figures can be drawn."""
    require("matplotlib.figure", "eval")


def draw(scored: Mapping[Point, Scores], quality: str) -> dict[str, bytes]:
    """Draws all figures, with a panel for each temperature.

    A curve has a mark and a line of its own, and its shade gets lighter from curve to curve, so
    that they are told apart without colours. Points that nothing beats, better or cheaper, not the
    models alone either, have a ring and are joined by steps. A point without a finite figure is
    left out of that plot.

    Args:
      scored: the points that have figures.
      quality: the figure on the vertical axis.

    Returns:
      File -> PNG; those in which there would be no point are left out.
    """
    made = {}
    for file in PLOTS:
        drawn = figure(scored, file, quality)
        if drawn is not None:
            image = io.BytesIO()
            drawn.savefig(image, format="png", dpi=_DPI)
            made[file] = image.getvalue()
    return made


def figure(scored: Mapping[Point, Scores], file: str, quality: str) -> Any:
    """One of the figures.

    Args:
      scored: see `draw`.
      file: a key of `PLOTS`.
      quality: see `draw`.

    Returns:
      A matplotlib `Figure`, or None where there would be no point.
    """
    name, words = PLOTS[file]
    points = itertools.chain(*curves(list(scored)).values())
    if not any(_values(scored[point], name, quality) for point in points):
        return None
    figures: Any = require("matplotlib.figure", "eval")
    temperatures = sorted({point.temperature for point in scored})
    made = figures.Figure(figsize=(5.2 * len(temperatures) + 2.6, 4.6), layout="constrained")
    axes = made.subplots(1, len(temperatures), squeeze=False)[0]
    styles = _styles(scored)
    for axis, temperature in zip(axes, temperatures, strict=True):
        here = {p: scores for p, scores in scored.items() if p.temperature == temperature}
        own = {curve: styles[_label(curve, scored)] for curve in curves(list(here))}
        _panel(axis, here, name, quality, own)
        axis.set(title=f"temperature {temperature:g}", xlabel=words, ylabel=quality)
        axis.margins(0.08)
        axis.grid(alpha=0.3)
    handles = {label: handle for axis in axes for handle, label in _handles(axis)}
    order = [label for label in dict.fromkeys((*styles, *handles)) if label in handles]
    made.legend(
        [handles[label] for label in order], order, loc="outside right upper", fontsize="small"
    )
    return made


def _styles(scored: Mapping[Point, Scores]) -> dict[str, dict[str, Any]]:
    """The style of each curve, the same in all panels and figures."""
    colours: Any = require("matplotlib", "eval").colormaps["cividis"]
    labels = [*dict.fromkeys(_label(curve, scored) for curve in curves(list(scored)))]
    return {
        label: {
            "label": label,
            "marker": _MARKS[i % len(_MARKS)],
            "linestyle": _LINES[i % len(_LINES)],
            "color": colours(0.85 * i / max(1, len(labels) - 1)),
        }
        for i, label in enumerate(labels)
    }


def _handles(axis: Any) -> list[tuple[Any, str]]:
    return list(zip(*axis.get_legend_handles_labels(), strict=True))


def _label(curve: Point, scored: Mapping[Point, Scores]) -> str:
    """A curve in words, without what all curves have in common."""
    return curve.described(without={*common(scored), "strength", "temperature"})


def _panel(
    axis: Any,
    scored: Mapping[Point, Scores],
    name: str,
    quality: str,
    styles: Mapping[Point, Mapping[str, Any]],
) -> None:
    for point, scores in scored.items():
        value = scores.figures[quality]["value"]
        if point.method in (VERIFIER, DRAFTER) and value is not None:
            line = {VERIFIER: "--", DRAFTER: ":"}[point.method]
            told = point.described(without={"temperature"}).replace("_", " ")
            axis.axhline(value, color="black", linestyle=line, linewidth=1.0, label=told)
    if name == RELATIVE:
        axis.axvline(1.0, color="black", linestyle="--", linewidth=0.6)
    shown: list[tuple[float, float]] = []
    for curve, points in curves(list(scored)).items():
        found = [found for p in points if (found := _values(scored[p], name, quality))]
        if not found:
            continue
        x, y, low, high = np.asarray(found).T
        axis.errorbar(
            x,
            y,
            [np.maximum(y - low, 0.0), np.maximum(high - y, 0.0)],
            markersize=6,
            linewidth=1.2,
            elinewidth=0.7,
            capsize=2,
            alpha=0.9,
            **styles[curve],
        )
        shown += zip(x, y, strict=True)
    alone = [_alone(point, scored[point], name, quality) for point in scored]
    _front(axis, shown, [found for found in alone if found])


def _alone(point: Point, scores: Scores, name: str, quality: str) -> tuple[float, float] | None:
    """The place of a model alone; None for other points, and where it has none."""
    y = scores.figures[quality]["value"]
    x = scores.figures.get(name, {}).get("value")
    if point.method == DRAFTER and name == DEFERRALS:
        x = 0.0  # it asks no verifier
    return None if point.method not in REFERENCES or x is None or y is None else (x, y)


def _front(axis: Any, shown: list[tuple[float, float]], alone: list[tuple[float, float]]) -> None:
    """Rings around what nothing beats of what is shown, neither of that nor of the models alone."""
    points = np.asarray([*shown, *alone]).reshape(-1, 2)
    best = points[: len(shown)][pareto(points[:, 0], points[:, 1])[: len(shown)]]
    if not len(best):
        return
    best = best[np.argsort(best[:, 0])]
    axis.plot(
        *best.T,
        drawstyle="steps-post",
        color="0.4",
        linewidth=0.8,
        marker="o",
        markersize=12,
        markerfacecolor="none",
        markeredgecolor="black",
        label="Pareto front",
        zorder=1,
    )


def _values(scores: Scores, name: str, quality: str) -> tuple[float, float, float, float] | None:
    """x, y and the interval of y; None where one of them is missing."""
    x, y = scores.figures.get(name, {}).get("value"), scores.figures[quality]
    if x is None or y["value"] is None:
        return None
    low, high = (y[end] if y[end] is not None else y["value"] for end in ("low", "high"))
    return x, y["value"], low, high  # type: ignore[return-value]
