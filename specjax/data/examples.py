"""Examples, an input and its reference each, from text, TSV and JSONL files and seqio tasks."""

import gzip
import itertools
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO, NamedTuple, cast

from specjax.checks import PathLike, check_path, join_names
from specjax.data.seqio_tasks import task_rows
from specjax.errors import MissingFileError, UserError

SEQIO_PREFIX = "seqio:"
# A first line with only these words is a header.
_COLUMN = re.compile(
    "((answer|caption|category|class|completion|context|document|english|field|german|id|input"
    "|instruction|label|lang|language|message|output|premise|prediction|prompt|query|question|ref"
    "|reference|response|score|sentence|source|src|summary|target|text|tgt|title|translation)s?"
    "|ar|bg|cs|da|de|el|en|es|et|eu|fa|fi|fr|hi|hr|hu|it|ja|ko|lt|lv|nl|pl|pt|ro|ru|sk|sl|sr|sv|th|tr"
    r"|uk|vi|zh)\d*"
)


class SourceRecord(NamedTuple):
    """The JSON values of a line of a source; `where` is its name in messages."""

    where: str
    values: dict[str, Any]


def read_records(
    source: PathLike,
    *,
    format: str | None = None,
    split: str = "test",
    header: bool | None = True,
    directory: PathLike = "",
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
        a header is then refused.
      directory: the directory of a relative path.
      option: the user's option for the field, in that message.

    Raises:
      OSError: the file does not exist.
      UserError: the source is empty or unreadable, its format or its task is unknown, a library is
        missing, or the first line looks like a header.
    """
    check_path(directory or ".")
    check_path(source, "source=")
    name = os.fspath(source)
    if name.startswith(SEQIO_PREFIX):
        rows = task_rows(name.removeprefix(SEQIO_PREFIX), split)
        for place, values in enumerate(rows):
            yield SourceRecord(f"{name}, {split}, example {place}", values)
        return
    name = os.path.join(directory, os.path.expanduser(name))
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
        raise UserError(f"`format` must be one of text, tsv, jsonl, got {format!r}")


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
            if len({*names}) < len(names):
                raise UserError(
                    f"{path}:1: the header has a column twice: rename it, or give fields by number "
                    "if line 1 is not a header"
                )
            if header:
                continue
            if header is None and all(map(_is_column, row)) and len({*row}) == len(row):
                raise UserError(
                    f"{path}:1: this line looks like a header ({', '.join(map(repr, row))}): name "
                    f"a column, such as {option}={row[0]!r}; if the line is a row, set {option}=0"
                )
        if len(row) != len(names):
            raise UserError(
                f"{path}:{number}: the line has {len(row)} columns, but line 1 has {len(names)}: "
                "every line must have the same number of tabs"
            )
        yield SourceRecord(f"{path}:{number}", dict(zip(names, row, strict=True)))
    if header and number == 1:
        raise UserError(f"{path} has a header but no other line: add lines, or number the fields")


def _is_column(cell: str) -> bool:
    words = re.split(r"[\W_]+", re.sub(r"[\"'()\[\]]", "", cell).strip().lower())
    return all(map(_COLUMN.fullmatch, words))


def read_objects(path: str) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Yields the objects of a JSONL file, plain or `.gz`."""
    for number, line in read_lines(path):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:  # the latter of thousands of brackets
            row = error
        if not isinstance(row, dict):
            raise UserError(f"{path}:{number}: the line must be a JSON object, got {row!s:.80}")
        yield number, line, row


def read_lines(path: PathLike) -> Iterator[tuple[int, str]]:
    r"""Yields the lines of a UTF-8 file, gzipped if its name ends in `.gz`.

    Only `\n` ends a line (a `\r` before it is removed), so that other Unicode separators inside a
    sentence do not shift the lines of aligned files. A byte order mark is removed.

    Yields:
      (line number from 1, text without the line's end).

    Raises:
      OSError: the file does not exist, or is a directory.
      UserError: the file is empty, not valid UTF-8, or a damaged gzip file.
    """
    path = os.fspath(path)
    if not os.path.exists(path):
        raise MissingFileError(f"{path}: no such file: check the path")
    if os.path.isdir(path):
        raise IsADirectoryError(
            f"{path} is a directory: give a file of texts (.txt, .tsv or .jsonl)"
        )
    number = 0
    with cast(BinaryIO, gzip.open(path) if path.endswith(".gz") else open(path, "rb")) as file:
        try:
            for number, raw in enumerate(file, 1):
                raw = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
                yield number, raw.removesuffix(b"\n").removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{path}:{number}: byte 0x{error.object[error.start]:02x} at column "
                f"{error.start + 1} is not UTF-8: convert the file, for example with iconv -t UTF-8"
            ) from None
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise UserError(
                f"{path}: the gzip data are damaged after line {number} ({error}): "
                "compress the file again, or remove .gz from its name if it is plain text"
            ) from None
    if number == 0:
        raise UserError(f"{path} is empty: it must have at least one line")


def look_up(
    record: Mapping[str, Any], field: str, where: str, option: str = ""
) -> str | tuple[str, ...]:
    """Returns the text, or the texts of a list, in a field; see `few_shot.Template`.

    `option` is the user's option for the field, in messages; "": a template, or `references`.
    """
    path, bar, default = field.partition("|")
    value: Any = record
    for i, name in enumerate([path] if path in record else path.split(".")):
        if isinstance(value, list | tuple):
            value = {str(place): item for place, item in enumerate(value)}
        inner = value.get(name) if isinstance(value, Mapping) else None
        if inner is None:
            if bar:
                return default
            outer = ".".join(path.split(".")[:i]) or "the record"
            has = join_names(map(repr, value)) if isinstance(value, Mapping) else repr(value)[:60]
            # As an option, a default would be the whole text of each such record.
            remedy = (
                f"give another field as {option}" if option else f"write {path}|text for a default"
            )
            raise UserError(
                f"{where}: there is no field {path!r}: {outer} has {has or 'nothing'}; {remedy}"
            )
        value = inner
    if isinstance(value, list | tuple):
        return tuple(_text(item, path, where) for item in value)
    return _text(value, path, where)


def _text(value: Any, path: str, where: str) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    raise UserError(
        f"{where}: {path!r} must be a text, a number or a list of these, got {str(value)[:40]!r}"
    )


class Example(NamedTuple):
    """An input, and its reference if the source has it.

    Attributes:
      id: the example's place in its source, from 0; it seeds the row's random stream.
      inputs: the source text.
      targets: the reference text, a tuple of several, or None.
      where: its name in messages: the file and the line, or "".
    """

    id: int
    inputs: str
    targets: Any = None
    where: str = ""


def read_examples(
    source: PathLike,
    *,
    format: str | None = None,
    inputs_field: str | int | None = None,
    targets_field: str | int | None = None,
    split: str = "train",
    directory: PathLike = "",
    option: str = "inputs_field",
) -> Iterator[Example]:
    """Yields examples in the order of the source.

    Args:
      source: a file, plain or `.gz`, or `seqio:TASK` for a registered seqio task.
      format: see `read_records`.
      inputs_field: the field of the input. TSV: a column, counted from 0, or its name in the first
        line, which is then a header; 0 by default, if that line does not look like a header. JSONL
        and seqio: a key, "inputs" by default. A field may be inside objects and lists (see
        `few_shot.Template`), such as "answers.text".
      targets_field: the field of the reference, in the same form. By default no reference is read.
      split: the split of a seqio task.
      directory: the directory of a relative path.
      option: the user's option for `inputs_field`, in messages.

    Raises:
      UserError: a field is missing, or has no text; see also `read_records`.
    """
    named = isinstance(inputs_field, str) or isinstance(targets_field, str)
    options: dict[str, Any] = {"format": format, "split": split, "directory": directory}
    options["header"] = True if named else None if inputs_field is None else False
    kind = "seqio" if str(source).startswith(SEQIO_PREFIX) else format or guess_format(str(source))
    if kind == "text":
        check_no_fields(source, {option: inputs_field, "targets_field": targets_field})
    if inputs_field is None:
        inputs_field = "inputs" if kind in ("seqio", "jsonl") else 0
    for i, record in enumerate(read_records(source, option=option, **options)):
        inputs = field_of(record, inputs_field, option)
        if not isinstance(inputs, str):
            raise UserError(f"{record.where}: {inputs_field!r} must be a text, got a list")
        targets = None
        if targets_field is not None:
            targets = field_of(record, targets_field, "targets_field")
        yield Example(i, inputs, targets, record.where)


def check_no_fields(source: PathLike, fields: Mapping[str, Any]) -> None:
    """Refuses fields of a text file; `fields` has them by the user's options."""
    for option, field in fields.items():
        if field not in (None, 0):
            raise UserError(
                f"{source}: a line of a text file is one text, so there is no {option}={field!r}: "
                "give a .tsv or .jsonl file"
            )


def field_of(record: SourceRecord, field: str | int, option: str) -> str | tuple[str, ...]:
    """Returns the text, or the texts of a list, in a key or a numbered column; see `look_up`."""
    values = record.values
    if isinstance(field, int) and str(field) not in values and 0 <= field < len(values):
        field = list(values)[field]  # of a header
    return look_up(values, str(field), record.where, option)


def read_aligned(
    inputs_path: PathLike,
    targets_path: PathLike,
    *,
    directory: PathLike = "",
) -> Iterator[Example]:
    """Yields the pairs of two text files, plain or `.gz`, whose lines correspond.

    `directory` is that of relative paths.
    """
    sides = [
        read_records(path, format="text", directory=directory)
        for path in (inputs_path, targets_path)
    ]
    for i, (source, target) in enumerate(itertools.zip_longest(*sides)):
        if source is None or target is None:
            longer = source or target
            shorter = targets_path if target is None else inputs_path
            raise UserError(
                f"{longer.where}: this line has no counterpart, because {os.fspath(shorter)} has "
                f"only {i} lines: give files with the same number of lines"
            )
        yield Example(i, source.values["0"], target.values["0"], source.where)
