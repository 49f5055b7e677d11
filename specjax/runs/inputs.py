"""The inputs of a run, and their names in messages."""

import os
from typing import Any

import numpy as np

from specjax.checks import check_part, check_path
from specjax.data import Example, FewShot, read_examples
from specjax.data.examples import SEQIO_PREFIX, guess_format
from specjax.text import Decoder
from specjax.text.prompts import encode, shortened


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


def read_prompts(
    source: str | os.PathLike[str],
    *,
    format: str | None = None,
    inputs_field: str | int | None = None,
    split: str = "train",
    task: FewShot | None = None,
) -> list[Example]:
    """The inputs of a source, whose names and references are not needed; see `read_inputs`."""
    check_path(source, "source=")
    place = os.path.expanduser(source)
    fields: dict[str, Any] = {"format": format, "inputs_field": inputs_field, "split": split}
    return read_inputs(place, task=task, **fields)[0]


def check_truncate(truncate: Any) -> None:
    """Raises ValueError unless it says where prompts are cut, or None."""
    if truncate not in (None, "end", "beginning"):
        raise ValueError(f"truncate must be None, 'end' or 'beginning', got {truncate!r}")


def tokens_of(
    decoder: Decoder, text: str, name: str, *, chat: bool, truncate: str | None
) -> np.ndarray:
    """The tokens of an input.

    Args:
      decoder: what shall decode it.
      text: the input.
      name: what messages call it.
      chat: whether it is a user's message for the model's chat template.
      truncate: "end" or "beginning", where it is cut if it is too long; None refuses it.

    Returns:
      `[n]` int32.

    Raises:
      ValueError: if it is empty or does not fit.
    """
    prompt: Any = [{"role": "user", "content": text}] if chat and text.strip() else text
    if truncate is not None:
        tokens = encode(decoder.tokenizer, prompt, name)
        prompt = shortened(decoder.tokenizer, tokens, decoder.buckets[-1], truncate)
    return decoder.encode(prompt, name)


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
