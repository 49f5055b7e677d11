"""The `specjax` command: `specjax COMMAND ...`.

A command is a module with `add_arguments(parser)` and `run(args) -> int`. It is imported only when
it is called, so that `specjax --help` starts at once.
"""

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

# name -> (module, what it does)
COMMANDS = {
    "bench": (
        "specjax.cli.bench",
        "measure one part of specjax; prints a table and, last, one line of JSON",
    ),
    "convert": (
        "specjax.cli.convert",
        "convert a checkpoint between Hugging Face, T5X and specjax (Orbax) formats",
    ),
    "demo": (
        "specjax.cli.demo",
        "the built-in pair on its sample captions: methods side by side, a table and a plot",
    ),
    "infer": (
        "specjax.cli.infer",
        "decode a text, TSV or JSONL file with a pair of models (resumable)",
    ),
    "train": (
        "specjax.cli.train",
        "train or fine-tune a T5 from aligned text, TSV, JSONL or a seqio task (resumable)",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
      argv: the arguments after the program's name; the process's own by default.

    Returns:
      The exit status: 0 done, 2 bad input (told on stderr in one line; a traceback as well if
      SPECJAX_TRACEBACK is set), 130 interrupted.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    name = argv[0] if argv and argv[0] in COMMANDS else None
    parser = argparse.ArgumentParser(
        prog="specjax", description="Speculative decoding and model cascades in JAX"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command, (module_name, what) in COMMANDS.items():
        sub = commands.add_parser(
            command,
            help=what,
            description=what,
            formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        )
        if name == command:
            module = importlib.import_module(module_name)
            module.add_arguments(sub)
            sub.set_defaults(run=module.run)
    # --gin.NAME=value cannot be declared to argparse, for NAME is open.
    short = "--gin."
    argv = [f"--gin_binding={a.removeprefix(short)}" if a.startswith(short) else a for a in argv]
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except (ValueError, OSError) as error:
        if os.environ.get("SPECJAX_TRACEBACK"):
            raise
        print(f"specjax {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"specjax {args.command}: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
