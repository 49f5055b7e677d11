"""Runs a benchmark as a program: `python -m benchmarks.NAME`."""

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from specjax.cli.help_format import HelpFormatter
from specjax.cli.report import Report


def main(
    file: str,
    about: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    run: Callable[[argparse.Namespace], Report],
    argv: Sequence[str] | None = None,
) -> int:
    """Parses the arguments, measures, and prints a table and, as the last line, JSON.

    Args:
      file: the benchmark's `__file__`, for its name.
      about: one line for `--help`.
      add_arguments: adds the benchmark's arguments.
      run: the measurement.
      argv: the arguments; the process's own by default.

    Returns:
      The exit status: 0 done, 2 bad input (a line on stderr names it).
    """
    name = Path(file).stem
    parser = argparse.ArgumentParser(
        prog=f"benchmarks.{name}",
        description=about,
        formatter_class=HelpFormatter,
    )
    add_arguments(parser)
    try:
        report = run(parser.parse_args(argv))
    except (ValueError, OSError) as error:
        print(f"benchmarks.{name}: {error}", file=sys.stderr)
        return 2
    report.show(name)
    return 0
