"""Files and directories that are written completely or not at all, and their checksums."""

import concurrent.futures
import contextlib
import errno
import filecmp
import functools
import hashlib
import itertools
import json
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import jax


@contextlib.contextmanager
def naming_failures(path: Path) -> Iterator[None]:
    """Turns the system's errors of a failed write of `path` into one line; the body only writes."""
    with naming_full_disk(path):
        try:
            yield
        except OSError as error:
            # Errors without a number have a message of specjax; `naming_full_disk` names the rest.
            if error.errno is None or _full_disk(error):
                raise
            raise _failure(path, error.strerror or str(error), "") from error


@contextlib.contextmanager
def naming_full_disk(path: Path) -> Iterator[None]:
    """Turns only the errors of a full disk into one line; the body may read other files.

    Orbax, TensorStore and NumPy wrap the system's error.
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
        f"{path} cannot be written ({reason}): {remedy}choose another directory; earlier files are "
        "kept"
    )


# The system's messages, also in those of libraries that wrap its errors.
_FULL = [os.strerror(number) for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)]


def _full_disk(error: BaseException | None) -> str | None:
    """The system's message for a full disk, or None for other errors."""
    while error is not None:
        if found := [text for text in _FULL if text in str(error)]:
            return found[0]
        hidden = None if error.__suppress_context__ else error.__context__
        error = error.__cause__ or hidden
    return None


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file completely or not at all, even if the process is killed.

    Only one process may write it at a time.
    """
    # A fixed name, so that the file of a killed process is replaced.
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with naming_failures(path):
            # Do not write into a link's target, another name's file or a pipe.
            unfinished.unlink(missing_ok=True)
            with unfinished.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(unfinished, path)
    except OSError:
        with contextlib.suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise


def append(path: Path, data: bytes) -> None:
    """Adds to the end of a file; one that has a second name, as `cp -al` makes, is copied first."""
    with naming_failures(path):
        if path.exists() and path.stat().st_nlink > 1:
            write_atomically(path, path.read_bytes())
        with path.open("ab") as file:
            file.write(data)


def read_regular(path: Path) -> bytes:
    """Returns the content of a regular file; opening a pipe or a device would block."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is not a regular file: restore or move it")
    with open(descriptor, "rb") as file:
        return file.read()


def check_free(path: Path) -> None:
    """Checks that a new directory, whose parents may be missing, would overwrite nothing."""
    if path.is_dir() and any(path.iterdir()):
        raise FileExistsError(f"{path} is not empty: give a new directory, or empty it first")
    if path.exists() and not path.is_dir():
        raise FileExistsError(f"{path} is a file: give a new directory")
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    if not existing.is_dir():
        raise NotADirectoryError(f"{existing} is a file: give a path in a directory")


@contextlib.contextmanager
def locked(path: Path, in_use: str) -> Iterator[None]:
    """Holds a lock, which ends with the process; warns if the file system has no locks.

    The file of the lock is empty, and is removed at the end. `in_use` is the message if another
    process has the lock.
    """
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        yield
        return
    while True:
        try:
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            raise _not_a_lock(path, error.strerror) from None
        with os.fdopen(lock):
            if os.fstat(lock).st_size:
                raise _not_a_lock(path, "it is not empty")
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise OSError(in_use) from None
            except OSError as error:
                print(
                    f"specjax: warning: the file system of {path.parent} has no locks "
                    f"({error.strerror}): do not start a second process in this directory",
                    file=sys.stderr,
                )
            if not os.fstat(lock).st_nlink:  # the previous process has removed the file
                continue
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def _not_a_lock(path: Path, reason: str | None) -> OSError:
    return OSError(f"{path} cannot be locked ({reason}): move it, or choose another directory")


_TEMPORARY, _HELD = "specjax-", ".specjax-held"


@functools.cache
def _remove_left() -> None:
    for left in Path(tempfile.gettempdir()).glob(f"{_TEMPORARY}*/{_HELD}"):
        with contextlib.suppress(OSError):
            if left.parent.lstat().st_uid == os.getuid():
                with left.open("rb") as lock:
                    if _lock(lock):
                        shutil.rmtree(left.parent, ignore_errors=True)


@contextlib.contextmanager
def temporary_directory() -> Iterator[Path]:
    """A temporary directory; the next process that makes one removes it if this one was killed."""
    _remove_left()
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY) as name:
        place = Path(name, "files")  # without the lock
        place.mkdir(0o700)
        with Path(name, f"{_HELD}.new").open("wb") as lock:
            if _lock(lock):  # until this process ends, however it does
                os.rename(lock.name, Path(name, _HELD))
            yield place


def _lock(file: IO[bytes]) -> bool:
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (ImportError, OSError):  # not a POSIX system, no locks, or another process has it
        return False
    return True


def set_aside(path: Path) -> Path:
    """Renames a file or directory to a free name, such as `model.earlier-1`, which is returned."""
    names = (path.with_name(f"{path.name}.earlier-{i}") for i in itertools.count(1))
    place = next(name for name in names if not os.path.lexists(name))
    path.rename(place)
    return place


@contextlib.contextmanager
def new_directory(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """An absolute directory beside `path` that becomes `path` on success.

    On an error it is removed. `path` does not exist, or is an empty directory, but with `replace`:
    a directory that has all files of the new one stays as it is, and any other is set aside, with a
    warning. If the process is killed, `path` is the old or the new directory, or does not exist.
    """
    # Replaces the target of a link.
    path = path.resolve() if path.is_symlink() else path.absolute()
    partial, lock = (path.with_name(f".{path.name}.specjax-{what}") for what in ("partial", "lock"))
    first = jax.process_index() == 0  # all processes of a program write into the same directory
    if not replace:
        check_free(path)
    with contextlib.ExitStack() as stack:
        if first:
            with naming_failures(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            in_use = f"another process is writing {path}: wait for it, or choose another directory"
            stack.enter_context(locked(lock, in_use))
        try:
            with naming_failures(path):
                if first:
                    shutil.rmtree(partial, ignore_errors=True)
                    partial.mkdir()
            _wait_for_all(f"{partial} made")
            with naming_full_disk(path):
                yield partial
            _wait_for_all(f"{partial} written")
            with naming_failures(path):
                if first and path.is_dir() and _has_all_of(path, partial):
                    shutil.rmtree(partial)
                elif first:
                    with contextlib.suppress(OSError):  # absent, or not empty
                        path.rmdir()
                    if path.exists():
                        place = set_aside(path)
                        print(
                            f"specjax: warning: {path} is new; what was there is now {place}: "
                            "delete it if you do not need it",
                            file=sys.stderr,
                        )
                    partial.rename(path)
            _wait_for_all(f"{path} in place")
        except BaseException:
            for _ in range(50 if first else 0):
                # Threads of TensorStore may still write to it for a moment.
                shutil.rmtree(partial, ignore_errors=True)
                time.sleep(0.1)
                if not partial.exists():
                    break
            raise


def _has_all_of(old: Path, new: Path) -> bool:
    pairs = ((old / path.relative_to(new), path) for path in new.rglob("*") if path.is_file())
    return all(mine.is_file() and filecmp.cmp(mine, path, shallow=False) for mine, path in pairs)


def _wait_for_all(name: str) -> None:
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        multihost_utils.sync_global_devices(name)


CHECKSUMS_NAME = "specjax_checksums.json"


def write_checksums(
    directory: Path,
    wanted: Callable[[str], bool] = lambda _: True,
    *,
    owner: Mapping[str, Any] | None = None,
) -> None:
    """Writes the checksums of all files below a directory.

    `wanted` says whether a file counts, by its path relative to the directory. `owner` has JSON
    values that `find_damage` compares, such as the run's fingerprint.
    """
    names = sorted(
        path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()
    )
    names = [name for name in names if name != CHECKSUMS_NAME and wanted(name)]
    with _threads() as threads:
        sums = dict(zip(names, threads.map(lambda n: _sha256(directory / n), names), strict=True))
    values = {"algorithm": "sha256", "files": sums, **({"owner": owner} if owner else {})}
    write_atomically(directory / CHECKSUMS_NAME, (json.dumps(values, indent=1) + "\n").encode())


def find_damage(directory: Path, *, owner: Mapping[str, Any] | None = None) -> str | None:
    """Describes the first difference from the checksums; None if there is no difference."""
    try:
        sums, theirs = _read_checksums(directory)
    except (OSError, ValueError):
        return f"{CHECKSUMS_NAME} cannot be read"
    if owner is not None and theirs != owner:
        return f"{CHECKSUMS_NAME} is of another run or step"
    files = [(name, directory / name, expected) for name, expected in sums.items()]
    with _threads() as threads:
        differences = threads.map(lambda file: _difference(*file), files)
        return next(filter(None, differences), None)


def remove_proven(directory: Path, *, owner: Mapping[str, Any]) -> None:
    """Removes the files that an owner's checksums prove, and directories that are then empty."""
    if directory.is_symlink() or not directory.is_dir():
        return
    sums: dict[str, str] = {}
    with contextlib.suppress(OSError, ValueError):
        sums, theirs = _read_checksums(directory)
        sums = sums if theirs == owner else {}

    def remove(path: Path) -> None:
        name = path.relative_to(directory).as_posix()  # names of the checksums might lead elsewhere
        if name in sums and _difference(name, path, sums[name]) is None:
            with contextlib.suppress(OSError):
                path.unlink()

    paths = [path for path in sorted(directory.rglob("*"), reverse=True) if not path.is_symlink()]
    with _threads() as threads:
        list(threads.map(remove, paths))
    if sums:  # last: if the process is killed, the next call goes on
        (directory / CHECKSUMS_NAME).unlink(missing_ok=True)
    for path in [*filter(Path.is_dir, paths), directory]:
        with contextlib.suppress(OSError):  # such as: not empty
            path.rmdir()


def _read_checksums(directory: Path) -> tuple[dict[str, str], Any]:
    try:
        values = json.loads(read_regular(directory / CHECKSUMS_NAME))
        sums = {str(name): str(expected) for name, expected in values["files"].items()}
        return sums, values.get("owner")
    except (LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(str(error)) from None


def _difference(name: str, path: Path, expected: str) -> str | None:
    try:
        if not path.is_file():  # opening a pipe would block
            return f"{name} is not a file"
        actual = _sha256(path)
    except OSError as error:
        return f"{name} cannot be read ({error.strerror})"
    return None if actual == expected else f"{name} was changed after specjax wrote it"


def _threads() -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(8)  # hashing releases Python's lock


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
