"""Figures 1 to 3 of Faster Cascades, quality and acceptance against divergence; PNG and PDF."""

import io
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specjax.checks import require
from specjax.evaluation import Bootstrap
from specjax.study.expect import Expected, is_chain, sampling_key
from specjax.study.measure import DEFERRALS, NATS, RELATIVE, Scores
from specjax.study.tables import common, curves, front
from specjax.text.setting import DRAFTER_ALONE, VERIFIER_ALONE, Setting

# Plot -> the figure on its horizontal axis, and its label.
PLOTS: Mapping[str, tuple[str, str]] = {
    "quality_deferrals": (DEFERRALS, "deferrals to the verifier per token"),
    "quality_latency": (RELATIVE, "latency relative to the verifier alone"),
    "quality_rejections": ("rejection_rate", "rejection rate of drafted tokens"),
    "quality_cost": ("cost_per_token", "cost of all passes per token"),
    "quality_nats": (NATS, "nats per token from the verifier"),
}
ACCEPTANCE = "acceptance_nats"
KINDS = ("png", "pdf")
FILES = tuple(f"{name}.{kind}" for name in (*PLOTS, ACCEPTANCE) for kind in KINDS)
# Coprime numbers of marks and lines: 52 different curves.
MARKS, _LINES = "os^vDP*X<>phd", ("-", "--", "-.", ":")
_DPI = 130
# What is more than so many times the median is an outlier.
_FAR = 5.0


def files_of(name: str, drawn: Any) -> dict[str, bytes]:
    """The files of a figure; none without a figure."""
    files = {}
    for kind in KINDS if drawn is not None else ():
        image = io.BytesIO()
        # No date, so that equal plots are equal files.
        about = {"CreationDate": None} if kind == "pdf" else {}
        drawn.savefig(image, format=kind, dpi=_DPI, metadata=about)
        files[f"{name}.{kind}"] = image.getvalue()
    return files


def acceptance_figure(
    estimates: Mapping[Setting, Expected], frontier: Mapping[Setting, Expected]
) -> Any:
    """Draws acceptance against nats per token, with a panel for each temperature.

    The frontier is the line that no rule is above. A rule is a point for each sampling and drafter
    of chains. Settings without a finite divergence are left out.

    Returns:
      A matplotlib `Figure`, or None without a frontier.
    """
    line = {**frontier, **{x: e for x, e in estimates.items() if x.rule.startswith("KLPrice(")}}
    first: dict[tuple[Any, ...], Expected] = {}
    for x, estimate in estimates.items():
        if is_chain(x) and _is_placed(estimate):
            first.setdefault((sampling_key(x), x.drafter, x.rule), estimate)
    points = {estimate.setting: estimate for estimate in first.values()}
    temperatures = sorted({x.temperature for x in line if _is_placed(line[x])})
    if not temperatures:
        return None
    labels = _Labels(points)
    drawn = _panels(
        temperatures, "nats per token from the verifier", "acceptance of drafted tokens"
    )
    for axis, temperature in zip(drawn.axes, temperatures, strict=True):
        best = [e for x, e in line.items() if x.temperature == temperature and _is_placed(e)]
        nats, accepted = np.asarray(sorted((e.nats_per_token, e.acceptance) for e in best)).T
        axis.plot(nats, accepted, color="black", linewidth=2.4, alpha=0.5, label="frontier")
        here = {x: e for x, e in points.items() if x.temperature == temperature}
        for curve in curves(here):
            places = [(here[x].nats_per_token, here[x].acceptance) for x in curve]
            axis.plot(*np.asarray(places).T, markersize=5, **labels.styles[labels.of(curve[0])])
        axis.set_xlim(-0.02 * nats.max(), 1.05 * nats.max())
    _legend(drawn, ["frontier", *labels.styles])
    return drawn


def _is_placed(estimate: Expected) -> bool:
    return math.isfinite(estimate.nats_per_token) and math.isfinite(estimate.acceptance)


def _panels(temperatures: Sequence[float], xlabel: str, ylabel: str) -> Any:
    figures: Any = require("matplotlib.figure", "eval")
    drawn = figures.Figure(figsize=(5.2 * len(temperatures) + 2.6, 4.6), layout="constrained")
    axes = drawn.subplots(1, len(temperatures), squeeze=False)[0]
    for axis, temperature in zip(axes, temperatures, strict=True):
        axis.set(title=f"temperature {temperature:g}", xlabel=xlabel, ylabel=ylabel)
        axis.grid(alpha=0.3)
    return drawn


def _legend(drawn: Any, first: Iterable[str]) -> None:
    handles: dict[str, Any] = {}
    for axis in drawn.axes:
        handles |= {x: y for y, x in zip(*axis.get_legend_handles_labels(), strict=True)}
    order = [label for label in dict.fromkeys((*first, *handles)) if label in handles]
    drawn.legend(
        [handles[label] for label in order], order, loc="outside right upper", fontsize="small"
    )


def figure(scored: Mapping[Setting, Scores], name: str, quality: str, bootstrap: Bootstrap) -> Any:
    """Draws a plot of `PLOTS`, with a panel for each temperature.

    Each curve has its own mark, line and shade, so that colours are not needed. Settings on the
    front (see `tables.front`) have rings and are joined by steps. A setting without a finite figure
    is left out.

    Returns:
      A matplotlib `Figure`, or None for an empty plot.
    """
    cost, words = PLOTS[name]
    of_curves = itertools.chain(*curves(scored))
    if not any(_values(scored[setting], cost, quality) for setting in of_curves):
        return None
    temperatures = sorted({setting.temperature for setting in scored})
    drawn, labels = _panels(temperatures, words, quality), _Labels(scored)
    lines = {VERIFIER_ALONE: "--", DRAFTER_ALONE: ":"}
    for axis, temperature in zip(drawn.axes, temperatures, strict=True):
        here = {x: scores for x, scores in scored.items() if x.temperature == temperature}
        for setting, scores in here.items():
            value = scores.figures[quality]["value"]
            if setting.is_alone and value is not None:
                label = setting.described(without={"temperature", "top_k", "top_p"})
                style = {"linestyle": lines[str(setting.method)], "linewidth": 1.0}
                axis.axhline(value, label=label, color="black", **style)
        if cost == RELATIVE:
            axis.axvline(1.0, color="black", linestyle="--", linewidth=0.6)
        places = []
        for points in curves(here):
            values = [found for x in points if (found := _values(here[x], cost, quality))]
            places += [value[0] for value in values]
            if values:
                x, y, low, high = np.asarray(values).T
                ends = [np.maximum(y - low, 0.0), np.maximum(high - y, 0.0)]
                sizes = {"markersize": 6, "linewidth": 1.2, "elinewidth": 0.7, "capsize": 2}
                style = labels.styles[labels.of(points[0])]
                axis.errorbar(x, y, ends, alpha=0.9, **sizes, **style)
        _rings(axis, here, cost, quality, bootstrap)
        axis.margins(0.08)
        _leave_outliers(axis, np.asarray(places))
    _legend(drawn, labels.styles)
    return drawn


class _Labels:
    """The label and the style of each curve, the same in all panels and plots."""

    def __init__(self, scored: Iterable[Setting]):
        self._shared = common(scored) | {"strength", "temperature"}
        colours: Any = require("matplotlib", "eval").colormaps["cividis"]
        names = [*dict.fromkeys(self.of(points[0]) for points in curves(scored))]
        self.styles: dict[str, dict[str, Any]] = {
            name: {
                "label": name,
                "marker": MARKS[i % len(MARKS)],
                "linestyle": _LINES[i % len(_LINES)],
                "color": colours(0.85 * i / max(1, len(names) - 1)),
            }
            for i, name in enumerate(names)
        }

    def of(self, setting: Setting) -> str:
        return setting.described(without=self._shared)


def _leave_outliers(axis: Any, places: np.ndarray) -> None:
    """Leaves out of sight what is so far right that all others would share a few pixels."""
    positive = places[places > 0]
    outside = places > _FAR * (np.median(positive) if positive.size else 1.0)
    if outside.any():
        seen = places[~outside]
        pad = 0.08 * max(np.ptp(seen), 0.1 * seen.max())
        axis.set_xlim(seen.min() - pad, seen.max() + pad)
        words = f"{outside.sum()} further right, up to {places.max():.3g}"
        axis.annotate(words, (0.98, 0.02), xycoords="axes fraction", ha="right", size="x-small")


def _rings(
    axis: Any, scored: Mapping[Setting, Scores], cost: str, quality: str, bootstrap: Bootstrap
) -> None:
    """Draws rings around the front; models alone count for the front but get no rings."""
    here = dict(scored)
    for setting, scores in scored.items():
        if setting.method == DRAFTER_ALONE and cost == DEFERRALS:  # it never defers
            nothing = dict.fromkeys(("value", "low", "high", "error"), 0.0)
            again = {name: np.zeros_like(x) for name, x in scores.resampled.items()}
            here[setting] = Scores(
                {**scores.figures, cost: nothing},
                {**scores.resampled, **({cost: again[quality]} if again else {})},
            )
    best = [x for x in front(here, cost, quality, bootstrap) if not x.is_alone]
    places = sorted(_values(scored[x], cost, quality)[:2] for x in best)  # type: ignore[index]
    if not places:
        return
    ring = {"marker": "o", "markersize": 12, "markerfacecolor": "none", "markeredgecolor": "black"}
    steps = {"drawstyle": "steps-post", "color": "0.4", "linewidth": 0.8, "zorder": 1}
    axis.plot(*np.asarray(places).T, label="Pareto front", **ring, **steps)


def _values(scores: Scores, name: str, quality: str) -> tuple[float, float, float, float] | None:
    """x, y and the interval of y; None if x or y is missing."""
    x, y = scores.figures.get(name, {}).get("value"), scores.figures[quality]
    if x is None or y["value"] is None:
        return None
    low, high = (y[end] if y[end] is not None else y["value"] for end in ("low", "high"))
    return x, y["value"], low, high  # type: ignore[return-value]
