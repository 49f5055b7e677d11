"""Records of named values, from TSV and JSONL files and from seqio tasks."""

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from specjax.checks import check_path
from specjax.data.examples import SEQIO_PREFIX, guess_format, read_objects
from specjax.data.files import read_lines

FORMATS = ("tsv", "jsonl")


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
) -> Iterator[Record]:
    """Yields records in the order of the source.

    Args:
      source: a JSONL or TSV file, plain or `.gz`, or `seqio:TASK`.
      format: "jsonl" or "tsv"; by default it follows from the file's name.
      split: the split of a seqio task.
      header: whether a TSV names its columns in its first line; else they are called "0", "1", ....

    Yields:
      `Record`s.

    Raises:
      FileNotFoundError: there is no such file.
      TypeError: `source` is no path.
      ValueError: the source is empty or unreadable, its format or its task is unknown, or seqio is
        not installed.
    """
    check_path(source, "source=")
    name = os.path.expanduser(os.fspath(source))
    if name.startswith(SEQIO_PREFIX):
        # Imported only here: seqio imports TensorFlow, which takes seconds and a gigabyte.
        from specjax.data.seqio_tasks import task_records

        rows = task_records(name.removeprefix(SEQIO_PREFIX), split)
        for place, values in enumerate(rows):
            yield Record(f"{name}, {split}, example {place}", values)
        return
    format = format or guess_format(name)
    if format == "jsonl":
        for number, _, values in read_objects(name):
            yield Record(f"{name}:{number}", values)
    elif format == "tsv":
        yield from _tsv(name, header)
    else:
        raise ValueError(
            f"{name}: a template needs a file with fields, .jsonl or .tsv, got format={format!r}"
        )


def _tsv(path: str, header: bool) -> Iterator[Record]:
    names: list[str] | None = None
    for number, line in read_lines(path):
        row = line.split("\t")
        if names is None:
            names = row if header else [str(i) for i in range(len(row))]
            if header:
                continue
        if len(row) != len(names):
            raise ValueError(
                f"{path}:{number}: the line has {len(row)} columns, but line 1 has {len(names)}: "
                "every line must have the same number of tabs"
            )
        yield Record(f"{path}:{number}", dict(zip(names, row, strict=True)))
