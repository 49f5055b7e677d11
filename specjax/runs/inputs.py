"""The inputs of a run."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from specjax.checks import check_part
from specjax.data.examples import Example, read_examples
from specjax.data.few_shot import FewShot
from specjax.errors import UserError
from specjax.text import Decoder
from specjax.text.requests import checked_chat


def read_inputs(
    source: str | os.PathLike[str],
    *,
    format: str | None = None,
    inputs_field: str | int | None = None,
    targets_field: str | int | None = None,
    split: str = "test",
    task: FewShot | None = None,
) -> list[Example]:
    """Reads a source (see `read_examples`); a task makes the prompts, else each input is one."""
    if task is None:
        fields: dict[str, Any] = {"inputs_field": inputs_field, "targets_field": targets_field}
        return list(read_examples(source, format=format, split=split, **fields))
    check_part("task", task, ("read",), "FewShot(prompt='Question: {question}')")
    for name, field in (("inputs_field", inputs_field), ("targets_field", targets_field)):
        if field is not None:
            raise UserError(f"{name} must be left out: the task names the fields, got {field!r}")
    return task.read(source, format=format, split=split)


def tokens_of(
    decoder: Decoder, text: str, name: str, *, chat: bool | Mapping[str, Any], truncate: str | None
) -> np.ndarray:
    """The tokens of an input, whose name is for messages.

    `chat` says whether it is a user's message for the model's chat template, or has its options.
    """
    options = checked_chat("chat", chat)
    said: Any = text if options is None or not text.strip() else [{"role": "user", "content": text}]
    return decoder.encode(said, name, truncate=truncate, chat_template_kwargs=options)
