"""Chooses which settings are measured, and of these the fastest within limits.

Settings that their estimates rule out are not measured. The choice is measured again on texts that
it has not seen. A setting is within a limit if the whole (paired) interval of its figure is.
"""

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.checks import one_number, whole_fields
from specjax.errors import UserError, tell
from specjax.evaluation import Bootstrap
from specjax.rules import KLBall
from specjax.study.expect import Expected, is_chain
from specjax.study.measure import NATS, RELATIVE, Measuring, MeasuringError, Scores, over
from specjax.study.points import COMPARED, HELD_OUT
from specjax.study.tables import pareto
from specjax.text.parts import Part
from specjax.text.setting import Setting

DRAFT, DO_NOT_DRAFT, NOT_MET = "draft", "do not draft", "cannot be met"
# How far past its limit an estimate of nats may be, because its contexts are the verifier's.
_LEEWAY = 1.5
# The figures of each setting in `results.json`.
_FIGURES = (RELATIVE, "latency", NATS, "tokens_per_verifier_call", "output_length")
# Name of a part -> the start and end of its texts, and how many of them are timed.
Parts = Mapping[str, tuple[int, int, int]]
# A setting, and a part of the texts -> its figures on them.
Look = Callable[[Setting, str], Scores]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Search:
    """What the chosen setting must keep, and how settings are estimated and chosen.

    With `max_latency` alone the setting of the best quality is chosen, otherwise the fastest.
    Without limits nothing is chosen: the promising settings are compared.

    Attributes:
      max_loss: the most quality lost against the verifier alone, in the metric's units.
      max_nats: the most nats per token from the verifier.
      max_latency: the longest latency, over the verifier's.
      held_out: the share of the texts that are not used for the choice.
      estimate_limit: the most texts that the verifier decodes for the estimates.
      candidates: the number of estimated settings to measure, at each temperature.
      draws: see `expect`.
      seed: the seed of the estimates and of the selection of held-out texts.
    """

    max_loss: float | None = None
    max_nats: float | None = None
    max_latency: float | None = None
    held_out: float = 0.5
    estimate_limit: int = 64
    candidates: int = 12
    draws: int = 4
    seed: int = 0

    def __post_init__(self) -> None:
        put = object.__setattr__
        finite: dict[str, Any] = {"low": 0.0, "open_high": True, "dtype": float}
        for name in ("max_loss", "max_nats", "max_latency"):
            if (limit := getattr(self, name)) is not None:
                span = {**finite, "open_low": name == "max_latency"}
                put(self, name, one_number(name, limit, **span))
        share = {**finite, "open_low": True, "high": 1.0}
        put(self, "held_out", one_number("held_out", self.held_out, **share))
        whole_fields(self, estimate_limit=1, candidates=1, draws=1, seed=0)

    @property
    def limits(self) -> dict[str, float]:
        """The given limits, by name."""
        values = {name: getattr(self, name) for name in ("max_loss", "max_nats", "max_latency")}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def wants_quality(self) -> bool:
        """Whether to choose the setting of the best quality, not the fastest."""
        return self.limits.keys() == {"max_latency"}

    def holds_by_law(self, name: str, setting: Setting) -> bool:
        """Whether a setting certainly keeps a limit: it is lossless, or its rule has the bound."""
        if name == "max_nats" and setting.method is None:
            rule = setting.part("rule")
            if isinstance(rule, KLBall) and setting.strength is not None:
                assert self.max_nats is not None
                return setting.strength <= self.max_nats
        return name != "max_latency" and setting.is_lossless

    def with_balls(self, settings: Sequence[Setting]) -> list[Setting]:
        """Adds `KLBall`s with the bound of `max_nats`, beside each lossless chain.

        Of the rules that certainly keep it, these accept most. At temperature 0 they are lossless.
        """
        added = dict.fromkeys(settings)
        for setting in settings if self.max_nats else ():
            is_plain = is_chain(setting) and setting.costs is None
            if is_plain and setting.is_lossless and setting.temperature > 0.0:
                added[dataclasses.replace(setting, rule=f"KLBall({self.max_nats})")] = None
        return list(added)

    def parts(self, rows: int, measuring: Measuring) -> dict[str, tuple[int, int, int]]:
        """Returns the parts of the texts: those to choose by, then the held-out texts.

        Raises:
          UserError: there are too few texts.
        """
        least, held_out = 2 * measuring.latency_batch_size, round(rows * self.held_out)
        seen = rows - held_out
        if min(seen, held_out) < least:
            raise UserError(
                f"of {rows} texts, {held_out} are held out and {seen} are left to choose by; both "
                f"need at least {least}: add texts, change HELD_OUT, or lower LATENCY_BATCH_SIZE"
            )
        timed = measuring.latency_limit
        return {
            COMPARED: (0, seen, min(timed, seen)),
            HELD_OUT: (seen, rows, min(timed, held_out)),
        }


def promising(
    estimates: Sequence[Expected], count: int, max_nats: float | None = None
) -> list[Setting]:
    """Selects the settings to measure by their estimates, of one sampling.

    Settings of one draft cost the same passes, so one that yields more tokens per pass at fewer
    nats beats the other strengths of its rule. The rest is split into bands of divergence, and each
    band gives a setting of the rule and the draft that were taken least often, and of these the one
    with the most tokens per pass. A lossless setting is always selected.

    Args:
      count: the most settings to select.
      max_nats: settings that are estimated to be far above it are left out.
    """
    drafts = [x for x in estimates if not x.setting.is_alone]
    if max_nats is not None:
        drafts = [x for x in drafts if x.nats_per_token <= _LEEWAY * max_nats]
    curves: dict[Any, list[Expected]] = {}
    for x in drafts:
        curves.setdefault(x.setting.curve, []).append(x)
    left = []
    for curve in curves.values():
        kept = pareto([-x.tokens_per_call for x in curve], [-x.nats_per_token for x in curve])
        # Infinite divergences, such as of lossy rules at temperature 0, cannot be compared.
        places = zip(curve, kept, strict=True)
        left += [x for x, stays in places if stays or math.isinf(x.nats_per_token)]
    left.sort(key=lambda x: (not x.setting.is_lossless, x.nats_per_token, x.tokens_per_call))
    ends = np.linspace(0, len(left), min(count, len(left)) + 1).round().astype(int)
    taken: list[Setting] = []
    seen: Counter[Any] = Counter()
    for start, stop in itertools.pairwise(ends):
        band = left[start:stop]
        if not taken:
            band = [x for x in band if x.setting.is_lossless] or band
        best = min(band, key=lambda x: (sum(seen[kind] for kind in _kinds(x)), -x.tokens_per_call))
        taken.append(best.setting)
        seen.update(_kinds(best))
    return taken


def _kinds(estimate: Expected) -> tuple[Any, ...]:
    setting = estimate.setting
    draft = setting.drafter, setting.max_draft, setting.stopping, setting.verification
    return Part.parse(setting.rule).name, draft


class Choice(NamedTuple):
    """The answer: `DRAFT`, `DO_NOT_DRAFT` or `NOT_MET`, which has no setting; and why.

    `verdicts` has the limits of each setting; none without the verifier alone.
    """

    answer: str
    setting: Setting | None
    why: str
    verdicts: Mapping[Setting, Mapping[str, Mapping[str, Any]]]


class Judge:
    """Compares the figures of settings with the limits, and with the verifier alone.

    Args:
      search: has at least one limit.
      quality: the name of the quality figure; None: only lossless settings keep `max_loss`.
    """

    def __init__(self, search: Search, alone: Setting, quality: str | None, bootstrap: Bootstrap):
        self.search, self.alone, self.quality = search, alone, quality
        self._bootstrap = bootstrap

    def verdict(
        self, setting: Setting, scores: Scores, verifier: Scores
    ) -> dict[str, dict[str, Any]]:
        """Returns for each limit the `value` of the figure with `low` and `high`, and what follows.

        `within` is True if the interval is within the limit, False if it is beyond, None if the
        texts do not show it; `by_law` that the setting certainly keeps the limit.
        """
        none = dict.fromkeys(("value", "low", "high", "error"))
        verdict = {}
        for name, limit in self.search.limits.items():
            if name == "max_loss" and self.quality is not None:
                figure = over(verifier, scores, self.quality, self._bootstrap)
            else:
                known = {"max_nats": NATS, "max_latency": RELATIVE}.get(name, "")
                figure = dict(scores.figures.get(known) or none)
            by_law, within = self.search.holds_by_law(name, setting), None
            if by_law or (figure["high"] is not None and figure["high"] <= limit):
                within = True
            elif figure["low"] is None or figure["low"] > limit:
                within = False
            verdict[name] = {**figure, "limit": limit, "by_law": by_law, "within": within}
        return verdict

    def gain(self, scores: Scores) -> float:
        """The speed-up over the verifier alone, or the quality."""
        value = scores.value(str(self.quality) if self.search.wants_quality else RELATIVE)
        if math.isnan(value):
            return 0.0
        return value if self.search.wants_quality else 1.0 / value

    def choose(self, scored: Mapping[Setting, Scores]) -> Choice:
        """Chooses among the measured settings, the verifier alone one of them.

        If the verifier alone is within the limits too, and the best setting is not shown to be
        better, the choice is the verifier alone, or a lossless setting that is shown to be faster.
        """
        if (alone := scored.get(self.alone)) is None:
            return Choice(NOT_MET, None, "the verifier alone failed, so there is no baseline", {})
        verdicts = {x: self.verdict(x, scores, alone) for x, scores in scored.items()}
        passing = [
            x for x, limits in verdicts.items() if all(one["within"] for one in limits.values())
        ]
        if not passing:
            return Choice(NOT_MET, None, _why_not(verdicts), verdicts)
        best = max(passing, key=lambda x: self.gain(scored[x]))
        text, leads = self._lead(scored[best], alone)
        if best != self.alone and (leads or self.alone not in passing):
            return Choice(DRAFT, best, f"it is {text}", verdicts)
        safe = [x for x in passing if x.is_lossless and x != self.alone]
        if self.search.wants_quality and safe:
            fastest = min(safe, key=lambda x: scored[x].value(RELATIVE))
            speed, leads = _speed(scored[fastest])
            if leads:
                why = f"it is {speed}, and lossless: its quality is the verifier's"
                return Choice(DRAFT, fastest, why, verdicts)
        if best == self.alone:
            gains = "better" if self.search.wants_quality else "faster"
            why = f"no other setting that keeps the limits is {gains}"
        else:
            why = f"the best other setting, {best.described()}, is {text}: this may be chance"
        return Choice(DO_NOT_DRAFT, self.alone, why, verdicts)

    def chance(self, chosen: Setting, scores: Scores, alone: Scores) -> str | None:
        """Says how the chosen setting does on texts that it was not chosen by, if its lead is gone.

        None if it leads there too, or if the verifier alone is beyond a limit.
        """
        text, leads = _speed(scores) if chosen.is_lossless else self._lead(scores, alone)
        limits = self.verdict(self.alone, alone, alone).values()
        return None if leads or not all(limit["within"] for limit in limits) else text

    def _lead(self, scores: Scores, alone: Scores) -> tuple[str, bool]:
        """How a setting compares with the verifier alone, and whether it is shown to be better."""
        if not self.search.wants_quality:
            return _speed(scores)
        gain = over(scores, alone, str(self.quality), self._bootstrap)
        if gain["low"] is None:
            return "of unknown quality", False
        ends = f"[{gain['low']:+.3g}, {gain['high']:+.3g}]"
        text = f"{gain['value']:+.3g} {ends} {self.quality} over the verifier alone"
        return text, gain["low"] > 0.0


def _speed(scores: Scores) -> tuple[str, bool]:
    figure = scores.figures[RELATIVE]
    value, low, high = (figure[name] for name in ("value", "low", "high"))
    if not value or not low or not high:
        return "of unknown speed", False
    text = f"{1.0 / value:.3g} [{1.0 / high:.3g}, {1.0 / low:.3g}] times as fast as the verifier"
    return f"{text} alone", high < 1.0


def _excess(limit: Mapping[str, Any]) -> float:
    """How far a figure is beyond its limit, in standard errors."""
    if limit["by_law"]:
        return -math.inf
    if limit["value"] is None or limit["error"] is None:
        return math.inf
    return (limit["value"] - limit["limit"]) / max(limit["error"], 1e-9)


def _why_not(verdicts: Mapping[Setting, Mapping[str, Mapping[str, Any]]]) -> str:
    """Names the setting that comes closest to the limits."""
    nearest = min(verdicts, key=lambda x: max(map(_excess, verdicts[x].values())))
    name, limit = max(verdicts[nearest].items(), key=lambda item: _excess(item[1]))
    if limit["value"] is None or limit["low"] is None:
        return "no setting has the figures that the limits need"
    text = (
        f"{nearest.described()} comes closest to {name.upper()}={limit['limit']:g}: it has "
        f"{limit['value']:.3g} [{limit['low']:.3g}, {limit['high']:.3g}]"
    )
    if limit["value"] > limit["limit"]:
        return text
    return f"{text}, which may be beyond it: relax the limit, or add texts"


def answer(
    look: Look, scored: Mapping[Setting, Scores], judge: Judge, parts: Parts
) -> dict[str, Any]:
    """Chooses a setting, and measures it and the verifier alone on the held-out texts.

    Args:
      scored: the figures of the settings, and of the verifier alone, on the other texts.
      parts: see `Search.parts`.

    Returns:
      The answer's part of `results.json`.
    """
    choice, held = judge.choose(scored), None
    if (chosen := choice.setting) is not None:
        start, stop, timed = parts[HELD_OUT]
        tell(f"measuring {chosen.described()} on {stop - start} held-out texts ...")
        try:
            verifier, scores = look(judge.alone, HELD_OUT), look(chosen, HELD_OUT)
        except MeasuringError as error:
            raise UserError(f"{chosen.described()} failed on the held-out texts: {error}") from None
        if choice.answer == DRAFT and (text := judge.chance(chosen, scores, verifier)):
            why = f"the best other setting, {chosen.described()}, is {text} on held-out texts"
            chosen, scores, why = judge.alone, verifier, f"{why}: its lead may be chance"
            choice = choice._replace(answer=DO_NOT_DRAFT, setting=chosen, why=why)
        limits = judge.verdict(chosen, scores, verifier)
        for limit in limits.values():
            below = limit["value"] is not None and limit["value"] <= limit["limit"]
            limit["met"] = limit["by_law"] or below
        held = {
            "texts": stop - start,
            "timed": timed,
            "met": all(limit["met"] for limit in limits.values()),
            "limits": limits,
            "figures": _figures(scores, judge.quality),
            "verifier": _figures(verifier, judge.quality),
        }
    considered = [
        {
            "setting": setting.described(),
            "limits": verdict,
            "figures": _figures(scored[setting], judge.quality),
        }
        for setting, verdict in choice.verdicts.items()
    ]
    return {
        "limits": judge.search.limits,
        "answer": choice.answer,
        "setting": None if chosen is None else chosen.to_dict(),
        "described": None if chosen is None else chosen.described(),
        "why": choice.why,
        "texts": parts[COMPARED][1],
        "considered": considered,
        "held_out": held,
    }


def _figures(scores: Scores, quality: str | None) -> dict[str, Any]:
    names = _FIGURES if quality is None else (quality, *_FIGURES)
    return {name: scores.figures[name] for name in names if name in scores.figures}
