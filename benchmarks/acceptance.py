"""Compares verification algorithms on one pair: tokens per verifier call, and greedy outputs."""

import argparse
import sys
from typing import Any

import numpy as np

from benchmarks import command
from specjax import rules, verification
from specjax.cli.report import Report
from specjax.text import Decoder, load_pair
from specjax.text.results import Result, RunInfo, finite
from specjax.types import Sampling

HELP = (
    "compare verification algorithms: tokens per verifier call, and whether greedy outputs are "
    "those of the verifier"
)

ALGORITHMS: dict[str, verification.Verification] = {
    "Token": verification.Token(),
    "Block": verification.Block(),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair, its prompts and the sizes."""
    command.add_pair(parser)
    parser.add_argument("--prompts", type=int, default=1000, help="number of prompts")
    parser.add_argument("--rows", type=int, default=32, help="batch size")
    parser.add_argument("--drafts", type=int, nargs="+", default=[5, 8], help="draft lengths G")
    command.add_temperatures(parser)
    parser.add_argument("--max-new", type=int, default=64, help="longest output, in tokens")


def run(args: argparse.Namespace) -> Report:
    """Decodes all prompts with every algorithm, draft length and temperature.

    `sum_P` and `sum_prod` are the expected accepted tokens of block and of token verification on
    the same drafts (Sun et al., Block Verification, section 4). `rows_below` counts the rows
    in which `sum_P` is smaller by more than float32 rounding. Standard errors are those of
    ratios of sums over rows. `difference` is the tokens per call minus those of the first
    algorithm; its standard error compares the same prompts row by row.
    """
    command.check_positive(args, "prompts", "rows", "drafts", "max_new")
    texts = command.read_texts(args)
    pair = load_pair(drafter=args.drafter, verifier=args.verifier)
    command.encode_texts(args, texts, pair.verifier.tokenizer)
    shape: dict[str, Any] = {"batch_size": args.rows, "max_new_tokens": args.max_new}
    lines = []
    for temperature in args.temperatures:
        alone = None
        # Random draws differ, so only greedy outputs must be equal.
        if temperature == 0:
            print("T=0 verifier ...", flush=True)
            alone = Decoder(pair.verifier, sampling=Sampling(temperature), **shape)(texts)
        for max_draft in args.drafts:
            first: RunInfo | None = None
            for name, algorithm in ALGORITHMS.items():
                print(f"T={temperature:g} G={max_draft} {name} ...", flush=True)
                decoder = Decoder(
                    pair,
                    rule=rules.Lossless(),
                    verification=algorithm,
                    max_draft=max_draft,
                    sampling=Sampling(temperature),
                    **shape,
                )
                result = decoder(texts)
                lines.append(
                    {
                        "temperature": temperature,
                        "max_draft": max_draft,
                        "verification": name,
                        "prompts": len(texts),
                        **figures(result.info, first),
                        "same_as_verifier": None if alone is None else same(alone, result),
                    }
                )
                first = first or result.info
    return Report(lines, list(lines[0]))


def figures(info: RunInfo, first: RunInfo | None = None) -> dict[str, Any]:
    """The figures of a run's verification; with `first`, of another algorithm, the difference.

    A standard error of one row and the acceptance rate without drafts are None.
    """
    block, token = np.float64(info.per_row.block_sum), np.float64(info.per_row.token_sum)
    rate, parts = info.tokens_per_verifier_call, _residuals(info)
    difference = difference_se = None
    if first is not None:
        difference = rate - first.tokens_per_verifier_call
        difference_se = _root(parts - _residuals(first))
    return {
        "tokens_per_call": rate,
        "standard_error": _root(parts),
        "difference": difference,
        "difference_se": difference_se,
        "acceptance_rate": finite(info.acceptance_rate),
        "sum_P": float(block.sum()),
        "sum_prod": float(token.sum()),
        # Sums of some hundred float32 terms each.
        "rows_below": int(np.sum(block < token * (1 - 1e-5))),
    }


def same(first: Result, second: Result) -> int:
    """Returns the number of rows with the same tokens and the same kind of end."""
    columns = zip(first.tokens, second.tokens, first.ended, second.ended, strict=True)
    return sum(np.array_equal(a, b) and bool(c == d) for a, b, c, d in columns)


def _residuals(info: RunInfo) -> np.ndarray:
    """Each row's part of the error of tokens per call, a ratio of sums over rows (linearised)."""
    calls = info.per_row.verifier_calls
    return (info.per_row.emitted - info.tokens_per_verifier_call * calls) / np.sum(calls)


def _root(parts: np.ndarray) -> float | None:
    """The standard error of a sum of independent parts, from which a mean of 0 was estimated."""
    count = len(parts)
    return float(np.sqrt(count / (count - 1) * np.sum(parts**2))) if count > 1 else None


main = command.program(__file__, HELP, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
