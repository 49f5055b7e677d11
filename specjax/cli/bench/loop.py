"""Measures the time that the decoding loop adds to the passes of its models."""

import argparse

from specjax.cli.bench import pairs, timing
from specjax.cli.bench.report import Report

HELP = "the time of the speculative loop against the time of its models' passes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair, its prompts and the sizes."""
    pairs.add_arguments(parser)


def run(args: argparse.Namespace) -> Report:
    """Measures every batch size, draft length and temperature.

    The overhead is the loop's wall time over N_draft t_draft(1) + N_verifier t_verifier(G + 1);
    all times are from this run. Milliseconds are those of one pass (draft_two: a pass of two
    tokens), but loop_ms is the time of the whole loop. policy_overhead is that of the same loop
    with a stopping policy that does its work and never stops: the acceptance head's, or the
    drafter's confidence where there is none. start_ms is the time of a call of a `Decoder` beside
    its prefills and its rounds, the median of all batches.
    """
    rows_of_table = []
    for sizes, measured in timing.measure_all(args, starts=True):
        rows_of_table.append(
            {
                **sizes,
                "drafter_calls": measured.totals.drafter,
                "verifier_calls": measured.totals.verifier,
                "draft_ms": 1e3 * measured.draft,
                "draft_two_ms": 1e3 * measured.draft_two,
                "verifier_ms": 1e3 * measured.block,
                "loop_ms": 1e3 * measured.loop,
                "overhead": measured.overhead,
                "policy_overhead": measured.policy_overhead,
                "start_ms": 1e3 * measured.start,
            }
        )
    return Report(rows_of_table, list(rows_of_table[0]))
