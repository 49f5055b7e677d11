"""Output directories: made early, claimed by one configuration, held by one process."""

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
    """Writes a file so that it is there whole or not at all, whenever the process is killed.

    Args:
      path: the file. Only one process may write it at a time (see `locked`).
      data: its bytes.

    Raises:
      OSError: it cannot be written; what was there before is still there.
    """
    # One name, so that what a killed process has left is written over.
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
            f"{path} cannot be written ({error.strerror}); free some space or mend the disk"
        ) from None


def make_writable(path: str | os.PathLike[str]) -> Path:
    """Makes an output directory, and makes sure that files can be written there.

    Args:
      path: the directory; its parents are made too.

    Returns:
      Its absolute path.

    Raises:
      OSError: it cannot be made or written.
      TypeError: `path` is not a path.
      ValueError: `path` is empty.
    """
    check_path(path, "output_dir=")
    if not os.fspath(path):  # which would be the working directory
        raise ValueError("output_dir is empty; name a directory")
    directory = Path(path).expanduser().absolute()  # no shell expands --name=~/directory
    if directory.exists() and not directory.is_dir():
        raise NotADirectoryError(f"output_dir={directory} is a file; choose a directory")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # An attempt is the only true test: root passes every permission check.
        with tempfile.TemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise OSError(
            f"output_dir={directory} cannot be written ({error.strerror}); choose another"
        ) from None
    return directory


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keeps a second process out of a directory; the lock ends with the process that has it.

    Args:
      directory: an existing output directory.

    Raises:
      OSError: another process is at work in it.
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
                f"output_dir={directory}: another process is at work in it; wait for it, or choose "
                "another directory"
            ) from None
        yield


def claim(path: Path, configuration: Mapping[str, Any]) -> None:
    """Records a run's configuration, or checks it against the one recorded.

    Args:
      path: the file in the run's output directory.
      configuration: JSON values that determine the run.

    Raises:
      ValueError: the directory holds a run of another configuration.
    """
    # Through JSON, so that tuples and lists compare equal.
    text = json.dumps(configuration, indent=1, sort_keys=True)
    ours = {**json.loads(text), "fingerprint": hashlib.sha256(text.encode()).hexdigest()}
    if path.exists():
        try:
            theirs = json.loads(path.read_bytes())
            theirs["fingerprint"]
        except (ValueError, LookupError, TypeError):
            raise ValueError(
                f"{path} is damaged, or not the configuration of a run; choose another "
                "output_dir, or empty this one"
            ) from None
        if theirs["fingerprint"] != ours["fingerprint"]:
            raise ValueError(
                f"output_dir={path.parent} holds a run of another configuration "
                f"({_difference(theirs, ours)}); choose another output_dir, or the same "
                "configuration to continue it"
            )
    else:
        write_atomically(path, json.dumps(ours, indent=1, sort_keys=True).encode())


def _difference(theirs: Any, ours: Any, name: str = "") -> str:
    """The first few places where two configurations differ, in words."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        parts = [
            _difference(theirs.get(key), ours.get(key), f"{name}.{key}" if name else key)
            for key in sorted({*theirs, *ours})
            if theirs.get(key) != ours.get(key) and key != "fingerprint"
        ]
        shown = ", ".join(parts[:4])
        return shown + (f" and {len(parts) - 4} more" if len(parts) > 4 else "")
    return f"{name}: {theirs!r} there, {ours!r} here"
