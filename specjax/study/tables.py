"""Tables of compared settings: the front, table 2 of Faster Cascades, CSV and LaTeX.

Axes: m settings (of one curve in the order of their strengths), R resamples.
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from specjax.evaluation import Bootstrap, Interval
from specjax.runs.evaluation import as_json
from specjax.study.expect import Expected
from specjax.study.scores import NATS, RELATIVE, Scores, over
from specjax.text.setting import Setting

Scored = Mapping[Setting, Scores]
Rows = list[dict[str, Any]]


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
    """Which settings no other beats: none is cheaper and as good, or better and as cheap.

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


def front(scored: Scored, cost: str, quality: str, bootstrap: Bootstrap) -> list[Setting]:
    """The settings that no other is shown to beat.

    One setting beats another if it is told apart as cheaper or as better, and the other is neither:
    the paired interval of the difference leaves out 0. So of settings that noise alone tells apart
    all are on the front, or none. Lossless settings have the verifier's quality, by law.

    Args:
      scored: those without one of the figures are left out.
      cost: the figure of which less is better.
      quality: the figure of which more is better; of `nats_per_token` less.
      bootstrap: the resampling, that of the figures.

    Returns:
      Those on the front, in order.
    """
    known = [one for one in scored if _has(scored[one], cost) and _has(scored[one], quality)]
    if not known:
        return []
    by_law = {one: one.verifier_alone for one in known if one.is_lossless}
    of = {one: scored.get(by_law.get(one, one), scored[one]) for one in known}
    better = _above(of, quality, bootstrap)
    cheaper = _above({one: scored[one] for one in known}, cost, bootstrap).T
    leads = (better.T if quality == NATS else better) | cheaper
    beaten = (leads & ~leads.T).any(axis=0)
    return [one for one, is_beaten in zip(known, beaten, strict=True) if not is_beaten]


def _above(scored: Scored, name: str, how: Bootstrap) -> np.ndarray:
    """`[m, m]` bool: whether the first's figure is shown to be above the second's."""
    values = np.asarray([_value(scores, name) for scores in scored.values()])
    found = values[:, None] > values
    if not all(name in scores.resampled for scores in scored.values()):
        return found
    again = np.stack([scores.resampled[name] for scores in scored.values()])
    for i in range(len(values)):
        with np.errstate(invalid="ignore"):  # infinity minus infinity
            apart = again[i] - again
        for j in np.flatnonzero(found[i]):
            found[i, j] = how.summary(values[i] - values[j], apart[j]).low > 0.0
    return found


def curves(settings: Iterable[Setting]) -> list[list[Setting]]:
    """The settings of each curve, in the order of their strengths; the models alone are none."""
    found: dict[Any, list[Setting]] = {}
    for setting in settings:
        if not setting.is_alone:
            found.setdefault(setting.curve, []).append(setting)
    return [sorted(of_one, key=lambda one: one.strength or 0.0) for of_one in found.values()]


def common(settings: Iterable[Setting]) -> set[str]:
    """The fields, but rule and method, in which all settings are equal that have a say in them."""
    # The models alone have no drafts, and sequential cascades no blocks.
    drafting = [one for one in settings if not one.is_alone]
    found = set()
    for name in set(Setting.__dataclass_fields__) - {"rule", "method"}:
        own = {getattr(one, name) for one in drafting}
        if len(own - {None} if name in ("max_draft", "verification") else own) < 2:
            found.add(name)
    return found


def table_2(scored: Scored, quality: str, bootstrap: Bootstrap) -> Rows:
    """Table 2: one row for each curve whose verifier was measured, drawing alike.

    `latency_reduction`: the verifier's latency over the least latency at which a method is as good
    as the verifier. `best_quality`: the best quality that it has within the verifier's latency.
    Both by straight lines between the settings of neighbouring strengths. Their intervals are of
    the same on resampled texts; `matched` and `within` say in which share of these there is such a
    place; a resample without one is left out. `measured_reduction` is of the fastest setting, none
    in between, whose quality is not shown to be below the verifier's: the paired interval of the
    difference does not lie below 0. Its interval is of that setting's latency; the choice stays.
    A lossless curve is as good as the verifier by law, whatever its texts' figures say.

    Args:
      scored: the settings that have figures.
      quality: the figure that is called quality.
      bootstrap: the resampling, that of the figures.

    Returns:
      The rows.

    Source: Faster Cascades via Speculative Decoding (arXiv 2405.19261), table 2.
    """
    rows = []
    shared = common(scored) - {"temperature"}
    for points in curves(scored):
        verifier = scored.get(points[0].verifier_alone)
        known = [one for one in points if all(_has(scored[one], x) for x in (RELATIVE, quality))]
        if verifier is None or not known or not _has(verifier, quality):
            continue
        method = known[0].described(without={*shared, "strength", "temperature"})
        cost, cost_again = _columns(scored, known, RELATIVE)
        good, good_again = _columns(scored, known, quality)
        wanted, wanted_again = _value(verifier, quality), verifier.resampled[quality]
        if by_law := known[0].is_lossless:
            good, good_again = np.full_like(good, wanted), np.tile(wanted_again, (len(known), 1)).T
        made = {
            "latency_reduction": (
                1.0 / least_cost(cost, good, wanted),
                1.0 / least_cost(cost_again, good_again, wanted_again),
            ),
            "best_quality": (
                best_quality(cost, good, 1.0),
                best_quality(cost_again, good_again, np.ones(len(cost_again))),
            ),
        }
        row: dict[str, Any] = {
            "method": method,
            "temperature": known[0].temperature,
            "settings": len(known),
            "by_law": by_law,
        }
        for name, (value, again) in made.items():
            row[name] = as_json(bootstrap.summary(float(value), again))
        row["matched"], row["within"] = (
            float(np.isfinite(again).mean()) for _, again in made.values()
        )
        rows.append(row | _measured(scored, known, verifier, quality, bootstrap))
    return rows


def _measured(
    scored: Scored, settings: list[Setting], verifier: Scores, quality: str, bootstrap: Bootstrap
) -> dict[str, Any]:
    """The fastest of the measured settings that are not shown to be worse than the verifier."""

    def kept(one: Setting) -> bool:
        high = over(scored[one], verifier, quality, bootstrap)["high"]
        return one.is_lossless or (high is not None and high >= 0.0)

    def latency(one: Setting) -> float:
        return _value(scored[one], RELATIVE)

    best = min(filter(kept, settings), key=latency, default=None)
    if best is None:
        nothing = Interval(np.nan, np.nan, np.nan, np.nan)
        return {"measured_reduction": as_json(nothing), "measured_strength": None}
    again = 1.0 / scored[best].resampled[RELATIVE]
    return {
        "measured_reduction": as_json(bootstrap.summary(1.0 / latency(best), again)),
        "measured_strength": best.strength,
    }


def best_rows(
    scored: Scored,
    quality: str | None,
    bootstrap: Bootstrap,
    estimates: Mapping[Setting, Expected] | None = None,
) -> Rows:
    """The front of speed and quality (without one: of nats per token), setting by setting.

    At each temperature the models alone and the fastest lossless setting are there too, in the
    order of their speed. `expected` is the speed-up that was estimated.
    """
    rows = []
    for group in drawn_alike(scored):
        here = {one: scored[one] for one in group}
        first = front(here, RELATIVE, quality or NATS, bootstrap)
        lossless = [one for one in group if one.is_lossless and not one.is_alone]
        fastest = sorted(lossless, key=lambda one: _value(scored[one], RELATIVE))[:1]
        for one in sorted(group, key=lambda one: -_value(scored[one], RELATIVE)):
            if one in first or one in fastest or one.is_alone:
                figures = scored[one].figures
                on_front = "yes" if one in first else "-"
                row: dict[str, Any] = {"setting": one.described(), "front": on_front}
                if quality is not None:
                    row[quality] = shown(figures[quality])
                row["speedup"] = shown(_inverse(figures[RELATIVE]))
                if estimates:
                    known = estimates.get(one)
                    row["expected"] = None if known is None else known.to_dict()["speedup"]
                for name in (NATS, "tokens_per_verifier_call"):
                    row[name] = shown(figures.get(name))
                rows.append(row)
    return rows


def estimated_rows(estimates: Sequence[Expected]) -> Rows:
    """The front of expected speed and nats per token, with the models alone and Lossless.

    Settings of one law and one speed, such as rules that always take the drafter's token, are there
    once. Without times tokens per call stand for the speed.
    """
    rows = []
    for group in drawn_alike(one.setting for one in estimates):
        here = [one for one in estimates if one.setting in group]
        speeds = np.asarray([one.speed for one in here])
        nats = [one.nats_per_token for one in here]
        first = pareto(-speeds, -np.asarray(nats))
        lossless = [one for one in here if one.setting.is_lossless and not one.setting.is_alone]
        fastest = sorted(lossless, key=lambda one: -one.speed)[:1]
        told = set()
        for i in np.argsort(speeds, kind="stable"):
            one, law = here[i], (here[i].speed, here[i].nats_per_token)
            if one.setting.is_alone or one in fastest or (first[i] and law not in told):
                told.add(law)
                figures = {name: x for name, x in one.to_dict().items() if name != "error"}
                on_front = "yes" if first[i] else "-"
                rows.append({"setting": one.setting.described(), "front": on_front, **figures})
    return rows


def table_2_rows(rows: Rows, quality: str) -> Rows:
    """Table 2 with its intervals as texts."""
    return [
        {
            "method": row["method"],
            "T": f"{row['temperature']:g}",
            "latency_reduction": shown(row["latency_reduction"]),
            "matched": "lossless" if row["by_law"] else row["matched"],
            f"best_{quality}": shown(row["best_quality"]),
            "within": row["within"],
            "measured_reduction": shown(row["measured_reduction"]),
        }
        for row in rows
    ]


def flat_rows(scored: Scored, estimates: Mapping[Setting, Expected]) -> Rows:
    """All settings with all figures, each number in a column of its own, for CSV."""
    rows = []
    for one in dict.fromkeys((*scored, *estimates)):
        row: dict[str, Any] = {"setting": one.described(), **one.to_dict()}
        if one in estimates:
            row |= {f"expected_{name}": x for name, x in estimates[one].to_dict().items()}
        if one in scored:
            for name, figure in scored[one].figures.items():
                row |= {f"{name}_{end}" if end != "value" else name: figure[end] for end in _ENDS}
        rows.append(row)
    return rows


def rank_correlation(scored: Scored, estimates: Mapping[Setting, Expected]) -> float | None:
    """Spearman's, of the speed-ups that were expected and measured; None for fewer than three."""
    both = [one for one in scored if one in estimates and not np.isnan(estimates[one].speedup)]
    expected = [estimates[one].speedup for one in both]
    measured = [1.0 / _value(scored[one], RELATIVE) for one in both]
    if len(both) < 3 or len(set(expected)) < 2 or len(set(measured)) < 2:
        return None
    # Not imported where nothing is compared: it takes a while.
    from scipy.stats import spearmanr

    return float(spearmanr(expected, measured).statistic)


_ENDS = ("value", "low", "high")


def csv_text(rows: Rows) -> str:
    """Rows as comma-separated values; a column for each key of any row."""
    file = io.StringIO()
    columns = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(file, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def latex_text(rows: Rows) -> str:
    """Rows as a LaTeX table, which needs no packages."""

    def line(cells: Iterable[Any]) -> str:
        return " & ".join(_escaped(cell) for cell in cells) + r" \\"

    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = [
        rf"\begin{{tabular}}{{l{'r' * (len(columns) - 1)}}}",
        r"\hline",
        line(columns),
        r"\hline",
        *(line(row.get(name) for name in columns) for row in rows),
        r"\hline",
        r"\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


def _escaped(cell: Any) -> str:
    text = "-" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell)
    for sign in "&%$#_{}":
        text = text.replace(sign, f"\\{sign}")
    return text


def shown(figure: Mapping[str, float | None] | None) -> str | None:
    """A figure with its interval, in words; None where there is none."""
    if figure is None:
        return None
    value, low, high = (figure[end] for end in _ENDS)
    if low is None or high is None:
        return None if value is None else f"{value:.4g}"
    return f"{'-' if value is None else f'{value:.4g}'} [{low:.4g}, {high:.4g}]"


def drawn_alike(settings: Iterable[Setting]) -> list[list[Setting]]:
    """The settings of each temperature, top-k and top-p, in order."""
    found: dict[Setting, list[Setting]] = {}
    for one in settings:
        found.setdefault(one.verifier_alone, []).append(one)
    return list(found.values())


def _inverse(figure: Mapping[str, float | None]) -> dict[str, float | None]:
    ends = {"value": figure["value"], "low": figure["high"], "high": figure["low"]}
    return {name: None if x is None else 1.0 / x for name, x in ends.items()}


def _columns(scored: Scored, settings: list[Setting], name: str) -> tuple[np.ndarray, np.ndarray]:
    """A figure of a curve's settings `[m]`, and its resamples `[R, m]`."""
    values = np.asarray([_value(scored[one], name) for one in settings], np.float64)
    return values, np.stack([scored[one].resampled[name] for one in settings], axis=-1)


def _value(scores: Scores, name: str) -> float:
    """A figure; NaN where there is none."""
    value = scores.figures.get(name, {}).get("value")
    return np.nan if value is None else value


def _has(scores: Scores, name: str) -> bool:
    return scores.figures.get(name, {}).get("value") is not None
