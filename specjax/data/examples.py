"""Reads examples from text, TSV and JSONL files and from seqio tasks."""

import itertools
import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from specjax.checks import check_path
from specjax.data.files import read_lines

FORMATS = ("text", "tsv", "jsonl")
SEQIO_PREFIX = "seqio:"
_REMEDY = "every line must be one JSON object"


class Example(NamedTuple):
    """One input, and its reference if the source has one.

    Attributes:
      id: the example's place in its source, from 0. It does not depend on the batches, so that
        random streams can depend on it.
      inputs: the source text.
      targets: the reference text, or several where a task reads them, or None.
    """

    id: int
    inputs: str
    targets: Any = None


def read_examples(
    source: str | os.PathLike[str],
    *,
    format: str | None = None,
    inputs_field: str | int | None = None,
    targets_field: str | int | None = None,
    split: str = "train",
    directory: str | os.PathLike[str] = "",
) -> Iterator[Example]:
    """Yields examples in the order of the source.

    Args:
      source: a file, plain or `.gz`, or `seqio:TASK` for a registered seqio task.
      format: "text" (one input per line), "tsv" or "jsonl". By default it follows from the
        file's name: `.tsv` or `.jsonl` (before `.gz`), else text.
      inputs_field: the field of the input. TSV: a column, counted from 0 (0 by default), or its
        name in the first line, which is then a header. JSONL: a key, "inputs" by default. seqio:
        a feature, "inputs" by default. Text files have no fields.
      targets_field: the field of the reference, given in the same way. By default no reference is
        read.
      split: the split of a seqio task.
      directory: the directory that a relative path starts from.

    Yields:
      `Example`s, whose ids count from 0.

    Raises:
      FileNotFoundError: there is no such file.
      TypeError: a path is neither str nor os.PathLike.
      ValueError: the format or task is unknown, seqio is not installed, the file is empty or not
        UTF-8, a field is missing or is not text, or the columns of a line are not as many as those
        of the first. The message names the file and the line.
    """
    for name, field in (("inputs_field", inputs_field), ("targets_field", targets_field)):
        if isinstance(field, bool) or not isinstance(field, str | int | None):
            raise TypeError(
                f"{name} must be a field's name or the number of a column, such as 0, got {field!r}"
            )
    if isinstance(source, str) and source.startswith(SEQIO_PREFIX):
        # Imported only here: seqio imports TensorFlow, which takes seconds and a gigabyte.
        from specjax.data.seqio_tasks import task_texts

        pairs = task_texts(
            source.removeprefix(SEQIO_PREFIX), split, inputs_field or "inputs", targets_field
        )
    else:
        source = _join(directory, source)
        format = format or guess_format(source)
        if format == "text":
            pairs = _text(source, inputs_field, targets_field)
        elif format == "tsv":
            pairs = _tsv(source, 0 if inputs_field is None else inputs_field, targets_field)
        elif format == "jsonl":
            pairs = _jsonl(source, inputs_field or "inputs", targets_field)
        else:
            raise ValueError(f"`format` must be one of {', '.join(FORMATS)}, got {format!r}")
    for i, (inputs, targets) in enumerate(pairs):
        yield Example(i, inputs, targets)


def read_aligned(
    inputs_path: str | os.PathLike[str],
    targets_path: str | os.PathLike[str],
    *,
    directory: str | os.PathLike[str] = "",
) -> Iterator[Example]:
    """Yields the pairs of two text files whose lines correspond.

    Args:
      inputs_path: one source text per line, plain or `.gz`.
      targets_path: the reference of each source text, on the same line.
      directory: the directory that relative paths start from.

    Yields:
      `Example`s, whose ids count from 0.

    Raises:
      FileNotFoundError: a file is missing.
      TypeError: a path is neither str nor os.PathLike.
      ValueError: a file is empty or not UTF-8, or one has more lines than the other.
    """
    inputs_path, targets_path = (_join(directory, p) for p in (inputs_path, targets_path))
    pairs = itertools.zip_longest(read_lines(inputs_path), read_lines(targets_path))
    for i, (source, target) in enumerate(pairs):
        if source is None or target is None:
            longer, shorter = (
                (targets_path, inputs_path) if source is None else (inputs_path, targets_path)
            )
            raise ValueError(
                f"{longer}:{i + 1}: this line has no counterpart: {shorter} ends after "
                f"{i} lines, but aligned files must have the same number of lines"
            )
        yield Example(i, source[1], target[1])


def _join(directory: Any, path: Any) -> str:
    for value in (directory, path):
        check_path(value)
    return os.path.join(os.fspath(directory), os.fspath(path))


def guess_format(path: str) -> str:
    """The format that follows from a file's name: "tsv", "jsonl" or else "text"."""
    ending = os.path.splitext(path.removesuffix(".gz"))[1]
    return {".tsv": "tsv", ".jsonl": "jsonl"}.get(ending, "text")


def _text(path: str, inputs_field: Any, targets_field: Any) -> Iterator[tuple[str, None]]:
    for field in (inputs_field, targets_field):
        if field is not None:
            raise ValueError(
                f"{path}: a text file has no field {field!r}: use a .tsv or .jsonl file, "
                "or two aligned text files"
            )
    for _, line in read_lines(path):
        yield line, None


def _tsv(
    path: str, inputs_field: str | int, targets_field: str | int | None
) -> Iterator[tuple[str, str | None]]:
    has_header = isinstance(inputs_field, str) or isinstance(targets_field, str)
    first: list[str] = []
    number = 0
    for number, line in read_lines(path):
        row = line.split("\t")
        if number == 1:
            first = row
            inputs_column = _column(path, first, inputs_field)
            targets_column = None if targets_field is None else _column(path, first, targets_field)
            if has_header:
                continue
        if len(row) != len(first):
            raise ValueError(
                f"{path}:{number}: the line has {len(row)} columns, but line 1 has {len(first)}: "
                "every line must have the same number of tabs"
            )
        yield row[inputs_column], None if targets_column is None else row[targets_column]
    if has_header and number == 1:
        raise ValueError(
            f"{path} has a header but no other line: add lines; or, if line 1 is data, give the "
            "fields by number"
        )


def _column(path: str, first: list[str], field: str | int) -> int:
    if isinstance(field, str):
        if field in first:
            return first.index(field)
        raise ValueError(
            f"{path}:1: the header has no column {field!r} but only {', '.join(map(repr, first))}"
        )
    if 0 <= field < len(first):
        return field
    raise ValueError(
        f"{path}:1: there is no column {field}: the line has {len(first)} columns, counted from 0"
    )


def _jsonl(path: str, inputs_field: Any, targets_field: Any) -> Iterator[tuple[str, str | None]]:
    for number, _, row in read_objects(path):
        inputs = _value(path, number, row, inputs_field)
        targets = None if targets_field is None else _value(path, number, row, targets_field)
        yield inputs, targets


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


def _value(path: str, number: int, row: dict[str, Any], field: Any) -> str:
    if field not in row:
        raise ValueError(
            f"{path}:{number}: there is no key {field!r}: the object has "
            f"{', '.join(map(repr, row))}"
        )
    value = row[field]
    if not isinstance(value, str):
        raise ValueError(
            f"{path}:{number}: {field!r} must be a string, got {json.dumps(value)[:40]}"
        )
    return value
