"""Records of named values: lines of text, TSV and JSONL files, and rows of seqio tasks."""

import gzip
import json
import os
import re
import sys
import warnings
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple, cast

from specjax.checks import check_path
from specjax.errors import UserError
from specjax.memory import in_words

FORMATS = ("text", "tsv", "jsonl")
SEQIO_PREFIX = "seqio:"
# A first line with only these words is a header.
_COLUMN = re.compile(
    "((answer|caption|category|class|completion|context|document|english|field|german|id|input"
    "|instruction|label|lang|language|message|output|premise|prediction|prompt|query|question|ref"
    "|reference|response|score|sentence|source|src|summary|target|text|tgt|title|translation)s?"
    "|ar|bg|cs|da|de|el|en|es|et|eu|fa|fi|fr|hi|hr|hu|it|ja|ko|lt|lv|nl|pl|pt|ro|ru|sk|sl|sr|sv|th|tr"
    r"|uk|vi|zh)\d*"
)
# The longest line; a file such as /dev/zero has no end of a line.
MOST_LINE = 64 * 2**20


class SourceRecord(NamedTuple):
    """The JSON values of a line of a source; `where` is its name in messages."""

    where: str
    values: dict[str, Any]


def report_all(count: int, source: str | os.PathLike[str], name: str, limit: int | None) -> None:
    """Prints a line if a limit is larger than the number of inputs, which are then all used."""
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

    Raises:
      FileNotFoundError: the file does not exist.
      MissingLibraryError: a seqio task needs seqio, which is not installed.
      UserError: the source is empty or unreadable, its format or its task is unknown, or its first
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
    for number, line in read_lines(path):
        row = line.split("\t")
        if number == 1:
            # A column without a name has its number.
            names = [name if header and name else str(i) for i, name in enumerate(row)]
            if header:
                _check_columns(path, names)
                continue
            if all(map(_is_column, row)) and len({*row}) == len(row):
                _report_header(f"{path}:1", row, header, option)
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


def _is_column(cell: str) -> bool:
    words = re.split(r"[\W_]+", re.sub(r"[\"'()\[\]]", "", cell).strip().lower())
    return all(map(_COLUMN.fullmatch, words))


def _report_header(where: str, names: list[str], header: bool | None, option: str) -> None:
    what = f"{where}: this line looks like a header ({', '.join(map(repr, names))})"
    if header is None:
        raise UserError(
            f"{what}: name a column, such as {option}={names[0]!r}; if the line is a row, set "
            f"{option}=0"
        )
    warnings.warn(f"{what}, but is read as a row: name the columns to skip it", stacklevel=3)


def _check_columns(path: str, names: list[str]) -> None:
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise UserError(
            f"{path}:1: the header has the column {twice[0]!r} twice: rename a column, or give "
            "fields by number if line 1 is not a header"
        )


def read_objects(path: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yields the objects of a JSONL file, plain or `.gz`."""
    for number, line in read_lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # the latter of thousands of brackets
            raise UserError(
                f"{path}:{number}: the line is not JSON ({error}): every line must be a JSON object"
            ) from None
        if not isinstance(row, dict):
            raise UserError(
                f"{path}:{number}: the line must be a JSON object {{...}}, got {line[:40]}"
            )
        yield number, line, row


def read_lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, str]]:
    r"""Yields the lines of a UTF-8 file, gzipped if its name ends in `.gz`.

    Only `\n` ends a line (a `\r` before it is removed), so that other Unicode separators inside a
    sentence do not shift the lines of aligned files. A byte order mark is removed.

    Yields:
      (line number from 1, text without the line's end).

    Raises:
      FileNotFoundError: the file does not exist.
      UserError: the file is empty, not valid UTF-8, a directory, a damaged gzip file, or has a line
        longer than `MOST_LINE`.
    """
    path = os.fspath(path)
    if not os.path.exists(path):
        raise FileNotFoundError(f"{path}: no such file: check the path")
    if os.path.isdir(path):
        raise UserError(f"{path} is a directory: give the path of a file")
    packed = path.endswith(".gz")
    number = 0
    with cast(BinaryIO, gzip.open(path) if packed else open(path, "rb")) as file:
        try:
            # The extra byte shows that there is too much.
            while raw := file.readline(MOST_LINE + 1):
                number += 1
                if len(raw) > MOST_LINE:
                    raise UserError(
                        f"{path}:{number}: the line is longer than {in_words(MOST_LINE)}: give a "
                        "text file with a prompt or a record per line"
                    )
                raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
                yield number, _decode(raw.removesuffix(b"\n").removesuffix(b"\r"), path, number)
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(
                f"{path}: the gzip data are damaged after line {number} ({error}): "
                "compress the file again, or remove .gz from its name if it is plain text"
            ) from None
    if number == 0:
        raise UserError(f"{path} is empty: it must have at least one line")


def _decode(raw: bytes, path: str, number: int) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path}:{number}: byte 0x{raw[error.start]:02x} at column {error.start + 1} is not "
            "UTF-8: convert the file, for example with iconv -t UTF-8"
        ) from None
