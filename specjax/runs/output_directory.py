"""Output directories: each has one configuration, and one process at a time works in it."""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from specjax.checks import check_path


def write_atomically(path: Path, data: bytes) -> None:
    """Writes a file such that it is complete or unchanged, even if the process is killed.

    Args:
      path: the file. Only one process may write it at a time (see `locked`).
      data: its new content.

    Raises:
      OSError: it cannot be written; it is then unchanged.
    """
    # Always the same name, so that a file left by a killed process is overwritten.
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        with unfinished.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise OSError(
            f"{path} cannot be written ({error.strerror}): free some space or repair the disk"
        ) from None


def make_writable(path: str | os.PathLike[str]) -> Path:
    """Creates an output directory, and checks that files can be written there.

    Args:
      path: the directory; missing parents are created too.

    Returns:
      Its absolute path.

    Raises:
      OSError: it cannot be created or written.
      TypeError: `path` is not a path.
      ValueError: `path` is empty.
    """
    check_path(path, "output_dir=")
    if not os.fspath(path):  # an empty path would mean the working directory
        raise ValueError("output_dir is empty: give a directory")
    directory = Path(path).expanduser().absolute()  # shells do not expand --name=~/directory
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"output_dir={directory} is a file: choose a directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Only an attempt shows whether it can be written: root passes every permission check.
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise OSError(
            f"output_dir={directory} cannot be written ({error.strerror}): choose another one"
        ) from None
    return directory


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Locks a directory, so that no second process works in it; the lock ends with the process.

    Args:
      directory: an existing output directory.

    Raises:
      OSError: another process is working in it.
    """
    try:
        import fcntl
    except ImportError:  # not a POSIX system
        yield
        return
    with (directory / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OSError(
                f"output_dir={directory}: another process is at work in it: wait for it, or choose "
                "another directory"
            ) from None
        yield


def claim(path: Path, configuration: Mapping[str, Any]) -> None:
    """Records the configuration of a run, or compares it with the recorded one.

    Args:
      path: the file for the configuration, in the output directory of the run.
      configuration: JSON values that determine the run.

    Raises:
      ValueError: the directory has a run of another configuration.
    """
    # As JSON, so that tuples and lists are equal.
    text = json.dumps(configuration, indent=1, sort_keys=True)
    ours = {**json.loads(text), "fingerprint": hashlib.sha256(text.encode()).hexdigest()}
    if path.exists():
        try:
            theirs = json.loads(path.read_bytes())
            theirs["fingerprint"]
        except (ValueError, LookupError, TypeError):
            raise ValueError(
                f"{path} is damaged, or not the configuration of a run: choose another "
                "output_dir, or empty this one"
            ) from None
        if theirs["fingerprint"] != ours["fingerprint"]:
            raise ValueError(
                f"output_dir={path.parent} holds a run of another configuration "
                f"({_difference(theirs, ours)}): choose another output_dir, or use the same "
                "configuration to continue the run"
            )
    else:
        write_atomically(path, json.dumps(ours, indent=1, sort_keys=True).encode())


def _difference(theirs: Any, ours: Any, name: str = "") -> str:
    """The first few differences of two configurations, in words."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        parts = [
            _difference(theirs.get(key), ours.get(key), f"{name}.{key}" if name else key)
            for key in sorted({*theirs, *ours})
            if theirs.get(key) != ours.get(key) and key != "fingerprint"
        ]
        shown = ", ".join(parts[:4])
        return shown + (f" and {len(parts) - 4} more" if len(parts) > 4 else "")
    return f"{name}: {theirs!r} there, {ours!r} here"
