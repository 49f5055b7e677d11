"""The data of the papers' tasks in TensorFlow Datasets: names, splits and fields."""

from typing import NamedTuple

# Of the names of the seqio tasks.
TASK_PREFIX = "specjax_"


class TfdsData(NamedTuple):
    """A data set.

    Attributes:
      name: in TensorFlow Datasets, with its configuration and version.
      fields: name of a record's field -> the way to it in an example; a dot goes into an object.
        Public JSONL files of the same data have the same fields.
      splits: those that are used.
    """

    name: str
    fields: dict[str, tuple[str, ...]]
    splits: tuple[str, ...] = ("train", "validation", "test")


def _same(*names: str) -> dict[str, tuple[str, ...]]:
    return {name: (name,) for name in names}


TFDS_DATA = {
    "wmt14_ende": TfdsData("wmt14_translate/de-en:1.0.0", _same("en", "de")),
    "xsum": TfdsData("xsum:1.1.0", _same("document", "summary")),
    "cnn_dm": TfdsData("cnn_dailymail:3.4.0", _same("article", "highlights")),
    "gsm8k": TfdsData("gsm8k:1.0.0", _same("question", "answer"), ("train", "test")),
    "mbpp": TfdsData(
        "huggingface:mbpp/full",
        _same("text", "code", "test_list", "test_setup_code"),
        ("train", "validation", "test", "prompt"),
    ),
    "squad2": TfdsData(
        "squad/v2.0:3.0.0",
        _same("title", "context", "question") | {"answers.text": ("answers", "text")},
        ("train", "validation"),
    ),
    "web_questions": TfdsData(
        "web_questions:1.0.0", _same("question", "answers"), ("train", "test")
    ),
    "natural_questions": TfdsData(
        "natural_questions_open:1.0.0", _same("question", "answer"), ("train", "validation")
    ),
    "trivia_qa": TfdsData(
        "trivia_qa/unfiltered.nocontext:1.1.0",
        {
            **_same("question"),
            "answer.value": ("answer", "value"),
            "answer.aliases": ("answer", "aliases"),
        },
    ),
}
