"""The entry point of the `specjax` command: handles Ctrl-C and warnings around `main`.

Until the handlers are installed, this module imports only small modules of Python, so that Ctrl-C
meets no import of ours.
"""

import os
import signal
import sys

from specjax.cli import INTERRUPTED


def run() -> None:
    """Runs the command and ends the process.

    Ctrl-C ends it at any moment, also while XLA compiles, with one line and the status 130. A run
    can then be continued like after a kill.
    """
    _end_on_interrupt()
    import warnings

    # XLA's alarms about slow compilations; what specjax says of them is enough. Errors are raised.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    try:
        # JAX reads its environment variables when it is imported.
        from specjax.cli.main import main
    except ValueError as error:
        print(f"specjax: {error}: correct or unset this environment variable", file=sys.stderr)
        sys.exit(2)
    # One line for each warning, without the line of code.
    warnings.formatwarning = lambda message, *_, **__: f"specjax: warning: {message}\n"
    try:
        status = main()
    finally:  # --help exits
        # Python removes its handlers while it exits; a late Ctrl-C must not change the status.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(status)


def _end_on_interrupt() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a background job of a shell
        return
    # During the next imports Ctrl-C ends the process without a line.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    import socket
    import threading

    # Python runs a handler only between two bytecodes, and a callback would swallow its exception.
    # So a thread waits for the signal.
    reading, writing = socket.socketpair()
    writing.setblocking(False)
    signal.set_wakeup_fd(writing.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGINT, lambda *_: None)

    def wait() -> None:
        with writing:  # keeps the socket open
            while reading.recv(1)[0] != signal.SIGINT:
                pass
        try:
            flush = threading.Thread(target=sys.stdout.flush, daemon=True)
            flush.start()
            flush.join(0.5)
            os.write(2, b"\nspecjax: interrupted\n")  # the last output
        finally:  # also if Ctrl-C has ended the reader of stderr, such as `tee`
            os._exit(INTERRUPTED)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    run()
