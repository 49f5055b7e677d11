"""The arguments, the pair and the prompts that the benchmarks of pairs share."""

import argparse
import dataclasses

import numpy as np

from benchmarks.grown import grow
from specjax.cli import bench
from specjax.cli.bench import check_positive, encode_texts, enough_texts, read_texts
from specjax.errors import UserError
from specjax.models import LlamaConfig, T5Config
from specjax.text import Pair, TextModel

__all__ = ["check_positive", "encode_texts", "enough_texts", "read_texts"]

GROWN_HELP = "grow the verifier to the size of T5 base (a Llama to 200 M parameters); same outputs"


def add_pair(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Adds the arguments for the pair and its prompts."""
    parser.add_argument("--drafter", help="the drafter's directory (default: built-in)")
    parser.add_argument("--verifier", help="the verifier's directory (default: built-in)")
    parser.add_argument("--inputs", required=required, help="a text file, one prompt per line")


def add_temperatures(parser: argparse.ArgumentParser) -> None:
    """Adds the temperatures."""
    parser.add_argument(
        "--temperatures",
        type=float,
        nargs="+",
        default=[0.0, 1.0],
        help="temperatures to measure; 0 is greedy",
    )


def add_workload(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments for the pair, its prompts and the sizes."""
    add_pair(parser)
    parser.add_argument("--prompts", type=int, default=64, help="number of prompts")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16], help="batch sizes B")
    add_temperatures(parser)
    parser.add_argument("--max-new", type=int, default=64, help="longest output, in tokens")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each setting")
    parser.add_argument("--grown", action="store_true", help=GROWN_HELP)


def load(args: argparse.Namespace) -> tuple[Pair, list[np.ndarray]]:
    """Loads the pair and the tokens of the prompts."""
    pair, tokens = bench.load(args)
    return (Pair(pair.drafter, grown(pair.verifier)) if args.grown else pair), tokens


def grown(verifier: TextModel) -> TextModel:
    """Returns a larger network with the same outputs, which takes more time."""
    if not isinstance(getattr(verifier.model, "config", None), T5Config | LlamaConfig):
        raise UserError(
            f"{verifier.name} is neither a T5 nor a Llama, which --grown needs: leave out --grown"
        )
    model, params = grow(verifier.model, verifier.params)
    return dataclasses.replace(verifier, model=model, params=params)
