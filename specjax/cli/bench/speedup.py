"""Lossless speculative decoding against the verifier alone, and against the ideal of its parts."""

import argparse
import statistics

from specjax.cli.bench import pairs
from specjax.cli.bench.report import Report

HELP = "speculative decoding against the verifier alone, the ideal speed-up, and loop overhead"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the pair, its prompts and the sizes."""
    pairs.add_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    """Measures every batch size, draft length and temperature.

    With c = t_draft / t_verifier(1) and r = t_verifier(G + 1) / t_verifier(1), the ideal speed-up
    is E[tokens per round] / (G c + r). The overhead is the loop's wall time over
    N_draft t_draft + N_verifier t_verifier(G + 1), all times from this run.
    """
    setup = pairs.load(args)
    rows_of_table = []
    for rows in args.rows:
        alone = setup.autoregressive()
        for max_draft in args.drafts:
            loop = setup.speculative(max_draft)
            for temperature in args.temperatures:
                print(f"B={rows} G={max_draft} T={temperature} ...", flush=True)
                rows_of_table.append(
                    _measure(setup, alone, loop, rows, max_draft, temperature, args.repeats)
                )
    return Report(
        rows_of_table,
        [
            "rows",
            "max_draft",
            "temperature",
            "tokens_per_call",
            "c",
            "r",
            "speedup",
            "ideal",
            "of_ideal",
            "overhead",
            "alone_tokens_per_s",
        ],
    )


def _measure(setup, alone, loop, rows, max_draft, temperature, repeats) -> dict[str, float]:
    setup.decode(alone, rows, temperature)  # compiles
    setup.decode(loop, rows, temperature)
    samples: dict[str, list[float]] = {k: [] for k in ("alone", "loop", "draft", "one", "block")}
    verifier, drafter = (setup.verifier, setup.params[0]), (setup.drafter, setup.params[1])
    for _ in range(repeats):
        # Turn by turn, so that a noisy machine disturbs all of them alike.
        seconds, lone = setup.decode(alone, rows, temperature)
        samples["alone"].append(seconds / lone["emitted"])
        seconds, totals = setup.decode(loop, rows, temperature)
        samples["loop"].append(seconds)
        for name, model, width in (
            ("draft", drafter, 1),
            ("one", verifier, 1),
            ("block", verifier, max_draft + 1),
        ):
            samples[name].append(pairs.pass_seconds(*model, setup, rows, width, repeats=3))
    times = {name: statistics.median(values) for name, values in samples.items()}
    per_round = totals["emitted"] / totals["rounds"]
    c, r = times["draft"] / times["one"], times["block"] / times["one"]
    speedup = times["alone"] / (times["loop"] / totals["emitted"])
    ideal = per_round / (max_draft * c + r)
    parts = totals["drafter"] * times["draft"] + totals["verifier"] * times["block"]
    return {
        "rows": rows,
        "max_draft": max_draft,
        "temperature": temperature,
        "tokens_per_call": per_round,
        "c": c,
        "r": r,
        "speedup": speedup,
        "ideal": ideal,
        "of_ideal": speedup / ideal,
        "overhead": times["loop"] / parts,
        "alone_tokens_per_s": 1.0 / times["alone"],
    }
