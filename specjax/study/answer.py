"""Answers a demand: rounds of measurements, a choice, and its figures on held-out texts."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specjax.errors import UserError
from specjax.evaluation import Bootstrap
from specjax.study.choose import HalvingRound, Search, halve
from specjax.study.demand import DIFFERENCE, LATENCY, NATS, Choice, Counts, Judge, verdict
from specjax.study.measure import Measuring, MeasuringError, tell
from specjax.study.scores import RELATIVE, Scores, over
from specjax.text.setting import Setting

HELD_OUT = "held out"
# The figures of each setting in `results.json`.
_FIGURES = (RELATIVE, LATENCY, NATS, "tokens_per_verifier_call", "output_length")
# Name of a part -> the start and end of its texts, and how many of them are timed.
Parts = Mapping[str, tuple[int, int, int]]
Look = Callable[[Setting, Sequence[str]], Scores]


def parts_of(search: Search, rows: int, measuring: Measuring) -> dict[str, tuple[int, int, int]]:
    """Returns the parts of the texts: a part for each round, then the held-out part.

    About `latency_limit` texts are timed in all rounds together, and as many held-out texts.

    Raises:
      ValueError: there are too few texts.
    """
    least = 2 * measuring.latency_batch_size
    ends = search.ends(rows, least)
    places = list(zip([0, *ends], [*ends, rows], strict=True))
    share = measuring.latency_limit / ends[-1]
    wanted = [*(round(share * (stop - start)) for start, stop in places[:-1])]
    wanted.append(measuring.latency_limit)
    names = [*(f"round {i + 1}" for i in range(len(ends))), HELD_OUT]
    return {
        name: (start, stop, min(max(want, least), stop - start))
        for name, (start, stop), want in zip(names, places, wanted, strict=True)
    }


def answer(
    look: Look,
    candidates: Sequence[Setting],
    alone: Setting,
    search: Search,
    parts: Parts,
    quality: str | None,
    bootstrap: Bootstrap,
) -> tuple[dict[str, Any], Choice]:
    """Chooses a setting by successive halving, and measures it on the held-out texts.

    Args:
      look: measures a setting on the last of some parts; returns its figures on all of them.
      candidates: the settings to measure, without the verifier alone.
      alone: the verifier alone.
      search: the demand.
      parts: see `parts_of`.
      quality: the name of the quality figure, or None.
      bootstrap: the resampling.

    Returns:
      The answer's part of `results.json`, and the choice.
    """
    demand = search.asked
    assert demand is not None
    *rounds, _ = parts
    counts = [Counts(stop - start, timed) for start, stop, timed in parts.values()]
    seen = [
        Counts(*(sum(column) for column in zip(*counts[: i + 1], strict=True)))
        for i in range(len(rounds))
    ]

    judge = Judge(demand, quality, search.confidence, seen[-1], counts[-1])
    choice, found = halve(
        candidates, alone, lambda setting, i: look(setting, rounds[: i + 1]), judge, seen, tell
    )
    results: dict[str, Any] = {
        "demand": demand.described(),
        "answer": choice.answer,
        "setting": None if choice.setting is None else choice.setting.to_dict(),
        "described": None if choice.setting is None else choice.setting.described(),
        "why": choice.why,
        "rounds": [_of_round(halving, quality) for halving in found],
        "held_out": None,
    }
    if choice.setting is not None:
        tell(f"measuring {choice.setting.described()} on {counts[-1].rows} held-out texts ...")
        verifier, scores = _held_out(look, alone), _held_out(look, choice.setting)
        clauses = verdict(demand, choice.setting, scores, verifier, quality, bootstrap)
        apart = None if quality is None else over(scores, verifier, quality, bootstrap)
        results["held_out"] = {
            "texts": counts[-1].rows,
            "timed": counts[-1].timed,
            "met": all(clause["met"] for clause in clauses),
            "demands": clauses,
            "figures": _figures(scores, quality),
            "verifier": _figures(verifier, quality),
            DIFFERENCE: apart,
        }
    return results, choice


def _held_out(look: Look, setting: Setting) -> Scores:
    """A setting's figures on the held-out texts; an error ends the run."""
    try:
        return look(setting, [HELD_OUT])
    except MeasuringError as error:
        raise UserError(f"{setting.described()} failed on the held-out texts: {error}") from None


def _of_round(halving: HalvingRound, quality: str | None) -> dict[str, Any]:
    settings = [
        {
            "setting": setting.described(),
            "chance": halving.judged[setting].chance,
            "passes": halving.judged[setting].passes,
            "figures": _figures(scores, quality),
        }
        for setting, scores in halving.found.items()
    ]
    return {"texts": halving.texts.rows, "timed": halving.texts.timed, "settings": settings}


def _figures(scores: Scores, quality: str | None) -> dict[str, Any]:
    names = _FIGURES if quality is None else (quality, *_FIGURES)
    return {name: scores.figures[name] for name in names if name in scores.figures}
