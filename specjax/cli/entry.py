"""The process of the `specjax` command: what surrounds `main` from its first moment to its last.

Nothing here imports JAX before the handlers are in place.
"""

import os
import signal
import socket
import sys
import threading
import warnings
from typing import NoReturn

from specjax.cli import INTERRUPTED


def run() -> NoReturn:
    """Runs the command and ends the process.

    Ctrl-C ends it at any moment with one line and the status 130, also while XLA compiles: what is
    on disk is what a killed process leaves, which the next start continues.
    """
    _end_on_interrupt()
    try:
        # JAX reads its environment variables when it is imported.
        from specjax.cli.main import main
    except ValueError as error:
        print(f"specjax: {error}: correct or unset the environment variable", file=sys.stderr)
        sys.exit(2)
    # One line a warning: where in specjax it was raised tells a user nothing.
    warnings.formatwarning = lambda message, *_, **__: f"specjax: warning: {message}\n"
    status = main()
    # All is done: else Python's end would meet the signal without a handler.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(status)


def _end_on_interrupt() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts background jobs
        return
    # Python runs a handler only between two of its instructions, and what that raises is lost in a
    # callback, or crashes a library that is starting. So a thread waits for the signal.
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, lambda *_: None)

    def wait() -> None:
        with writing:  # keeps it open
            while reading.recv(1)[0] != signal.SIGINT:
                pass
        try:
            flush = threading.Thread(target=sys.stdout.flush, daemon=True)
            flush.start()
            flush.join(0.5)
            os.write(2, b"\nspecjax: interrupted\n")  # nothing may be told after it
        finally:  # also if the reader of stderr, such as `tee`, has gone by the same Ctrl-C
            os._exit(INTERRUPTED)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    run()
