"""What benchmarks share: the program, the pair and its prompts, the timing of short calls."""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from benchmarks.grown import grow
from specjax.cli import bench
from specjax.cli.bench import check_positive, encode_texts, enough_texts, read_texts
from specjax.cli.help_format import HelpFormatter
from specjax.cli.report import Report
from specjax.errors import UserError
from specjax.models import LlamaConfig, T5Config
from specjax.study.measure import take_turns, time_call
from specjax.text import Pair, TextModel

__all__ = ["check_positive", "encode_texts", "enough_texts", "read_texts"]

K = TypeVar("K", bound=Hashable)
GROWN_HELP = "grow the verifier to the size of T5 base (a Llama to 200 M parameters); same outputs"


def program(
    file: str,
    about: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], Report],
) -> Callable[..., int]:
    """The main function of `python -m benchmarks.NAME`, where `file` is the benchmark's `__file__`.

    It parses its arguments (by default the process's own), measures, and prints a table and, as the
    last line, JSON. It returns the exit status: 0 done, 2 bad input (a line on stderr names it).
    """
    name = Path(file).stem

    def main(argv: Sequence[str] | None = None) -> int:
        parser = argparse.ArgumentParser(
            prog=f"benchmarks.{name}", description=about, formatter_class=HelpFormatter
        )
        add_arguments(parser)
        try:
            report = run(parser.parse_args(argv))
        except (ValueError, OSError) as error:
            print(f"benchmarks.{name}: {error}", file=sys.stderr)
            return 2
        report.show(name)
        return 0

    return main


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


def add_workload(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Adds the arguments for the pair, its prompts and the sizes."""
    add_pair(parser, required=required)
    parser.add_argument("--prompts", type=int, default=64, help="number of prompts")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16], help="batch sizes B")
    add_temperatures(parser)
    parser.add_argument("--max-new", type=int, default=64, help="longest output, in tokens")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of each setting")
    parser.add_argument("--grown", action="store_true", help=GROWN_HELP)


def load(
    args: argparse.Namespace, weights: Any = None, dtype: Any = None
) -> tuple[Pair, list[np.ndarray]]:
    """Loads the pair and the tokens of the prompts; `weights` and `dtype` as for `load_pair`."""
    pair, tokens = bench.load(args, weights=weights, dtype=dtype)
    return (Pair(pair.drafter, grown(pair.verifier)) if args.grown else pair), tokens


def grown(verifier: TextModel) -> TextModel:
    """Returns a larger network with the same outputs, which takes more time."""
    if not isinstance(getattr(verifier.model, "config", None), T5Config | LlamaConfig):
        raise UserError(
            f"{verifier.name} is neither a T5 nor a Llama, which --grown needs: leave out --grown"
        )
    model, params = grow(verifier.model, verifier.params)
    return dataclasses.replace(verifier, model=model, params=params)


def time_interleaved(
    calls: Mapping[K, Callable[[], Any]], *, repeats: int = 7, min_seconds: float = 0.02
) -> dict[K, float]:
    """The median seconds of each call, in turns, so that noise of the machine affects all equally.

    The timing waits for the arrays that a call returns; a turn repeats it for about `min_seconds`.
    Compilation happens before and is not counted.
    """

    def side(call: Callable[[], Any]) -> Callable[[None], float]:
        def several() -> Any:
            for _ in range(count):
                found = call()
            return jax.block_until_ready(found)

        jax.block_until_ready(call())
        once, _ = time_call(lambda: jax.block_until_ready(call()))
        count = max(1, int(min_seconds / max(once, 1e-9)))
        return lambda _: time_call(several)[0] / count

    seconds: dict[K, list[float]] = {name: [] for name in calls}
    sides = {name: side(call) for name, call in calls.items()}
    for name, _, _, spent in take_turns(sides, [None], repeats):
        seconds[name].append(spent)
    return {name: statistics.median(values) for name, values in seconds.items()}
