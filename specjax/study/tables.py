"""Tables of compared settings: the front, table 2 of Faster Cascades, CSV and LaTeX.

Axes: m settings (of a curve in the order of their strengths), R resamples.
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from specjax.evaluation import Bootstrap, Interval
from specjax.runs.evaluation import as_json, shown
from specjax.study.expect import Expected
from specjax.study.scores import NATS, RELATIVE, Scores, over
from specjax.text.setting import VERIFIER_ALONE, Setting

Scored = Mapping[Setting, Scores]
Rows = list[dict[str, Any]]


def least_cost(cost: np.ndarray, quality: np.ndarray, wanted: ArrayLike) -> np.ndarray:
    """Returns the least cost on a curve with at least the wanted quality.

    The curve is linear between neighbouring points.

    Args:
      cost: `[..., m]`.
      quality: `[..., m]`, of the same points.
      wanted: `[...]`, the least quality.

    Returns:
      `[...]`, NaN if no part of the curve has this quality.
    """
    level = np.asarray(wanted, np.float64)[..., None]
    found = np.where(quality >= level, cost, np.inf)
    before, after = quality[..., :-1] - level, quality[..., 1:] - level
    crosses = (before < 0) != (after < 0)
    # The place between two points with exactly the wanted quality.
    share = np.divide(before, before - after, out=np.zeros_like(before), where=crosses)
    there = cost[..., :-1] + share * (cost[..., 1:] - cost[..., :-1])
    found = np.concatenate([found, np.where(crosses, there, np.inf)], axis=-1)
    least = found.min(axis=-1)
    return np.where(np.isfinite(least), least, np.nan)


def best_quality(cost: np.ndarray, quality: np.ndarray, most: ArrayLike) -> np.ndarray:
    """Returns the best quality on a curve at a limited cost; see `least_cost`.

    Args:
      cost: `[..., m]`.
      quality: `[..., m]`.
      most: `[...]`, the largest cost.

    Returns:
      `[...]`, NaN if every part of the curve costs more.
    """
    return -least_cost(-quality, -cost, -np.asarray(most, np.float64))


def pareto(cost: ArrayLike, quality: ArrayLike) -> np.ndarray:
    """Returns the Pareto front: no other setting is cheaper and as good, or better and as cheap.

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
    """Returns the settings that no other setting is shown to beat.

    A setting beats another if it is shown to be cheaper or better, and the other is neither: the
    paired interval of the difference does not contain 0. So settings that differ only by noise are
    all on the front, or none is. Lossless settings count with the quality of the verifier alone.

    Args:
      scored: the settings; those without either figure are left out.
      cost: the figure to minimise.
      quality: the figure to maximise; `nats_per_token` is minimised.
      bootstrap: the resampling of the figures.

    Returns:
      The settings on the front, in order.
    """
    known = [x for x in scored if _has(scored[x], cost) and _has(scored[x], quality)]
    if not known:
        return []
    equal = {x: x.verifier_alone for x in known if x.is_lossless}
    of = {x: scored.get(equal.get(x, x), scored[x]) for x in known}
    better = _above(of, quality, bootstrap)
    cheaper = _above({x: scored[x] for x in known}, cost, bootstrap).T
    leads = (better.T if quality == NATS else better) | cheaper
    beaten = (leads & ~leads.T).any(axis=0)
    return [x for x, is_beaten in zip(known, beaten, strict=True) if not is_beaten]


def _above(scored: Scored, name: str, how: Bootstrap) -> np.ndarray:
    """`[m, m]` bool: whether the figure of setting i is shown to be above that of setting j."""
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
    """Returns the settings of each curve, in the order of their strengths, without models alone."""
    found: dict[Any, list[Setting]] = {}
    for setting in settings:
        if not setting.is_alone:
            found.setdefault(setting.curve, []).append(setting)
    return [sorted(curve, key=lambda x: x.strength or 0.0) for curve in found.values()]


def common(settings: Iterable[Setting]) -> set[str]:
    """Returns the fields, except rule and method, in which all settings that use them agree."""
    # Models alone have no drafts, and sequential cascades no blocks.
    drafting = [setting for setting in settings if not setting.is_alone]
    found = set()
    for name in set(Setting.__dataclass_fields__) - {"rule", "method"}:
        own = {getattr(setting, name) for setting in drafting}
        if len(own - {None} if name in ("max_draft", "verification") else own) < 2:
            found.add(name)
    return found


def table_2(scored: Scored, quality: str, bootstrap: Bootstrap) -> Rows:
    """Returns table 2: a row for each curve whose verifier alone was measured.

    `latency_reduction`: the verifier's latency over the least latency at which the method has at
    least the verifier's quality. `best_quality`: the method's best quality at most at the
    verifier's latency. Both interpolate linearly between neighbouring strengths, also on resampled
    texts for the intervals; `matched` and `within` are the shares of resamples in which the value
    exists. `measured_reduction`: at the fastest measured setting whose quality is not shown to be
    below the verifier's (the paired interval of the difference is not below 0); its interval keeps
    this setting. A lossless curve counts with the verifier's quality.

    Args:
      scored: the settings with figures.
      quality: the name of the quality figure.
      bootstrap: the resampling of the figures.

    Returns:
      The rows.

    Source: Faster Cascades via Speculative Decoding (arXiv 2405.19261), table 2.
    """
    rows = []
    shared = common(scored) - {"temperature"}
    for points in curves(scored):
        verifier = scored.get(points[0].verifier_alone)
        known = [p for p in points if _has(scored[p], RELATIVE) and _has(scored[p], quality)]
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

    def kept(setting: Setting) -> bool:
        high = over(scored[setting], verifier, quality, bootstrap)["high"]
        return setting.is_lossless or (high is not None and high >= 0.0)

    def latency(setting: Setting) -> float:
        return _value(scored[setting], RELATIVE)

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
    """Returns rows for the front of speed and quality (without a quality: nats per token).

    The models alone and the fastest lossless setting of each temperature are included. Rows are in
    the order of speed. `expected` is the estimated speed-up.
    """
    rows = []
    for group in drawn_alike(scored):
        here = {setting: scored[setting] for setting in group}
        first = front(here, RELATIVE, quality or NATS, bootstrap)
        lossless = [x for x in group if x.is_lossless and not x.is_alone]
        fastest = sorted(lossless, key=lambda x: _value(scored[x], RELATIVE))[:1]
        for setting in sorted(group, key=lambda x: -_value(scored[x], RELATIVE)):
            if setting in first or setting in fastest or setting.is_alone:
                figures = scored[setting].figures
                on_front = "yes" if setting in first else "-"
                row: dict[str, Any] = {"setting": setting.described(), "front": on_front}
                if quality is not None:
                    row[quality] = shown(figures[quality])
                row["speedup"] = shown(_inverse(figures[RELATIVE]))
                if estimates:
                    known = estimates.get(setting)
                    row["expected"] = None if known is None else known.to_dict()["speedup"]
                for name in (NATS, "tokens_per_verifier_call"):
                    row[name] = shown(figures.get(name))
                rows.append(row)
    return rows


# The least ratio of the speeds of two neighbouring rows in a table of estimates.
_LEAST_STEP = 1.01


def estimated_rows(estimates: Sequence[Expected]) -> Rows:
    """Returns rows for the front of expected speed and nats per token.

    The models alone and the fastest lossless setting are included. A setting that is not at least
    1% faster than the row before is left out, because it hardly differs from it. Without times the
    speed is the tokens per call.
    """
    rows = []
    known = {x.setting: x for x in estimates}
    for group in drawn_alike(known):
        here = [known[setting] for setting in group]
        speeds = np.asarray([x.speed for x in here])
        nats = [x.nats_per_token for x in here]
        first = pareto(-speeds, -np.asarray(nats))
        lossless = [x for x in here if x.setting.is_lossless and not x.setting.is_alone]
        fastest = sorted(lossless, key=lambda x: -x.speed)[:1]
        last = 0.0
        for i in np.argsort(speeds, kind="stable"):
            estimate = here[i]
            differs = first[i] and speeds[i] >= _LEAST_STEP * last
            if estimate.setting.is_alone or estimate in fastest or differs:
                last = speeds[i]
                figures = {name: x for name, x in estimate.to_dict().items() if name != "error"}
                described, on_front = estimate.setting.described(), "yes" if first[i] else "-"
                rows.append({"setting": described, "front": on_front, **figures})
    return rows


def table_2_rows(rows: Rows, quality: str) -> Rows:
    """Returns table 2 with intervals as texts."""
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
    """Returns all settings with all figures, each number in its own column, for CSV."""
    rows = []
    for setting in dict.fromkeys((*scored, *estimates)):
        row: dict[str, Any] = {"setting": setting.described(), **setting.to_dict()}
        if setting in estimates:
            row |= {f"expected_{name}": x for name, x in estimates[setting].to_dict().items()}
        if setting in scored:
            for name, figure in scored[setting].figures.items():
                row |= {f"{name}_{end}" if end != "value" else name: figure[end] for end in _ENDS}
        rows.append(row)
    return rows


def rank_correlation(scored: Scored, estimates: Mapping[Setting, Expected]) -> float | None:
    """Returns Spearman's correlation of estimated and measured speed-ups; None for fewer than 3."""
    # The speed-up of the verifier alone is 1, estimated and measured.
    others = [x for x in scored if x in estimates and x.method != VERIFIER_ALONE]
    both = [x for x in others if not np.isnan(estimates[x].speedup)]
    expected = [estimates[x].speedup for x in both]
    measured = [1.0 / _value(scored[x], RELATIVE) for x in both]
    if len(both) < 3 or len(set(expected)) < 2 or len(set(measured)) < 2:
        return None
    # Imported here because it takes long.
    from scipy.stats import spearmanr

    return float(spearmanr(expected, measured).statistic)


_ENDS = ("value", "low", "high")


def csv_text(rows: Rows) -> str:
    """Returns rows as comma-separated values, with a column for each key of any row."""
    file = io.StringIO()
    columns = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(file, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def latex_text(rows: Rows) -> str:
    """Returns rows as a LaTeX table, which needs no packages."""

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


# Characters with a meaning in LaTeX -> their code; paths of drafters may have them.
_SIGNS = {sign: f"\\{sign}" for sign in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
}


def _escaped(cell: Any) -> str:
    text = "-" if cell is None else f"{cell:.4g}" if isinstance(cell, float) else str(cell)
    return "".join(_SIGNS.get(sign, sign) for sign in text)


def drawn_alike(settings: Iterable[Setting]) -> list[list[Setting]]:
    """Returns the settings of each temperature, top-k and top-p, in order."""
    found: dict[Setting, list[Setting]] = {}
    for setting in settings:
        found.setdefault(setting.verifier_alone, []).append(setting)
    return list(found.values())


def _inverse(figure: Mapping[str, float | None]) -> dict[str, float | None]:
    ends = {"value": figure["value"], "low": figure["high"], "high": figure["low"]}
    return {name: None if x is None else 1.0 / x for name, x in ends.items()}


def _columns(scored: Scored, settings: list[Setting], name: str) -> tuple[np.ndarray, np.ndarray]:
    """A figure of a curve's settings `[m]`, and its resamples `[R, m]`."""
    values = np.asarray([_value(scored[x], name) for x in settings], np.float64)
    return values, np.stack([scored[x].resampled[name] for x in settings], axis=-1)


def _value(scores: Scores, name: str) -> float:
    """The value of a figure, or NaN."""
    value = scores.figures.get(name, {}).get("value")
    return np.nan if value is None else value


def _has(scores: Scores, name: str) -> bool:
    return scores.figures.get(name, {}).get("value") is not None
