"""Verification algorithms on one pair: tokens per verifier call, and exactness when greedy."""

import argparse
from typing import Any

import numpy as np

import specjax
from specjax import rules, verification
from specjax.api import RunInfo
from specjax.cli.bench import pairs
from specjax.cli.bench.report import Report
from specjax.data import read_examples

HELP = "tokens per verifier call of each verification, and greedy outputs against the verifier's"

ALGORITHMS: dict[str, verification.Verification] = {
    "Token": verification.Token(),
    "Block": verification.Block(),
    "GreedyBlock": verification.GreedyBlock(),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the pair, its prompts and the sizes."""
    pairs.add_pair(parser)
    parser.add_argument("--prompts", type=int, default=1000, help="how many of its lines")
    parser.add_argument("--rows", type=int, default=32, help="batch size")
    parser.add_argument("--drafts", type=int, nargs="+", default=[5, 8], help="draft lengths G")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument(
        "--verifications", nargs="+", choices=ALGORITHMS, default=["Token", "Block"]
    )
    parser.add_argument("--max-new", type=int, default=64, help="longest output, in tokens")
    parser.add_argument("--seed", type=int, default=0)


def run(args: argparse.Namespace) -> Report:
    """Decodes all prompts losslessly with every algorithm, draft length and temperature.

    `sum_P` and `sum_prod` are expected accepted tokens of block and of token verification on the
    same drafts (Sun et al., Block Verification, section 4); `rows_below` counts the rows where the
    first is less, beyond float32 rounding. A standard error is that of a ratio of sums over rows.
    """
    pairs.check_positive(args, "prompts", "rows", "drafts", "max_new")
    pair = specjax.load_pair(drafter=args.drafter, verifier=args.verifier)
    texts = [example.inputs for example in read_examples(args.inputs)][: args.prompts]
    shape: dict[str, Any] = {"batch_size": args.rows, "max_new_tokens": args.max_new}
    alone = specjax.Decoder(pair.verifier, **shape)
    lines = []
    for temperature in args.temperatures:
        own = alone(texts, temperature=temperature, seed=args.seed).texts
        for max_draft in args.drafts:
            for name in args.verifications:
                print(f"T={temperature:g} G={max_draft} {name} ...", flush=True)
                decoder = specjax.Decoder(
                    pair,
                    rule=rules.Lossless(),
                    verification=ALGORITHMS[name],
                    max_draft=max_draft,
                    temperature=temperature,
                    **shape,
                )
                result = decoder(texts, seed=args.seed)
                same = sum(map(str.__eq__, own, result.texts))
                lines.append(
                    {
                        "temperature": temperature,
                        "max_draft": max_draft,
                        "verification": name,
                        "prompts": len(texts),
                        **figures(result.info),
                        # Draws differ where they are random: only greedy outputs must agree.
                        "same_as_verifier": same if temperature == 0 else None,
                    }
                )
    return Report(lines, list(lines[0]))


def figures(info: RunInfo) -> dict[str, Any]:
    """What a run's totals say of its verification."""
    rows = info.rows
    rate, calls = info.tokens_per_verifier_call, rows.verifier_calls
    residuals = rows.emitted - rate * calls
    block, token = np.float64(rows.block_sum), np.float64(rows.token_sum)
    return {
        "tokens_per_call": rate,
        "standard_error": float(np.sqrt(np.sum(residuals**2)) / np.sum(calls)),
        "acceptance_rate": info.acceptance_rate,
        "sum_P": float(block.sum()),
        "sum_prod": float(token.sum()),
        # Sums of some hundred float32 terms each.
        "rows_below": int(np.sum(block < token * (1 - 1e-5))),
    }
