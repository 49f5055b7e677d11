"""Reads pairs of texts from seqio tasks. This module imports seqio and TensorFlow."""

from collections.abc import Iterator
from typing import Any

try:
    import seqio
except ImportError as error:
    raise ValueError(
        f"a seqio task needs seqio, which cannot be imported ({error}): "
        "run pip install 'specjax[seqio]'"
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
    fields = [inputs_field] + ([targets_field] if targets_field is not None else [])
    for field in fields:
        if field not in task.output_features:
            raise ValueError(
                f"seqio task {name!r} has no feature {field!r}; its features are "
                f"{list(task.output_features)}"
            )
    # Without num_epochs a mixture would repeat without end.
    dataset = task.get_dataset(sequence_length=None, split=split, shuffle=False, num_epochs=1)
    for row in dataset.as_numpy_iterator():
        texts = [_text(row, field, task.output_features[field].vocabulary) for field in fields]
        yield texts[0], texts[1] if len(texts) == 2 else None


def _text(row: dict[str, Any], field: str, vocabulary: Any) -> str:
    text = row.get(f"{field}_pretokenized")
    if text is None:
        return str(vocabulary.decode([int(token) for token in row[field]]))
    return text.decode("utf-8") if isinstance(text, bytes) else str(text)
