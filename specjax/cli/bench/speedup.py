"""Compares lossless speculative decoding with the verifier alone and with the ideal speed-up."""

import argparse
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from specjax.cli.bench import workload
from specjax.cli.bench.report import Report
from specjax.study.measure import Times
from specjax.study.speedups import RoundCost, best, conclusion, speedup, speedups, spread
from specjax.study.turns import in_turns, timed
from specjax.text import Decoder, Pair, Result
from specjax.text.passes import PassTimes, measure_times
from specjax.text.results import finite
from specjax.text.setting import VERIFIER_ALONE, Setting

HELP = "compare lossless speculative decoding with the verifier alone and the ideal speed-up"
_TABLE = ("verifier", "drafter")
_NOTES = (
    "c: the time of a drafter's pass, and r: that of the verifier's pass over G + 1 tokens, both",
    "over the verifier's pass over one token. speedup: of whole calls over the verifier alone, in",
    "turns, with the ends of its 95 % interval. ideal: the speed-up if a call took only the time",
    "of its passes, at batch 1 tokens_per_call / (G c + r). of_ideal: speedup / ideal; above 1,",
    "other work disturbed the times of the passes.",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair, its prompts and the sizes."""
    workload.add_workload(parser)
    parser.add_argument("--drafts", type=int, nargs="+", default=[3, 5], help="draft lengths G")


class Side(NamedTuple):
    """The verifier alone, or with drafts.

    Attributes:
      times: of each chunk of prompts.
      results: `[c]`, of each chunk.
    """

    times: Times
    results: list[Result]

    def per_pass(self) -> float:
        """Returns the emitted tokens per pass of a batch, which waits for its last row."""
        infos = [result.info.per_row for result in self.results]
        passes = sum(int(info.verifier_calls.max()) for info in infos)
        return sum(int(info.emitted.sum()) for info in infos) / passes


def run(args: argparse.Namespace) -> Report:
    """Measures every batch size, draft length and temperature.

    Whole calls of a `Decoder` are compared; both sides take turns at every batch. In a batch, rows
    that end early wait for the last row, with drafts and without. All times are from this run.
    """
    workload.check_positive(args, "drafts")
    pair, tokens = workload.load(args)
    rows, verdicts = [], []
    for batch in args.rows:
        chunks = [tokens[i : i + batch] for i in range(0, len(tokens) - batch + 1, batch)]
        passes: dict[int, PassTimes] = {}
        for temperature in args.temperatures:
            measured: dict[int, tuple[dict[str, Side], RoundCost]] = {}
            for max_draft in args.drafts:
                decoders = _decoders(pair, tokens, args.max_new, batch, max_draft, temperature)
                if max_draft not in passes:
                    print(f"B={batch} G={max_draft}: measuring passes ...", flush=True)
                    alone = decoders["alone"]
                    passes[max_draft] = _passes(pair, alone, chunks[0], batch, max_draft)
                print(f"B={batch} G={max_draft} T={temperature:g} ...", flush=True)
                sides = measure(decoders, chunks, args.repeats)
                measured[max_draft] = sides, round_cost(sides, passes[max_draft])
                sizes = {"rows": batch, "max_draft": max_draft, "temperature": temperature}
                rows.append({**sizes, **figures(*measured[max_draft])})
            verdicts.append(_verdict(measured, f"at batch {batch}, temperature {temperature:g}"))
    return Report(rows, list(rows[0]), [*_NOTES, *verdicts])


def _verdict(measured: dict[int, tuple[dict[str, Side], RoundCost]], where: str) -> str:
    """What was fastest, or why drafting does not pay."""
    both = {n: (sides["drafts"].times, sides["alone"].times) for n, (sides, _) in measured.items()}
    gains = speedups(both)
    length = best(gains)
    return conclusion(
        {f"drafts of {max_draft}": gain for max_draft, gain in gains.items()},
        where=where,
        cost=None if length is None else measured[length][1],
        spread=spread([alone for _, alone in both.values()]),
    )


def _decoders(
    pair: Pair,
    tokens: Sequence[np.ndarray],
    max_new: int,
    batch: int,
    max_draft: int,
    temperature: float,
) -> dict[str, Decoder]:
    settings = {
        "alone": Setting(method=VERIFIER_ALONE, temperature=temperature),
        "drafts": Setting(max_draft=max_draft, temperature=temperature),
    }
    # With one bucket all batches run the same program.
    options: dict[str, Any] = {"buckets": (max(map(len, tokens)),), "max_new_tokens": max_new}
    return {
        name: setting.decoder(pair.named, batch_size=batch, **options)
        for name, setting in settings.items()
    }


def _passes(
    pair: Pair, alone: Decoder, prompts: Sequence[np.ndarray], batch: int, max_draft: int
) -> PassTimes:
    given: list[Any] = list(prompts)
    return measure_times(
        pair.named,
        [_TABLE],
        (max_draft + 1,),
        rows=batch,
        prompt_length=alone.buckets[0],
        call=lambda: alone(given, max_new_tokens=1, progress=False),
    )


def measure(
    decoders: dict[str, Decoder], chunks: Sequence[Sequence[np.ndarray]], repeats: int
) -> dict[str, Side]:
    """Returns the times and the results of each decoder; the decoders take turns."""

    def decode(decoder: Decoder, place: int) -> tuple[float, Result]:
        prompts: list[Any] = list(chunks[place])
        ids = range(place * len(prompts), (place + 1) * len(prompts))
        return timed(lambda: decoder(prompts, ids=ids, progress=False))

    sides = {name: lambda i, one=one: decode(one, i) for name, one in decoders.items()}
    for side in sides.values():
        side(0)  # compiles
    seconds = {name: np.zeros((1, repeats, len(chunks))) for name in decoders}
    results: dict[str, dict[int, Result]] = {name: {} for name in decoders}
    for name, repeat, place, (spent, result) in in_turns(sides, range(len(chunks)), repeats):
        seconds[name][0, repeat, place] = spent
        results[name][place] = result
    return {name: _side(seconds[name], list(found.values())) for name, found in results.items()}


def _side(seconds: np.ndarray, results: list[Result]) -> Side:
    emitted = np.asarray([[result.info.per_row.emitted.sum() for result in results]])
    return Side(Times(seconds, emitted), results)


def round_cost(sides: dict[str, Side], times: PassTimes) -> RoundCost:
    """Returns what a round costs and yields.

    Args:
      sides: "alone" and "drafts".
      times: the times of passes, with a table of one width.
    """
    table, step = times.tables[_TABLE], times.steps["verifier"]
    tokens = sides["drafts"].per_pass() / sides["alone"].per_pass()
    return RoundCost(
        table.widths[-1] - 1, table.draft[0] / step, table.verifier[0][-1] / step, tokens
    )


def figures(sides: dict[str, Side], cost: RoundCost) -> dict[str, float | None]:
    """Returns a line of the table."""
    alone, drafts = sides["alone"], sides["drafts"]
    gain = speedup(drafts.times, alone.times)
    infos = [result.info.per_row for result in drafts.results]
    own = sum(int(info.verifier_calls.sum()) for info in infos)
    return {
        "tokens_per_call": sum(int(info.emitted.sum()) for info in infos) / own,
        "c": cost.c,
        "r": cost.r,
        "speedup": gain.value,
        "speedup_low": finite(gain.low),
        "speedup_high": finite(gain.high),
        "ideal": cost.ideal,
        "of_ideal": gain.value / cost.ideal,
        "alone_tokens_per_s": float(alone.times.tokens.sum() / alone.times.usual.sum()),
    }
