"""The lock of a directory in which one process works at a time."""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

_LOCK_NAME = ".specjax.lock"


class InUseError(OSError):
    """Another process has the lock."""


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Locks a directory, so that no second process works in it; the lock ends with the process.

    Args:
      directory: exists, and can be written.

    Raises:
      InUseError: another process has the lock.
      OSError: a file of its name that no run made is there.
    """
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        yield
        return
    path = directory / _LOCK_NAME
    while True:
        with _opened_lock(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InUseError(
                    f"output_dir={directory}: another process is at work in it: wait for it, or "
                    "choose another directory"
                ) from None
            except OSError as error:
                print(
                    f"specjax: warning: the file system of {directory} has no locks "
                    f"({error.strerror}): do not start a second process in this directory",
                    file=sys.stderr,
                )
            # The process that had the lock removes the file: lock the one that is there now.
            try:
                if not os.path.samestat(os.fstat(file.fileno()), path.stat()):
                    continue
            except FileNotFoundError:
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _opened_lock(path: Path) -> IO[bytes]:
    """Opens the lock, which is an empty file; another's file of this name stays as it is."""
    try:
        file = os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b")
    except OSError as error:
        raise OSError(
            f"{path} cannot be locked ({error.strerror}): move it, or choose another output_dir"
        ) from None
    if os.fstat(file.fileno()).st_size:
        file.close()
        raise FileExistsError(
            f"{path} is not empty, so no run made it: move it, or choose another output_dir"
        )
    return file
