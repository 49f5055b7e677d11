"""Records of named values: lines of text, TSV and JSONL files, and rows of seqio tasks."""

import itertools
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

from specjax.checks import check_path
from specjax.data.files import read_lines
from specjax.errors import UserError

FORMATS = ("text", "tsv", "jsonl")
SEQIO_PREFIX = "seqio:"
# A column's name: a word or two. Most texts have more words, or punctuation.
_NAME = re.compile(r"#?[^\W\d]\w{,29}([ ._/-]\w{1,29})?")
# A line with only these words is a header, whatever lies below.
_CERTAIN = re.compile(
    "((answer|caption|category|class|completion|context|document|english|field|german|id|input"
    "|instruction|label|lang|language|message|output|premise|prediction|prompt|query|question|ref"
    "|reference|response|score|sentence|source|src|summary|target|text|tgt|title|translation)s?"
    "|ar|bg|cs|da|de|el|en|es|et|eu|fa|fi|fr|hi|hr|hu|it|ja|ko|lt|lv|nl|pl|pt|ro|ru|sk|sl|sr|sv|th|tr"
    r"|uk|vi|zh)\d*"
)
# How many rows must not look like names.
_ROWS = 20
_REMEDY = "every line must be a JSON object"


class SourceRecord(NamedTuple):
    """A line of a source.

    Attributes:
      where: its name in messages: the file and the line, or the task and the place.
      values: name -> JSON value.
    """

    where: str
    values: dict[str, Any]


def report_all(count: int, source: str | os.PathLike[str], name: str, limit: int | None) -> None:
    """Prints a line if a limit is larger than the number of inputs, which are then all used.

    Args:
      count: the number of inputs.
      source: their source.
      name: the name of the limit.
      limit: its value; None for no limit.
    """
    if limit is not None and count < limit:
        path = os.fspath(source)
        print(
            f"specjax: using all {count} inputs of {path}; {name}={limit} is larger",
            file=sys.stderr,
        )


def read_records(
    source: str | os.PathLike[str],
    *,
    format: str | None = None,
    split: str = "test",
    header: bool | None = True,
    directory: str | os.PathLike[str] = "",
    option: str = "inputs_field",
) -> Iterator[SourceRecord]:
    """Yields records in the order of the source.

    Args:
      source: a text, TSV or JSONL file, plain or `.gz`, or `seqio:TASK`.
      format: "text", "tsv" or "jsonl"; by default from the file's name: `.tsv` or `.jsonl` (before
        `.gz`), otherwise text. A line of a text file is the value "0".
      split: the split of a seqio task.
      header: whether the first line of a TSV has the columns' names; columns without a name are
        "0", "1", ... by their places. None: the user has not said; a first line that looks like
        a header is then refused. False gives a warning.
      directory: the directory of a relative path.
      option: the user's option for the field, in that message.

    Yields:
      `SourceRecord`s.

    Raises:
      FileNotFoundError: the file does not exist.
      ImportError: a seqio task needs seqio, which is not installed.
      TypeError: a path is not a path.
      ValueError: the source is empty or unreadable, its format or its task is unknown, or its first
        line looks like a header.
    """
    for path in (directory, source):
        check_path(path, "" if path is directory else "source=")
    name = os.fspath(source)
    if name.startswith(SEQIO_PREFIX):
        # Imported only here: seqio imports TensorFlow, which takes seconds and a gigabyte.
        from specjax.data.seqio_tasks import task_rows

        rows = task_rows(name.removeprefix(SEQIO_PREFIX), split)
        for place, values in enumerate(rows):
            yield SourceRecord(f"{name}, {split}, example {place}", values)
        return
    name = os.path.join(os.fspath(directory), os.path.expanduser(name))
    format = format or guess_format(name)
    if format == "text":
        for number, line in read_lines(name):
            yield SourceRecord(f"{name}:{number}", {"0": line})
    elif format == "tsv":
        yield from _tsv(name, header, option)
    elif format == "jsonl":
        for number, _, values in read_objects(name):
            yield SourceRecord(f"{name}:{number}", values)
    else:
        raise UserError(f"`format` must be one of {', '.join(FORMATS)}, got {format!r}")


def guess_format(path: str) -> str:
    """Returns the format of a file by its name: "tsv", "jsonl" or otherwise "text"."""
    ending = os.path.splitext(path.removesuffix(".gz"))[1]
    if ending == ".csv":
        raise UserError(f"{path}: CSV files are not read: convert it to .tsv or .jsonl")
    return {".tsv": "tsv", ".jsonl": "jsonl"}.get(ending, "text")


def _tsv(path: str, header: bool | None, option: str) -> Iterator[SourceRecord]:
    names: list[str] = []
    number = 0
    lines = read_lines(path)
    first = [] if header else list(itertools.islice(lines, 1 + _ROWS))
    if found := _header_in([line.split("\t") for _, line in first]):
        what = f"{path}:1: this line looks like a header ({', '.join(map(repr, found))})"
        if header is None:
            raise UserError(
                f"{what}: name a column, such as {option}={found[0]!r}; if the line is a row, set "
                f"{option}=0"
            )
        warnings.warn(f"{what}, but is read as a row: name the columns to skip it", stacklevel=2)
    for number, line in itertools.chain(first, lines):
        row = line.split("\t")
        if number == 1:
            # A column without a name has its number.
            names = [name if header and name else str(i) for i, name in enumerate(row)]
            if header:
                _check_columns(path, names)
                continue
        if len(row) != len(names):
            raise UserError(
                f"{path}:{number}: the line has {len(row)} columns, but line 1 has {len(names)}: "
                "every line must have the same number of tabs"
            )
        yield SourceRecord(f"{path}:{number}", dict(zip(names, row, strict=True)))
    if header and number == 1:
        raise UserError(
            f"{path} has a header but no other line: add lines, or give fields by number if line 1 "
            "is not a header"
        )


def _header_in(rows: list[list[str]]) -> list[str]:
    """The names in the first row, if it is a header."""
    names, *others = rows or [[]]
    named = [name for name in names if _is_name(name)]
    if not named or len({*named}) < len(named) or any({*names} - {*named, ""}):
        return []
    if all(map(_is_certain, named)):
        return named
    below = [row for row in others if any(row) and len(row) == len(names)]
    short = (sum(cell == "" or _is_name(cell) for cell in x) for x in zip(*below, strict=True))
    # A text may be short, too.
    return named if any(2 * n < len(below) and 10 * n < len(below) + 10 for n in short) else []


def _is_name(cell: str) -> bool:
    return _is_certain(cell) or _NAME.fullmatch(_bare(cell)) is not None


def _is_certain(cell: str) -> bool:
    return all(map(_CERTAIN.fullmatch, re.split(r"[\W_]+", _bare(cell).lower())))


def _bare(cell: str) -> str:
    """The cell without quotes and brackets."""
    return re.sub(r"[\"'()\[\]]", "", cell).strip()


def _check_columns(path: str, names: list[str]) -> None:
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UserError(
            f"{path}:1: the header has the column {twice[0]!r} twice: rename a column, or give "
            "fields by number if line 1 is not a header"
        )


def read_objects(path: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yields the objects of a JSONL file, plain or `.gz`.

    Args:
      path: the file.

    Yields:
      (line number from 1, the line, its object).
    """
    for number, line in read_lines(path):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            why = f"{error.msg} at column {error.colno}"
            raise UserError(f"{path}:{number}: the line is not JSON ({why}): {_REMEDY}") from None
        except (ValueError, RecursionError) as error:  # thousands of digits or brackets
            raise UserError(
                f"{path}:{number}: the line is not readable ({error}): {_REMEDY}"
            ) from None
        if not isinstance(row, dict):
            raise UserError(
                f"{path}:{number}: the line must be a JSON object {{...}}, got {line[:40]}"
            )
        yield number, line, row
