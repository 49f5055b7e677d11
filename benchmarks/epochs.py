"""Tokens per verifier call when the same prompts are answered again, epoch after epoch."""

import argparse
import sys

from benchmarks import command
from specjax.cli.report import Report
from specjax.text import Decoder, load_pair
from specjax.types import Sampling

HELP = "tokens per verifier call over epochs of the same prompts, with earlier answers and without"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair, its prompts and the sizes."""
    command.add_pair(parser)
    parser.add_argument("--prompts", type=int, default=64, help="number of prompts")
    parser.add_argument("--epochs", type=int, default=4, help="calls with all prompts")
    parser.add_argument("--samples", type=int, default=8, help="answers of a prompt in an epoch")
    parser.add_argument(
        "--drafting",
        nargs="+",
        default=["Lookup()", "Lookup(earlier=8)"],
        help="how drafts are made, texts of parts",
    )
    parser.add_argument("--draft", type=int, default=8, help="G")
    parser.add_argument("--temperature", type=float, default=0.9, help="0 is greedy")
    parser.add_argument("--max-new", type=int, default=96, help="longest output, in tokens")
    parser.add_argument("--rows", type=int, default=32, help="batch size")


def run(args: argparse.Namespace) -> Report:
    """Decodes all prompts in every epoch with another seed; a line for each way to draft."""
    command.check_positive(args, "prompts", "epochs", "samples", "draft", "max_new", "rows")
    texts = command.read_texts(args)
    pair = load_pair(drafter=args.drafter, verifier=args.verifier)
    lines = []
    for drafting in args.drafting:
        decoder = Decoder(
            pair,
            drafting=drafting,
            max_draft=args.draft,
            sampling=Sampling(args.temperature),
            max_new_tokens=args.max_new,
            batch_size=args.rows,
        )
        line = {"drafting": drafting}
        for epoch in range(args.epochs):
            print(f"{drafting}, epoch {epoch + 1} ...", flush=True)
            info = decoder(texts, seed=epoch, num_samples=args.samples).info
            line[f"epoch {epoch + 1}"] = info.tokens_per_verifier_call
        lines.append(line)
    return Report(lines, list(lines[0]))


main = command.program(__file__, HELP, add_arguments, run)

if __name__ == "__main__":
    sys.exit(main())
