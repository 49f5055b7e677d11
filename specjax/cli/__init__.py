"""The `specjax` command."""

import sys

# The exit status of an interrupted command.
INTERRUPTED = 130


def print_data(line: str) -> None:
    """Prints a line of JSON below a table for programs: not on a terminal."""
    if not sys.stdout.isatty():
        print(line)
