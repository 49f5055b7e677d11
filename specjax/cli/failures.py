"""How a command that failed ends: one line on stderr, and a status that says what kind it was."""

import contextlib
import errno
import os
import select
import sys
import tempfile
import traceback
from pathlib import Path

from specjax.runs.processes import LostProcessError

_PACKAGE = str(Path(__file__).parents[1])
BAD_INPUT, UNEXPECTED, BROKEN_PIPE = 2, 1, 141  # 128 + SIGPIPE, as a shell says it
SOME_FAILED = 3  # the run is whole, but for points that another start would fail, too


def is_refusal(error: BaseException) -> bool:
    """Whether a `raise` statement of specjax made an error, which then says what to do.

    Its type cannot tell: a ValueError of NumPy's, or a KeyError of a dict, is an accident.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, AssertionError) or not frames:
        return False
    made_at = frames[-1]
    return made_at.filename.startswith(_PACKAGE) and (made_at.line or "").startswith("raise")


def one_line(error: BaseException) -> str:
    """The words of an error without line breaks, and without gin's notes on where it was."""
    return " ".join(str(error).split("\n  In ")[0].split())


def tell(command: str, error: Exception) -> int:
    """Prints one line about an error that ended a command.

    Args:
      command: its name.
      error: a refusal of specjax, or anything else. Of anything else the traceback is written to a
        file in the directory for temporary files, and the line names it.

    Returns:
      The exit status: 2 for a refusal (bad input), 1 for an unexpected error, 141 where the reader
      of the output has gone.
    """
    if isinstance(error, BrokenPipeError) and _reader_has_gone():
        _give_up_stdout()
        return BROKEN_PIPE
    if isinstance(error, OSError) and error.errno == errno.ENOSPC and error.filename is None:
        # All files are named where they are written.
        told = f"standard output cannot be written ({error.strerror}): choose another place for it"
        print(f"specjax {command}: {told}", file=sys.stderr)
        _give_up_stdout()
        return BAD_INPUT
    if isinstance(error, LostProcessError):  # not this process's fault: it may be started again
        print(f"specjax {command}: {one_line(error)}", file=sys.stderr)
        return UNEXPECTED
    if is_refusal(error):
        print(f"specjax {command}: {one_line(error)}", file=sys.stderr)
        return BAD_INPUT
    told = f"{type(error).__name__}: {one_line(error)[:200]}"
    log = _log(error)
    print(f"specjax {command}: unexpected {told}; {log}", file=sys.stderr)
    return UNEXPECTED


def _give_up_stdout() -> None:
    # Else Python complains again when it closes the stream.
    with contextlib.suppress(OSError):  # it is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _reader_has_gone() -> bool:
    try:
        stdout = sys.stdout.fileno()
    except OSError:  # it is no file, as under a test
        return False
    poll = select.poll()
    poll.register(stdout, 0)  # errors alone
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _log(error: Exception) -> str:
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="specjax-", suffix=".log", delete=False, encoding="utf-8", errors="replace"
        ) as file:
            traceback.print_exception(error, file=file)
    except OSError as failure:
        return f"its traceback could not be saved ({failure.strerror}): set SPECJAX_TRACEBACK=1"
    return f"its traceback is in {file.name}"
