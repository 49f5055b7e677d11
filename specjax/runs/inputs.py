"""The inputs of a run, and their names in messages."""

import os
from typing import Any

from specjax.checks import check_part
from specjax.data import Example, FewShot, read_examples
from specjax.data.examples import SEQIO_PREFIX, guess_format


def read_inputs(
    source: str | os.PathLike[str],
    *,
    format: str | None = None,
    inputs_field: str | int | None = None,
    targets_field: str | int | None = None,
    split: str = "test",
    task: FewShot | None = None,
) -> tuple[list[Example], list[str]]:
    """Reads a source.

    Args:
      source: see `read_examples`.
      format: see `read_examples`.
      inputs_field: see `read_examples`.
      targets_field: see `read_examples`.
      split: see `read_examples`.
      task: makes the prompts, or None where each input is one.

    Returns:
      The inputs, and a name for each: its file and line.

    Raises:
      FileNotFoundError: there is no such file.
      TypeError: `task` is none.
      ValueError: the source is unreadable or invalid, or a field is given beside a task.
    """
    if task is None:
        fields: dict[str, Any] = {"inputs_field": inputs_field, "targets_field": targets_field}
        examples = list(read_examples(source, format=format, split=split, **fields))
        first_line = _first_line(source, format, **fields)
        return examples, [f"{source}:{first_line + example.id}" for example in examples]
    check_part("task", task, ("read",), "data.FewShot(prompt='Question: {question}')")
    for name, field in (("inputs_field", inputs_field), ("targets_field", targets_field)):
        if field is not None:
            raise ValueError(f"{name}= must be left out: the task names the fields, got {field!r}")
    made = task.read(source, format=format, split=split)
    return [Example(one.id, one.inputs, one.targets) for one in made], [one.where for one in made]


def _first_line(
    source: str | os.PathLike[str],
    format: str | None,
    inputs_field: str | int | None,
    targets_field: str | int | None,
) -> int:
    """The line number of the first example, for messages; 0 if the source has no lines."""
    source = os.fspath(source)
    if source.startswith(SEQIO_PREFIX):
        return 0
    named = isinstance(inputs_field, str) or isinstance(targets_field, str)
    return 2 if named and (format or guess_format(source)) == "tsv" else 1
