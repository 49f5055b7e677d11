"""What C++ libraries print in a process of a JAX program.

If another process is lost, XLA prints a stack of 21 lines and ends this process, before any Python
code runs. So a small process, this file, reads these lines and writes one line instead.
"""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterable

# The part of a message by which this process finds that Python has reported the loss.
LOST = "lost another process"
REMEDY = "read its error, and start all processes again; finished rows are kept"

# Messages of XLA after which it ends the process.
_FATAL = (
    b"Polled an error from coordination service",
    b"Use error polling to propagate the following error",
    b"the JAX distributed service detected fatal errors",
)

_filters: list[subprocess.Popen] = []


def filter_native_output(program: str) -> None:
    """Filters what C++ code writes to stderr, and drops what it writes to stdout (gloo's messages).

    Python's own `sys.stdout` and `sys.stderr` are not changed. With SPECJAX_TRACEBACK nothing is
    filtered.

    Args:
      program: the name before the message, such as "specjax infer".
    """
    if _filters or os.environ.get("SPECJAX_TRACEBACK"):
        return
    sys.stdout.flush()
    sys.stderr.flush()
    # A session of its own: Ctrl-C, or the end of a launcher's process group, reaches it as the end
    # of its input.
    command = [sys.executable, "-I", "-S", __file__, program]
    child = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
    )
    assert child.stdin is not None
    _filters.append(child)
    sys.stdout, sys.stderr = (
        os.fdopen(os.dup(fd), "w", 1 if fd == 2 or stream.isatty() else -1, stream.encoding,
                  stream.errors)
        for fd, stream in ((1, sys.stdout), (2, sys.stderr))
    )  # fmt: skip
    os.dup2(child.stdin.fileno(), 2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)


def tell_lost(text: str) -> None:
    """Prints the line about a lost process; XLA may be printing its own at the same time."""
    if _filters:
        with contextlib.suppress(OSError):  # nobody reads
            os.write(2, f"{text}\n".encode())
    else:
        print(text, file=sys.stderr)


def filtered(lines: Iterable[bytes], program: str) -> Iterable[bytes]:
    """The lines for the user.

    Args:
      lines: what C++ code wrote, and the line of `tell_lost`.
      program: see `filter_native_output`.

    Returns:
      The lines of specjax; and other lines before the first about a lost process, in whose place
      is one line of ours.
    """
    told = False
    for line in lines:
        if line.startswith(b"specjax"):
            if not (told and LOST.encode() in line):
                yield line
            told = True
        elif any(words in line for words in _FATAL):
            if not told:  # at once: this process may be ended before its input ends
                yield f"{program}: {LOST} of this program: {REMEDY}\n".encode()
            told = True
        elif not told:
            yield line


if __name__ == "__main__":
    for own in filtered(sys.stdin.buffer, sys.argv[1]):
        sys.stderr.buffer.write(own)
        sys.stderr.buffer.flush()
