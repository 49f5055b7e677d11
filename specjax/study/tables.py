"""Tables of compared settings: the front, table 2 of Faster Cascades, CSV.

Axes: m settings (of a curve in the order of their strengths), R resamples.
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float
from numpy.typing import ArrayLike

from specjax.evaluation import Bootstrap
from specjax.evaluation.bootstrap import Interval
from specjax.runs.evaluation import as_json, shown
from specjax.study.expect import Expected
from specjax.study.measure import NATS, RELATIVE, Scores, over
from specjax.text.setting import Setting

Scored = Mapping[Setting, Scores]
Rows = list[dict[str, Any]]


def least_cost(
    cost: Float[np.ndarray, "*R m"], quality: Float[np.ndarray, "*R m"], wanted: ArrayLike
) -> Float[np.ndarray, "*R"]:
    """Returns the least cost on a curve with at least the wanted quality; NaN if no part has it.

    The curve is linear between neighbouring points.
    """
    level = np.asarray(wanted, np.float64)[..., None]
    costs = np.where(quality >= level, cost, np.inf)
    before, after = quality[..., :-1] - level, quality[..., 1:] - level
    crosses = (before < 0) != (after < 0)
    # The place between two points with exactly the wanted quality.
    share = np.divide(before, before - after, out=np.zeros_like(before), where=crosses)
    there = cost[..., :-1] + share * (cost[..., 1:] - cost[..., :-1])
    least = np.concatenate([costs, np.where(crosses, there, np.inf)], axis=-1).min(axis=-1)
    return np.where(np.isfinite(least), least, np.nan)


def best_quality(
    cost: Float[np.ndarray, "*R m"], quality: Float[np.ndarray, "*R m"], most: ArrayLike
) -> Float[np.ndarray, "*R"]:
    """Returns the best quality on a curve at a limited cost; see `least_cost`."""
    return -least_cost(-quality, -cost, -np.asarray(most, np.float64))


def pareto(cost: ArrayLike, quality: ArrayLike) -> Bool[np.ndarray, " m"]:
    """Returns the Pareto front: no other setting is cheaper and as good, or better and as cheap."""
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
    """
    known = [x for x in scored if scored[x].has(cost) and scored[x].has(quality)]
    if not known:
        return []
    verifiers = {x: x.verifier_alone for x in known if x.is_lossless}
    by_law = {x: scored.get(verifiers.get(x, x), scored[x]) for x in known}
    better = _above(by_law, quality, bootstrap)
    cheaper = _above({x: scored[x] for x in known}, cost, bootstrap).T
    leads = (better.T if quality == NATS else better) | cheaper
    beaten = (leads & ~leads.T).any(axis=0)
    return [x for x, is_beaten in zip(known, beaten, strict=True) if not is_beaten]


def _above(scored: Scored, name: str, how: Bootstrap) -> Bool[np.ndarray, "m m"]:
    """Whether the figure of setting i is shown to be above that of setting j."""
    values = np.asarray([scores.value(name) for scores in scored.values()])
    above = values[:, None] > values
    if not all(name in scores.resampled for scores in scored.values()):
        return above
    again = np.stack([scores.resampled[name] for scores in scored.values()])
    for i in range(len(values)):
        with np.errstate(invalid="ignore"):  # infinity minus infinity
            differences = again[i] - again
        for j in np.flatnonzero(above[i]):
            above[i, j] = how.summary(values[i] - values[j], differences[j]).low > 0.0
    return above


def curves(settings: Iterable[Setting]) -> list[list[Setting]]:
    """Returns the settings of each curve, in the order of their strengths, without models alone."""
    groups: dict[Any, list[Setting]] = {}
    for setting in settings:
        if not setting.is_alone:
            groups.setdefault(setting.curve, []).append(setting)
    return [sorted(curve, key=lambda x: x.strength or 0.0) for curve in groups.values()]


def common(settings: Iterable[Setting]) -> set[str]:
    """Returns the fields, except rule and method, in which all settings that use them agree."""
    # Models alone have no drafts, and sequential cascades no blocks.
    drafting = [setting for setting in settings if not setting.is_alone]
    shared = set()
    for name in set(Setting.__dataclass_fields__) - {"rule", "method"}:
        values = {getattr(setting, name) for setting in drafting}
        if len(values - {None} if name in ("max_draft", "verification") else values) < 2:
            shared.add(name)
    return shared


def table_2(scored: Scored, quality: str, bootstrap: Bootstrap) -> Rows:
    """Returns table 2: a row for each curve whose verifier alone was measured.

    `latency_reduction`: the verifier's latency over the least latency at which the method has at
    least the verifier's quality. `best_quality`: the method's best quality at most at the
    verifier's latency. Both interpolate linearly between neighbouring strengths, also on resampled
    texts; `matched` and `within` are the shares of resamples in which the value exists.
    `measured_reduction`: at the fastest measured setting whose quality is not shown to be below the
    verifier's; its interval keeps this setting. A lossless curve counts with the verifier's
    quality.

    Source: Faster Cascades via Speculative Decoding (arXiv 2405.19261), table 2.
    """
    rows = []
    shared = common(scored) - {"temperature"}
    for points in curves(scored):
        verifier = scored.get(points[0].verifier_alone)
        known = [p for p in points if scored[p].has(RELATIVE) and scored[p].has(quality)]
        if verifier is None or not known or not verifier.has(quality):
            continue
        method = known[0].described(without={*shared, "strength", "temperature"})
        cost, good = (
            np.asarray([scored[x].value(name) for x in known]) for name in (RELATIVE, quality)
        )
        cost_again, good_again = (
            np.stack([scored[x].resampled[name] for x in known], axis=-1)
            for name in (RELATIVE, quality)
        )
        wanted, wanted_again = verifier.value(quality), verifier.resampled[quality]
        if by_law := known[0].is_lossless:
            good, good_again = np.full_like(good, wanted), np.tile(wanted_again, (len(known), 1)).T
        columns = {
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
        for name, (value, again) in columns.items():
            row[name] = as_json(bootstrap.summary(float(value), again))
        row["matched"], row["within"] = (
            float(np.isfinite(again).mean()) for _, again in columns.values()
        )
        # Those that are not shown to be worse than the verifier.
        highs = {x: over(scored[x], verifier, quality, bootstrap)["high"] for x in known}
        as_good = [
            x for x, high in highs.items() if x.is_lossless or (high is not None and high >= 0.0)
        ]
        fastest = min(as_good, key=lambda x: scored[x].value(RELATIVE), default=None)
        measured = Interval(np.nan, np.nan, np.nan, np.nan)
        if fastest is not None:
            again = 1.0 / scored[fastest].resampled[RELATIVE]
            measured = bootstrap.summary(1.0 / scored[fastest].value(RELATIVE), again)
        row["measured_reduction"] = as_json(measured)
        row["measured_strength"] = fastest and fastest.strength
        rows.append(row)
    return rows


def best_rows(scored: Scored, quality: str | None, bootstrap: Bootstrap) -> Rows:
    """Returns rows for the front of speed and quality (without a quality: nats per token).

    The models alone and the fastest lossless setting of each temperature are included. Rows are in
    the order of speed.
    """
    rows = []
    for group in by_sampling(scored):
        here = {setting: scored[setting] for setting in group}
        first = front(here, RELATIVE, quality or NATS, bootstrap)
        lossless = [x for x in group if x.is_lossless and not x.is_alone]
        fastest = sorted(lossless, key=lambda x: scored[x].value(RELATIVE))[:1]
        for setting in sorted(group, key=lambda x: -scored[x].value(RELATIVE)):
            if setting in first or setting in fastest or setting.is_alone:
                figures = scored[setting].figures
                on_front = "yes" if setting in first else "-"
                row: dict[str, Any] = {"setting": setting.described(), "front": on_front}
                if quality is not None:
                    row[quality] = shown(figures[quality])
                ends = {"value": "value", "low": "high", "high": "low"}
                inverse = {name: figures[RELATIVE][end] for name, end in ends.items()}
                row["speedup"] = shown({k: x and 1.0 / x for k, x in inverse.items()})
                for name in (NATS, "tokens_per_verifier_call"):
                    row[name] = shown(figures.get(name))
                rows.append(row)
    return rows


# The least ratio of the tokens per call of two neighbouring rows in a table of estimates.
_LEAST_STEP = 1.01


def estimated_rows(estimates: Sequence[Expected]) -> Rows:
    """Returns rows for the fronts of tokens per call and nats per token, one for each draft.

    Settings of one draft cost the same passes. The models alone and the lossless settings are
    included. A setting that does not yield at least 1% more tokens than the row before is left out,
    because it hardly differs from it.
    """
    groups: dict[Any, list[Expected]] = {}
    for estimate in estimates:
        setting = estimate.setting
        draft = (setting.drafter, setting.max_draft, setting.min_draft, setting.stopping)
        kind = (setting.is_alone, *draft, setting.verification, setting.verifier_alone)
        groups.setdefault(kind, []).append(estimate)
    rows = []
    for group in groups.values():
        tokens = np.asarray([x.tokens_per_call for x in group])
        on_front = pareto(-tokens, [-x.nats_per_token for x in group])
        last = 0.0
        for i in np.argsort(tokens, kind="stable"):
            estimate = group[i]
            differs = on_front[i] and tokens[i] >= _LEAST_STEP * last
            if estimate.setting.is_alone or estimate.setting.is_lossless or differs:
                last = tokens[i]
                figures = {name: x for name, x in estimate.to_dict().items() if name != "error"}
                front_text = "-" if estimate.setting.is_alone or not on_front[i] else "yes"
                described = estimate.setting.described()
                rows.append({"setting": described, "front": front_text, **figures})
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
                row |= {name: figure["value"]}
                row |= {f"{name}_{end}": figure[end] for end in ("low", "high")}
        rows.append(row)
    return rows


def csv_text(rows: Rows) -> str:
    """Returns rows as comma-separated values, with a column for each key of any row."""
    file = io.StringIO()
    columns = dict.fromkeys(name for row in rows for name in row)
    writer = csv.DictWriter(file, list(columns), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return file.getvalue()


def by_sampling(settings: Iterable[Setting]) -> list[list[Setting]]:
    """Returns the settings of each temperature, top-k and top-p, in order."""
    groups: dict[Setting, list[Setting]] = {}
    for setting in settings:
        groups.setdefault(setting.verifier_alone, []).append(setting)
    return list(groups.values())
