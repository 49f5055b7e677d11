"""Errors of commands: one line on stderr and an exit status."""

import contextlib
import errno
import os
import select
import sys
import tempfile
import traceback

from specjax.checks import one_line
from specjax.errors import UserError
from specjax.runs.processes import LostProcessError

BAD_INPUT, UNEXPECTED, BROKEN_PIPE = 2, 1, 141  # 128 + SIGPIPE, as in a shell
SOME_FAILED = 3  # the run is complete, but some settings failed


# The errors whose message is for users: their value, or the system's word on a file.
REFUSALS = (UserError, OSError)


def tell(command: str, error: Exception) -> int:
    """Prints one line about an error that ended a command; returns the exit status.

    Of a fault of specjax the traceback is written to a temporary file, which the line names.
    """
    program = f"specjax {command}".strip()
    if isinstance(error, BrokenPipeError) and _reader_has_gone():
        _give_up_stdout()
        return BROKEN_PIPE
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        # An error without a file name is about standard output.
        text = f"standard output cannot be written ({error.strerror}): redirect it elsewhere"
        print(f"{program}: {text}", file=sys.stderr)
        _give_up_stdout()
        return BAD_INPUT
    if isinstance(error, (*REFUSALS, LostProcessError)):
        print(f"{program}: {one_line(error)}", file=sys.stderr)
        # Another process failed: a restart may succeed.
        return UNEXPECTED if isinstance(error, LostProcessError) else BAD_INPUT
    text = f"{type(error).__name__}: {one_line(error)[:200]}"
    print(f"{program}: unexpected {text}; {_log(error)}", file=sys.stderr)
    return UNEXPECTED


def _give_up_stdout() -> None:
    # Otherwise Python reports the error again when it closes the stream.
    with contextlib.suppress(OSError):  # not a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _reader_has_gone() -> bool:
    try:
        stdout = sys.stdout.fileno()
    except OSError:  # not a file, as in a test
        return False
    poll = select.poll()
    poll.register(stdout, 0)  # only errors
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _log(error: Exception) -> str:
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="specjax-", suffix=".log", delete=False, encoding="utf-8", errors="replace"
        ) as file:
            traceback.print_exception(error, file=file)
    except OSError as failure:
        return f"the traceback could not be saved ({failure.strerror}): set SPECJAX_TRACEBACK=1"
    return f"the traceback is in {file.name}"
