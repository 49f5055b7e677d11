"""Compares lossless speculative decoding with the verifier alone and with the ideal speed-up."""

import argparse

from specjax.cli.bench import pairs, timing
from specjax.cli.bench.report import Report

HELP = "lossless speculative decoding against the verifier alone, and the ideal speed-up"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair, its prompts and the sizes."""
    pairs.add_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    """Measures every batch size, draft length and temperature.

    With c = t_draft / t_verifier(1) and r = t_verifier(G + 1) / t_verifier(1), the ideal speed-up
    is that of loops which take no longer than their passes: at batch 1 it is E[tokens per round] /
    (G c + r). In a batch, rows that end early wait for the last row, in both loops. All times are
    from this run.
    """
    rows_of_table = []
    for sizes, measured in timing.measure_all(args):
        c, r = measured.draft / measured.one, measured.block / measured.one
        lone, both = measured.lone_totals, measured.totals
        alone_per_token = measured.alone / lone.emitted
        speedup = alone_per_token / (measured.loop / both.emitted)
        # In units of t_verifier(1).
        passes = both.verifier * (sizes["max_draft"] * c + r)
        ideal = (lone.verifier / lone.emitted) / (passes / both.emitted)
        rows_of_table.append(
            {
                **sizes,
                "tokens_per_call": both.emitted / both.rounds,
                "c": c,
                "r": r,
                "speedup": speedup,
                "ideal": ideal,
                "of_ideal": speedup / ideal,
                "alone_tokens_per_s": 1.0 / alone_per_token,
            }
        )
    return Report(rows_of_table, list(rows_of_table[0]))
