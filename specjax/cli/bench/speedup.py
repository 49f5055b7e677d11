"""Compares lossless speculative decoding with the verifier alone and with the ideal speed-up."""

import argparse
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from specjax.cli.bench import workload
from specjax.cli.bench.report import Report
from specjax.study.turns import in_turns, timed
from specjax.text import Decoder, Pair, Result
from specjax.text.passes import PassTimes, measure_times
from specjax.text.setting import VERIFIER_ALONE, Setting

HELP = "compare lossless speculative decoding with the verifier alone and the ideal speed-up"
_TABLE = ("verifier", "drafter")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair, its prompts and the sizes."""
    workload.add_workload(parser)
    parser.add_argument("--drafts", type=int, nargs="+", default=[3, 5], help="draft lengths G")


def run(args: argparse.Namespace) -> Report:
    """Measures every batch size, draft length and temperature.

    `speedup` compares whole calls of a `Decoder`; both sides take turns at every batch. `ideal` is
    the speed-up of calls that take only the time of their passes. At batch 1 it is
    E[tokens per round] / (G c + r), with c = t_draft / t_verifier(1) and
    r = t_verifier(G + 1) / t_verifier(1), both measured in the loop. In a batch, rows that end
    early wait for the last row, with drafts and without. All times are from this run.
    """
    workload.check_positive(args, "drafts")
    pair, tokens = workload.load(args)
    rows = []
    for batch, max_draft in itertools.product(args.rows, args.drafts):
        print(f"B={batch} G={max_draft}: measuring passes ...", flush=True)
        chunks = [tokens[i : i + batch] for i in range(0, len(tokens) - batch + 1, batch)]
        times: PassTimes | None = None
        for temperature in args.temperatures:
            decoders = _decoders(pair, tokens, args.max_new, batch, max_draft, temperature)
            if times is None:
                times = _passes(pair, decoders["alone"], chunks[0], batch, max_draft)
            print(f"B={batch} G={max_draft} T={temperature:g} ...", flush=True)
            sizes = {"rows": batch, "max_draft": max_draft, "temperature": temperature}
            rows.append({**sizes, **figures(measure(decoders, chunks, args.repeats), times)})
    return Report(rows, list(rows[0]))


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
) -> dict[str, list[tuple[float, Result]]]:
    """Returns the seconds and the result of each call; the decoders take turns."""

    def decode(decoder: Decoder, place: int) -> tuple[float, Result]:
        prompts: list[Any] = list(chunks[place])
        ids = range(place * len(prompts), (place + 1) * len(prompts))
        return timed(lambda: decoder(prompts, ids=ids, progress=False))

    sides = {name: lambda i, one=one: decode(one, i) for name, one in decoders.items()}
    for side in sides.values():
        side(0)  # compiles
    found: dict[str, list[tuple[float, Result]]] = {name: [] for name in decoders}
    for name, _, _, call in in_turns(sides, range(len(chunks)), repeats):
        found[name].append(call)
    return found


def figures(calls: dict[str, list[tuple[float, Result]]], times: PassTimes) -> dict[str, float]:
    """Returns a line of the table.

    Args:
      calls: "alone" and "drafts" -> the seconds and the result of each call.
      times: the times of passes, with a table of one width.
    """
    table = times.tables[_TABLE]
    c, r = (x / times.steps["verifier"] for x in (table.draft[0], table.verifier[0][-1]))
    emitted, seconds, rounds, own = {}, {}, {}, {}
    for name, several in calls.items():
        infos = [result.info.per_row for _, result in several]
        emitted[name] = sum(int(info.emitted.sum()) for info in infos)
        seconds[name] = sum(spent for spent, _ in several)
        # All rows of a batch wait for the row with the most rounds.
        rounds[name] = sum(int(info.verifier_calls.max()) for info in infos)
        own[name] = sum(int(info.verifier_calls.sum()) for info in infos)
    per_token = {name: seconds[name] / emitted[name] for name in calls}
    speedup = per_token["alone"] / per_token["drafts"]
    # In units of t_verifier(1).
    passes = rounds["drafts"] * ((table.widths[-1] - 1) * c + r)
    ideal = (rounds["alone"] / emitted["alone"]) / (passes / emitted["drafts"])
    return {
        "tokens_per_call": emitted["drafts"] / own["drafts"],
        "c": c,
        "r": r,
        "speedup": speedup,
        "ideal": ideal,
        "of_ideal": speedup / ideal,
        "alone_tokens_per_s": 1.0 / per_token["alone"],
    }
