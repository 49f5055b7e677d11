"""The arguments, the pair and the prompts that the benchmarks of pairs share."""

import argparse
import dataclasses
from typing import Any

import numpy as np

from specjax import testing
from specjax.data.examples import guess_format, read_examples
from specjax.errors import UserError
from specjax.models import LlamaConfig, T5Config
from specjax.text import Pair, TextModel, load_pair
from specjax.text import requests as prompts_lib
from specjax.text.engine import BUCKETS

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


def read_texts(args: argparse.Namespace) -> list[str]:
    """Returns the first `--prompts` texts of `--inputs`."""
    if guess_format(args.inputs) == "tsv":
        raise UserError(
            f"--inputs={args.inputs} has columns, but must have one prompt per line: write the "
            "prompts' column into a .txt file"
        )
    return [example.inputs for example in read_examples(args.inputs)][: args.prompts]


def encode_texts(args: argparse.Namespace, texts: list[str], tokenizer: Any) -> list[np.ndarray]:
    """Returns the tokens of the texts; an error names a text that is empty or too long."""
    prompts = []
    for i, text in enumerate(texts):
        name = f"{args.inputs}, prompt {i + 1}"
        prompts.append(prompts_lib.encode(text, name, tokenizer.vocab_size, tokenizer))
        if len(prompts[-1]) > BUCKETS[-1]:
            raise UserError(
                f"{name} has {len(prompts[-1])} tokens, more than {BUCKETS[-1]}: leave it out"
            )
    return prompts


def check_positive(args: argparse.Namespace, *names: str) -> None:
    """Raises UserError unless these numbers, or lists of numbers, are in 1 .. 2**31 - 1."""
    for name in names:
        value = getattr(args, name)
        values = value if isinstance(value, list) else [value]
        if min(values, default=1) < 1:
            raise UserError(f"--{name.replace('_', '-')} must be at least 1, got {value}")
        if max(values, default=1) >= 2**31:
            raise UserError(f"--{name.replace('_', '-')} must be below {2**31}, got {value}")


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
    check_positive(args, "rows", "prompts", "max_new", "repeats")
    texts = enough_texts(args)
    pair = load_pair(drafter=args.drafter, verifier=args.verifier)
    tokens = encode_texts(args, texts, pair.verifier.tokenizer)
    return (Pair(pair.drafter, grown(pair.verifier)) if args.grown else pair), tokens


def enough_texts(args: argparse.Namespace) -> list[str]:
    """Returns the texts of `read_texts`, which must fill a batch."""
    texts = read_texts(args)
    if len(texts) < max(args.rows):
        raise UserError(
            f"{args.inputs} has {len(texts)} prompts, but a batch needs {max(args.rows)}: add "
            "lines or give a smaller --rows"
        )
    return texts


def grown(verifier: TextModel) -> TextModel:
    """Returns a larger network with the same outputs, which takes more time."""
    if not isinstance(getattr(verifier.model, "config", None), T5Config | LlamaConfig):
        raise UserError(
            f"{verifier.name} is neither a T5 nor a Llama, which --grown needs: leave out --grown"
        )
    model, params = testing.grow(verifier.model, verifier.params)
    return dataclasses.replace(verifier, model=model, params=params)
