"""Records of seqio tasks; specjax's own tasks for the papers' data in TensorFlow Datasets."""

import errno
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from specjax.checks import require
from specjax.errors import MissingLibraryError, UserError

# The prefix of specjax's own tasks.
TASK_PREFIX = "specjax_"


class TfdsData(NamedTuple):
    """A data set of TensorFlow Datasets.

    Attributes:
      name: its name in TensorFlow Datasets, with configuration and version.
      fields: the fields of a record, those of public JSONL files of the same data: a key of an
        example, or keys joined by dots, the outermost first.
      splits: the available splits.
    """

    name: str
    fields: tuple[str, ...]
    splits: tuple[str, ...] = ("train", "validation", "test")


TFDS_DATA = {
    "wmt14_ende": TfdsData("wmt14_translate/de-en:1.0.0", ("en", "de")),
    "xsum": TfdsData("xsum:1.1.0", ("document", "summary")),
    "cnn_dm": TfdsData("cnn_dailymail:3.4.0", ("article", "highlights")),
    "gsm8k": TfdsData("gsm8k:1.0.0", ("question", "answer"), ("train", "test")),
    "mbpp": TfdsData(
        "huggingface:mbpp/full",
        ("text", "code", "test_list", "test_setup_code"),
        ("train", "validation", "test", "prompt"),
    ),
    "squad2": TfdsData(
        "squad/v2.0:3.0.0",
        ("title", "context", "question", "answers.text"),
        ("train", "validation"),
    ),
    "web_questions": TfdsData("web_questions:1.0.0", ("question", "answers"), ("train", "test")),
    "natural_questions": TfdsData(
        "natural_questions_open:1.0.0", ("question", "answer"), ("train", "validation")
    ),
    "trivia_qa": TfdsData(
        "trivia_qa/unfiltered.nocontext:1.1.0", ("question", "answer.value", "answer.aliases")
    ),
}


def task_rows(name: str, split: str) -> Iterator[dict[str, Any]]:
    """Yields the records of a task or mixture, unshuffled.

    Yields:
      For each row its texts, numbers and lists of them. Token features become texts, from
      `<feature>_pretokenized` or by the feature's vocabulary, for the model's own tokenizer.
    """
    if not name:
        raise UserError("seqio: has no task: write seqio:TASK")
    seqio = require("seqio", "seqio")
    own = None
    if name.startswith(TASK_PREFIX):
        if (own := TFDS_DATA.get(name.removeprefix(TASK_PREFIX))) is None:
            tasks = ", ".join(f"{TASK_PREFIX}{key}" for key in TFDS_DATA)
            raise UserError(f"unknown seqio task {name!r}: choose from {tasks}")
        if name not in seqio.TaskRegistry.names():
            data = own
            seqio.TaskRegistry.add(
                name,
                source=seqio.TfdsDataSource(own.name, splits=own.splits),
                preprocessors=[lambda dataset: dataset.map(lambda x: _fields(data, x))],
                output_features={},  # its features are texts
            )
    try:
        task = seqio.get_mixture_or_task(name)
    except ValueError:
        raise UserError(
            f"seqio has no task or mixture {name!r}: import the module that registers "
            "it (in a gin file: import my_tasks)"
        ) from None
    if split not in task.splits:
        raise UserError(
            f"seqio task {name!r} has no split {split!r}; its splits are {list(task.splits)}"
        )
    # Without num_epochs a mixture would never end.
    options = {"sequence_length": None, "split": split, "shuffle": False, "num_epochs": 1}
    dataset = task.get_dataset(**options) if own is None else _prepare(name, own, task, options)
    for row in dataset.as_numpy_iterator():
        values = {key: _value(value) for key, value in row.items()}
        for field, feature in task.output_features.items():
            tokens = np.asarray(row.get(field, ""))
            if f"{field}_pretokenized" in row:
                values[field] = str(_value(row[f"{field}_pretokenized"]))
            elif tokens.ndim == 1 and tokens.dtype.kind in "iu":
                values[field] = str(feature.vocabulary.decode(tokens.tolist()))
        yield _nest(values)


def _prepare(name: str, data: TfdsData, task: Any, options: Mapping[str, Any]) -> Any:
    """The data set of a task of `TFDS_DATA`, which TensorFlow Datasets downloads at first."""
    try:
        return task.get_dataset(**options)
    except ModuleNotFoundError as error:
        raise MissingLibraryError(
            f"seqio task {name!r}: TensorFlow Datasets needs the package {error.name}, which is "
            f"not installed: run pip install {error.name}"
        ) from error
    except Exception as error:  # of requests, httpx, urllib, TensorFlow or a file system
        if getattr(error, "errno", None) in (errno.EACCES, errno.EPERM, errno.ENOSPC):
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        raise UserError(
            f"seqio task {name!r}: the data set {data.name} is not prepared in TFDS_DATA_DIR "
            f"(default ~/tensorflow_datasets) and cannot be downloaded ({reason}): connect to the "
            "internet, set TFDS_DATA_DIR to a directory with the prepared data set, or read local "
            "files with the same fields"
        ) from error


def _fields(data: TfdsData, example: Any) -> dict[str, Any]:
    values = {}
    for field in data.fields:
        value = example
        for name in field.split("."):
            value = value[name]
        values[field] = value
    return values


def _nest(values: dict[str, Any]) -> dict[str, Any]:
    """Puts the value of `answer.text` under `text` in an object `answer`."""
    nested: dict[str, Any] = {}
    for name, value in values.items():
        *outer, last = name.split(".")
        inner = nested
        for part in outer:
            inner = inner.setdefault(part, {})
        inner[last] = value
    return nested


def _value(value: Any) -> Any:
    """Turns a NumPy value into a JSON value."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list):
        return [_value(item) for item in value]
    return value.decode("utf-8") if isinstance(value, bytes) else value
