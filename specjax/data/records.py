"""Records of named values: the lines of text, TSV and JSONL files, and the rows of seqio tasks."""

import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from specjax.checks import check_path
from specjax.data.files import read_lines

FORMATS = ("text", "tsv", "jsonl")
SEQIO_PREFIX = "seqio:"
_REMEDY = "every line must be one JSON object"


class Record(NamedTuple):
    """What one line of a source holds.

    Attributes:
      where: its name in messages: the file and the line, or the task and the place.
      values: as JSON has them.
    """

    where: str
    values: dict[str, Any]


def read_records(
    source: str | os.PathLike[str],
    *,
    format: str | None = None,
    split: str = "test",
    header: bool = True,
    directory: str | os.PathLike[str] = "",
) -> Iterator[Record]:
    """Yields records in the order of the source.

    Args:
      source: a text, TSV or JSONL file, plain or `.gz`, or `seqio:TASK`.
      format: "text", "tsv" or "jsonl"; by default it follows from the file's name: `.tsv` or
        `.jsonl` (before `.gz`), else text. A line of a text file is the value "0".
      split: the split of a seqio task.
      header: whether a TSV names its columns in its first line; else they are called "0", "1", ....
      directory: the directory that a relative path starts from.

    Yields:
      `Record`s.

    Raises:
      FileNotFoundError: there is no such file.
      ImportError: a seqio task, but seqio is not installed.
      TypeError: a path is no path.
      ValueError: the source is empty or unreadable, or its format or its task is unknown.
    """
    for path in (directory, source):
        check_path(path, "" if path is directory else "source=")
    name = os.fspath(source)
    if name.startswith(SEQIO_PREFIX):
        # Imported only here: seqio imports TensorFlow, which takes seconds and a gigabyte.
        from specjax.data.seqio_tasks import task_rows

        rows = task_rows(name.removeprefix(SEQIO_PREFIX), split)
        for place, values in enumerate(rows):
            yield Record(f"{name}, {split}, example {place}", values)
        return
    name = os.path.join(os.fspath(directory), os.path.expanduser(name))
    format = format or guess_format(name)
    if format == "text":
        for number, line in read_lines(name):
            yield Record(f"{name}:{number}", {"0": line})
    elif format == "tsv":
        yield from _tsv(name, header)
    elif format == "jsonl":
        for number, _, values in read_objects(name):
            yield Record(f"{name}:{number}", values)
    else:
        raise ValueError(f"`format` must be one of {', '.join(FORMATS)}, got {format!r}")


def guess_format(path: str) -> str:
    """The format that follows from a file's name: "tsv", "jsonl" or else "text"."""
    ending = os.path.splitext(path.removesuffix(".gz"))[1]
    return {".tsv": "tsv", ".jsonl": "jsonl"}.get(ending, "text")


def _tsv(path: str, header: bool) -> Iterator[Record]:
    names: list[str] = []
    number = 0
    for number, line in read_lines(path):
        row = line.split("\t")
        if number == 1:
            names = row if header else [str(i) for i in range(len(row))]
            if header:
                continue
        if len(row) != len(names):
            raise ValueError(
                f"{path}:{number}: the line has {len(row)} columns, but line 1 has {len(names)}: "
                "every line must have the same number of tabs"
            )
        yield Record(f"{path}:{number}", dict(zip(names, row, strict=True)))
    if header and number == 1:
        raise ValueError(
            f"{path} has a header but no other line: add lines; or, if line 1 is data, give the "
            "fields by number"
        )


def read_objects(path: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yields the objects of a JSONL file, plain or `.gz`.

    Args:
      path: the file.

    Yields:
      (line number from 1, the line, its object).

    Raises:
      FileNotFoundError: there is no such file.
      ValueError: the file is empty or not UTF-8, or a line is not one JSON object.
    """
    for number, line in read_lines(path):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            why = f"{error.msg} at column {error.colno}"
            raise ValueError(f"{path}:{number}: the line is not JSON ({why}): {_REMEDY}") from None
        except (ValueError, RecursionError) as error:  # thousands of digits, or of brackets
            raise ValueError(
                f"{path}:{number}: the line is not readable ({error}): {_REMEDY}"
            ) from None
        if not isinstance(row, dict):
            raise ValueError(
                f"{path}:{number}: the line must be a JSON object {{...}}, got {line[:40]}"
            )
        yield number, line, row
