"""The `specjax` command."""

import sys

# The exit statuses of a command that has failed. In the last the run is complete, but some settings
# failed. BROKEN_PIPE is 128 + SIGPIPE, as in a shell.
BAD_INPUT, UNEXPECTED, INTERRUPTED, BROKEN_PIPE, SOME_FAILED = 2, 1, 130, 141, 3


def print_data(line: str) -> None:
    """Prints a line of JSON below a table for programs: not on a terminal."""
    if not sys.stdout.isatty():
        print(line)
