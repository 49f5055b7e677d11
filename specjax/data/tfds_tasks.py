"""seqio tasks over TensorFlow Datasets. This module imports seqio."""

from collections.abc import Mapping
from typing import Any

import seqio

from specjax.data.tfds_names import TASK_PREFIX, TFDS_DATA, TfdsData


def register(name: str) -> None:
    """Registers a task of specjax, unless it is there.

    Args:
      name: such as "specjax_gsm8k". Its features are the record's fields, as texts.

    Raises:
      ValueError: there is no such task.
    """
    known = [f"{TASK_PREFIX}{key}" for key in TFDS_DATA]
    if name not in known:
        raise ValueError(f"specjax has no seqio task {name!r}; it has {', '.join(known)}")
    if name in seqio.TaskRegistry.names():
        return
    data = TFDS_DATA[name.removeprefix(TASK_PREFIX)]
    seqio.TaskRegistry.add(
        name,
        source=seqio.TfdsDataSource(data.name, splits=data.splits),
        preprocessors=[lambda dataset: dataset.map(lambda example: _fields(data, example))],
        output_features={},
    )


def _fields(data: TfdsData, example: Mapping[str, Any]) -> dict[str, Any]:
    made = {}
    for field, path in data.fields.items():
        value: Any = example
        for name in path:
            value = value[name]
        made[field] = value
    return made
