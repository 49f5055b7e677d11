"""Checksums of the files of a directory, in a file of that directory.

Checksums of a checkpoint of a run also name its owner: the run and the step.
"""

import concurrent.futures
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specjax.writing import read_regular, write_atomically

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


def has_checksums(directory: Path) -> bool:
    """Whether a directory has the file of `write_checksums`."""
    return (directory / CHECKSUMS_NAME).is_file()


def find_damage(directory: Path, *, owner: Mapping[str, Any] | None = None) -> str | None:
    """Describes the first difference from the checksums; None if there is no difference."""
    try:
        values = json.loads(read_regular(directory / CHECKSUMS_NAME))
        sums, theirs = values["files"], values.get("owner")
        files = [(name, directory / name, str(expected)) for name, expected in sums.items()]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return f"{CHECKSUMS_NAME} cannot be read"
    if owner is not None and theirs is None:
        return f"{CHECKSUMS_NAME} names no run: an earlier version of specjax wrote it"
    if owner is not None and theirs != owner:
        return f"{CHECKSUMS_NAME} is of another run or step"
    with _threads() as threads:
        differences = threads.map(lambda file: _difference(*file), files)
        return next(filter(None, differences), None)


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
