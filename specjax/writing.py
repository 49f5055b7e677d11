"""Files and directories that are written whole or not at all."""

import contextlib
import errno
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import jax


@contextlib.contextmanager
def naming_failures(path: Path) -> Iterator[None]:
    """Turns what the system says of a failed write into one line that names the path.

    Args:
      path: what is being written, and all that the body does.

    Raises:
      OSError: the write failed.
    """
    with naming_full_disk(path):
        try:
            yield
        except OSError as error:
            # The others have a message of their own, or get one.
            if error.errno is None or _full_disk(error):
                raise
            raise _failure(path, error.strerror or str(error), "") from error


@contextlib.contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """Turns the errors of a full disk, and no others, into one line that names the path.

    Args:
      path: what is being written; the body may read other files.

    Raises:
      OSError: the write failed. The cause is what the library below raised: Orbax, TensorStore and
        NumPy each wrap the system's error in one of their own.
    """
    try:
        yield
    except Exception as error:
        reason = _full_disk(error)
        if reason is None:
            raise
        raise _failure(path, reason, "free some space, or ") from error


def _failure(path: Path, reason: str, remedy: str) -> OSError:
    return OSError(
        f"{path} cannot be written ({reason}): {remedy}choose another place; what was written "
        "before is kept"
    )


# What the system's errors are called in the texts of libraries that wrap them.
_TEXTS = (
    "No space left on device",
    "Disk quota exceeded",
    "File too large",
    "Read-only file system",
)


_NUMBERS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)


def _full_disk(error: BaseException | None) -> str | None:
    """The system's words for a full disk, or None for an error of another kind."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _NUMBERS:
            return error.strerror
        for text in _TEXTS:
            if text in str(error):
                return text
        hidden = None if error.__suppress_context__ else error.__context__
        error = error.__cause__ or hidden
    return None


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file such that it is complete or unchanged, even if the process is killed.

    Args:
      path: the file. Only one process may write it at a time.
      data: its new content.

    Raises:
      OSError: it cannot be written; it is then unchanged.
    """
    # Always the same name, so that a file left by a killed process is overwritten.
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with naming_failures(path):
            if unfinished.is_symlink():
                unfinished.unlink()  # else another's file would be overwritten
            with unfinished.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def check_free(path: Path) -> None:
    """Asserts that nothing would be overwritten.

    Args:
      path: where a directory shall be.

    Raises:
      FileExistsError: it is a file, or a directory with something in it.
      NotADirectoryError: one of its parents is a file. Missing parents are made in time.
    """
    if path.is_dir() and any(path.iterdir()):
        raise FileExistsError(f"{path} is not empty; give a new directory or empty it first")
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is a file; give a new directory")
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    if not existing.is_dir():
        raise NotADirectoryError(f"{existing} is a file; give a path that does not go through it")


class InUseError(OSError):
    """Another process has the lock."""


@contextlib.contextmanager
def locked(path: Path, in_use: str) -> Iterator[None]:
    """Holds a lock, which ends with the process; a file system without locks gets a warning.

    Args:
      path: the file of the lock, which is empty and is removed in the end. Its directory exists.
      in_use: the message for a lock that another process has.

    Raises:
      InUseError: another process has it.
      OSError: a file of its name is there that no lock has made.
    """
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        yield
        return
    while True:
        with _opened_lock(path) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InUseError(in_use) from None
            except OSError as error:
                print(
                    f"specjax: warning: the file system of {path.parent} has no locks "
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
            f"{path} cannot be locked ({error.strerror}): move it, or choose another directory"
        ) from None
    if os.fstat(file.fileno()).st_size:
        file.close()
        raise FileExistsError(
            f"{path} is not empty, so no run made it: move it, or choose another directory"
        )
    return file


@contextlib.contextmanager
def new_directory(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """A directory beside `path` that becomes `path` on a regular exit and vanishes on an error.

    Args:
      path: does not exist, or is an empty directory.
      replace: whether `path` may hold something, which is removed when the new one is complete. A
        process that is killed meanwhile leaves the one or the other at `path`, or the old one
        beside it, which the next call puts back.

    Yields:
      The directory to write into, an absolute path.

    Raises:
      FileExistsError: `path` may not be replaced and is a file, or a directory with something in
        it.
      InUseError: another process is writing it.
      NotADirectoryError: one of its parents is a file.
      OSError: it cannot be written.
    """
    # Of a link, what it leads to is replaced.
    path = path.resolve() if path.is_symlink() else path.absolute()
    partial, old, lock = (
        path.with_name(f".{path.name}.specjax-{what}") for what in ("partial", "old", "lock")
    )
    first = jax.process_index() == 0  # the others of one program write into the same directory
    if not replace:
        check_free(path)
    with contextlib.ExitStack() as stack:
        if first:
            with naming_failures(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            in_use = f"{path}: another process is writing it: wait for it, or choose another one"
            stack.enter_context(locked(lock, in_use))
        try:
            with naming_failures(path):
                if first:
                    if replace:
                        _put_back(path, old)
                    shutil.rmtree(partial, ignore_errors=True)  # of a killed process
                    partial.mkdir()
            _wait_for_all(f"{partial} made")
            with naming_full_disk(path):
                yield partial
            _wait_for_all(f"{partial} written")
            with naming_failures(path):
                if first:
                    _put(partial, path, old, replace=replace)
            _wait_for_all(f"{path} in place")
        except BaseException:
            if first:
                _remove(partial)
            raise


def _remove(path: Path) -> None:
    """Removes a directory into which other threads may still write for a moment."""
    for _ in range(50):
        shutil.rmtree(path, ignore_errors=True)
        time.sleep(0.1)
        if not path.exists():
            break  # a write of TensorStore that was under way would have made it again


def _put(partial: Path, path: Path, old: Path, *, replace: bool) -> None:
    if replace and path.is_dir():
        path.rename(old)
    elif path.is_dir():
        check_free(path)
        path.rmdir()
    partial.rename(path)
    shutil.rmtree(old, ignore_errors=True)


def _put_back(path: Path, old: Path) -> None:
    """Ends a replacement in which a process was killed."""
    if not old.exists():
        return
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
    else:
        old.rename(path)


def _wait_for_all(name: str) -> None:
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)
