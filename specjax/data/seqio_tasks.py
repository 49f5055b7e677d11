"""Reads pairs of texts from seqio tasks. This module imports seqio and TensorFlow."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from specjax.data.tfds_names import TASK_PREFIX

try:
    import seqio
except ImportError as error:
    raise ValueError(
        f"a seqio task needs seqio, which cannot be imported ({error}): "
        "in the checkout, run pip install '.[seqio]'"
    ) from None


def task_texts(
    name: str, split: str, inputs_field: Any, targets_field: Any
) -> Iterator[tuple[str, str | None]]:
    """Yields (input, reference) texts of a registered task or mixture, unshuffled.

    A feature's text is `<feature>_pretokenized` where the task keeps it, else what the feature's
    vocabulary decodes. The prompts are then tokenised like any other text, by the model's own
    tokenizer.

    Args:
      name: the registered task or mixture.
      split: one of its splits.
      inputs_field: the feature to read as the input.
      targets_field: the feature to read as the reference, or None.

    Yields:
      (input, reference or None).

    Raises:
      ValueError: the task, the split or a feature is unknown.
    """
    task = _task(name, split)
    fields = [inputs_field] + ([targets_field] if targets_field is not None else [])
    for field in fields:
        if field not in task.output_features:
            raise ValueError(
                f"seqio task {name!r} has no feature {field!r}; its features are "
                f"{list(task.output_features)}"
            )
    for row in _rows(task, split):
        texts = [_text(row, field, task.output_features[field].vocabulary) for field in fields]
        yield texts[0], texts[1] if len(texts) == 2 else None


def task_records(name: str, split: str) -> Iterator[dict[str, Any]]:
    """Yields the records of a registered task or mixture, unshuffled.

    Those of specjax (`specjax.data.tfds_tasks`) are registered here.

    Args:
      name: the task or mixture.
      split: one of its splits.

    Yields:
      For each row its texts, numbers and lists of them; what is tokens as the text that it was made
      of (`<feature>_pretokenized`) or that the feature's vocabulary decodes.

    Raises:
      ValueError: the task or the split is unknown.
    """
    if name.startswith(TASK_PREFIX):
        from specjax.data.tfds_tasks import register

        register(name)
    task = _task(name, split)
    for row in _rows(task, split):
        made = {key: _value(value) for key, value in row.items()}
        for field, feature in task.output_features.items():
            tokens = row.get(field)
            if f"{field}_pretokenized" in row:
                made[field] = _text(row, field, None)
            elif isinstance(tokens, np.ndarray) and tokens.ndim == 1 and tokens.dtype.kind in "iu":
                made[field] = _text(row, field, feature.vocabulary)
        yield _nested(made)


def _task(name: str, split: str) -> Any:
    try:
        task = seqio.get_mixture_or_task(name)
    except ValueError:
        raise ValueError(
            f"seqio has no task or mixture {name!r}; import the module that registers "
            "it (in a gin file: import my_tasks)"
        ) from None
    if split not in task.splits:
        raise ValueError(
            f"seqio task {name!r} has no split {split!r}; its splits are {list(task.splits)}"
        )
    return task


def _rows(task: Any, split: str) -> Iterator[dict[str, Any]]:
    # Without num_epochs a mixture would repeat without end.
    dataset = task.get_dataset(sequence_length=None, split=split, shuffle=False, num_epochs=1)
    yield from dataset.as_numpy_iterator()


def _nested(values: dict[str, Any]) -> dict[str, Any]:
    """The values of `answer.text` under `text` in an object `answer`."""
    made: dict[str, Any] = {}
    for name, value in values.items():
        *outer, last = name.split(".")
        inner = made
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return made


def _value(value: Any) -> Any:
    """A value of NumPy as JSON has it."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list):
        return [_value(one) for one in value]
    return value.decode("utf-8") if isinstance(value, bytes) else value


def _text(row: dict[str, Any], field: str, vocabulary: Any) -> str:
    text = row.get(f"{field}_pretokenized")
    if text is None:
        return str(vocabulary.decode([int(token) for token in row[field]]))
    return text.decode("utf-8") if isinstance(text, bytes) else str(text)
