"""Examples: an input and its reference, from the fields of records."""

import itertools
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

from specjax.data.records import SEQIO_PREFIX, SourceRecord, guess_format, read_records
from specjax.data.templates import look_up
from specjax.errors import UserError


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
    source: str | os.PathLike[str],
    *,
    format: str | None = None,
    inputs_field: str | int | None = None,
    targets_field: str | int | None = None,
    split: str = "train",
    directory: str | os.PathLike[str] = "",
    option: str = "inputs_field",
) -> Iterator[Example]:
    """Yields examples in the order of the source.

    Args:
      source: a file, plain or `.gz`, or `seqio:TASK` for a registered seqio task.
      format: see `read_records`.
      inputs_field: the field of the input. TSV: a column, counted from 0, or its name in the first
        line, which is then a header; 0 by default, if that line does not look like a header. JSONL:
        a key, "inputs" by default. seqio: a feature, "inputs" by default. Text files have no
        fields. A field may be inside objects and lists (see `Template`), such as "answers.text".
      targets_field: the field of the reference, in the same form. By default no reference is read.
      split: the split of a seqio task.
      directory: the directory of a relative path.
      option: the user's option for `inputs_field`, in messages.

    Raises:
      UserError: a field is missing, or is neither a text nor a number; see also `read_records`.
    """
    for name, field in ((option, inputs_field), ("targets_field", targets_field)):
        if isinstance(field, bool) or not isinstance(field, str | int | None):
            raise UserError(
                f"{name} must be the name of a field or the number of a column, got {field!r}"
            )
    named = isinstance(inputs_field, str) or isinstance(targets_field, str)
    options: dict[str, Any] = {"format": format, "split": split, "directory": directory}
    options["header"] = True if named else None if inputs_field is None else False
    kind = "seqio" if str(source).startswith(SEQIO_PREFIX) else format or guess_format(str(source))
    if kind == "text":
        for name, field in ((option, inputs_field), ("targets_field", targets_field)):
            if field not in (None, 0):
                raise UserError(
                    f"{source}: a line of a text file is one text, so there is no {name}={field!r}"
                    ": give a .tsv or .jsonl file"
                )
    if inputs_field is None:
        inputs_field = "inputs" if kind in ("seqio", "jsonl") else 0
    for i, record in enumerate(read_records(source, option=option, **options)):
        if kind == "tsv":
            _check_column(record, option, inputs_field)
            _check_column(record, "targets_field", targets_field)
        inputs = field_of(record, inputs_field)
        if not isinstance(inputs, str):
            raise UserError(f"{record.where}: {inputs_field!r} must be a text, got a list")
        targets = None if targets_field is None else field_of(record, targets_field)
        yield Example(i, inputs, targets, record.where)


def _check_column(record: SourceRecord, name: str, field: str | int | None) -> None:
    count = len(record.values)
    if isinstance(field, int) and not 0 <= field < count:
        columns = f"{count} columns" if count > 1 else "one column"
        raise UserError(
            f"{record.where}: {name}={field}, but the line has {columns}, counted from 0: put a "
            "tab between two columns, or give another number"
        )


def field_of(record: SourceRecord, field: str | int) -> str | tuple[str, ...]:
    """Returns the text, or the texts of a list, in a key or a numbered column."""
    values = record.values
    if isinstance(field, int) and str(field) not in values and 0 <= field < len(values):
        field = list(values)[field]  # of a header
    return look_up(values, str(field), record.where)


def read_aligned(
    inputs_path: str | os.PathLike[str],
    targets_path: str | os.PathLike[str],
    *,
    directory: str | os.PathLike[str] = "",
) -> Iterator[Example]:
    """Yields the pairs of two text files whose lines correspond.

    Args:
      inputs_path: a source text on each line, plain or `.gz`.
      targets_path: the reference of each source text, on the same line.
      directory: the directory of relative paths.
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
