"""The `specjax` command: `specjax COMMAND ...`.

A command is a module with `add_arguments(parser)` and `run(args) -> int`. It is imported only when
it is called. `args.command_line` holds the words of the whole command.
"""

import argparse
import importlib
import os
import sys
import warnings
from collections.abc import Sequence
from logging import LogRecord

import jax
from absl import logging

from specjax.cli import hosts
from specjax.cli.entry import INTERRUPTED
from specjax.cli.failures import tell
from specjax.cli.help_format import HelpFormatter
from specjax.runs.compilation_cache import count_compilations, enable_compilation_cache
from specjax.runs.environment import check_devices, specjax_version

# name -> (module, what it does)
COMMANDS = {
    "bench": (
        "specjax.cli.bench",
        "measure a pair of models; print a table and, as the last line, JSON",
    ),
    "convert": (
        "specjax.cli.convert",
        "convert a checkpoint between Hugging Face, T5X and specjax (Orbax) formats",
    ),
    "demo": (
        "specjax.cli.demo",
        "decode sample captions with the built-in pair, method by method; print a table",
    ),
    "evaluate": (
        "specjax.cli.evaluate",
        "score predictions against references, with intervals; compare methods",
    ),
    "infer": (
        "specjax.cli.infer",
        "decode a text, TSV or JSONL file with a pair of models (resumable)",
    ),
    "merge": (
        "specjax.cli.merge",
        "make one run of infer or sweep from the parts of several processes",
    ),
    "screen": (
        "specjax.cli.screen",
        "tell what hundreds of settings should bring, from one pass over texts",
    ),
    "sweep": (
        "specjax.cli.sweep",
        "measure methods, strengths and draft lengths; print table 2 and draw figures (resumable)",
    ),
    "train": (
        "specjax.cli.train",
        "train or fine-tune a model from aligned text, TSV, JSONL or a seqio task (resumable)",
    ),
    "train_bigram": (
        "specjax.cli.train_bigram",
        "count what follows each token in a text, for drafts that are looked up",
    ),
    "train_head": (
        "specjax.cli.train_head",
        "train the acceptance head of a pair's drafter, for adaptive draft lengths (resumable)",
    ),
    "tune": (
        "specjax.cli.tune",
        "find the fastest way to decode that meets a demand on quality, latency or divergence "
        "(resumable)",
    ),
    "tune_drafts": (
        "specjax.cli.tune_drafts",
        "choose how to draft for a verifier: a drafter, copies, a cascade, or not at all",
    ),
}
# A program that is compiled once is not worth keeping.
_WITHOUT_CACHE = ("convert", "evaluate", "merge", "train_bigram")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: the arguments after the program's name; the process's own by default.

    Returns:
      The exit status: 0 done, 2 bad input, 1 an unexpected error, 3 a sweep that is done but for
      points that failed, 130 interrupted; one line on stderr says what it was. If SPECJAX_TRACEBACK
      is set, errors come as Python shows them.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    args = _parse(argv)
    args.command_line = ["specjax", *argv]
    _tell_failed_writes_once()
    try:
        return _run(args)
    except Exception as error:
        together = getattr(getattr(args, "part", None), "together", False)
        if os.environ.get("SPECJAX_TRACEBACK") and not together:
            raise
        status = tell(args.command, error)
        if together:
            hosts.end(status)
        return status
    except KeyboardInterrupt:
        print(f"specjax {args.command}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _tell_failed_writes_once() -> None:
    """Orbax raises what fails in its threads, and also logs it; `main` tells of it in one line.

    After a write that failed it drops its other writes, and Python tells of each at the end.
    """
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    # absl's own, which must be there first.
    logging.get_absl_logger().addFilter(_raises_nothing)


def _raises_nothing(record: LogRecord) -> bool:
    return "_SignalingThread.run() raised" not in record.getMessage()


def _run(args: argparse.Namespace) -> int:
    if hasattr(args, "process_count"):
        args.part = hosts.start(args)
    check_devices()
    hosts.check_joined(args)
    announcement = ""
    if args.command not in _WITHOUT_CACHE:
        # The one place where the command changes JAX's global settings.
        directory = enable_compilation_cache()
        kept = f"; later runs read the programs from {directory}" if directory else ""
        announcement = f"specjax: compiling, which takes a while{kept}"
    with count_compilations(announcement):
        status = args.run(args)
        sys.stdout.flush()  # a failure is told here, not when Python ends
        return status


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    name = argv[0] if argv and argv[0] in COMMANDS else None
    parser = argparse.ArgumentParser(
        prog="specjax", description="Speculative decoding and model cascades in JAX"
    )
    version = f"specjax {specjax_version() or '(not installed)'}, jax {jax.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command, (module_name, what) in COMMANDS.items():
        sub = commands.add_parser(
            command, help=what, description=what, formatter_class=HelpFormatter
        )
        if name == command:
            module = importlib.import_module(module_name)
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    # --gin.NAME=value cannot be declared to argparse, because NAME is open.
    short = "--gin."
    return parser.parse_args(
        [f"--gin_bindings={a.removeprefix(short)}" if a.startswith(short) else a for a in argv]
    )


if __name__ == "__main__":
    sys.exit(main())
