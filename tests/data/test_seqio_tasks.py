"""Tests with a stand-in for seqio, which is an optional extra, and with seqio if installed."""

import importlib.util
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import numpy as np
import pytest

from specjax.data.examples import Example, read_examples, read_records

ROOT = Path(__file__).parents[2]


class Vocabulary:
    def decode(self, tokens):
        return " ".join(f"w{t}" for t in tokens)


class Task:
    splits = ("train", "test")
    output_features = {  # noqa: RUF012
        "inputs": types.SimpleNamespace(vocabulary=Vocabulary()),
        "targets": types.SimpleNamespace(vocabulary=Vocabulary()),
    }

    def get_dataset(self, sequence_length, split, shuffle, num_epochs):
        assert sequence_length is None
        assert not shuffle
        assert num_epochs == 1
        rows = [
            {"inputs": [4, 5], "inputs_pretokenized": "größe".encode(), "targets": [len(split)]}
        ]
        return types.SimpleNamespace(as_numpy_iterator=lambda: iter(rows))


@pytest.fixture
def seqio(monkeypatch):
    def get_mixture_or_task(name):
        if name != "my_task":
            raise ValueError(f"No Task or Mixture found with name: {name}\nAvailable: ...")
        return Task()

    module = types.ModuleType("seqio")
    module.get_mixture_or_task = get_mixture_or_task
    monkeypatch.setitem(sys.modules, "seqio", module)


def test_texts_are_pretokenized_or_decoded(seqio):
    (found,) = read_examples("seqio:my_task", targets_field="targets", split="test")
    assert found == Example(0, "größe", "w4", "seqio:my_task, test, example 0")
    assert next(read_examples("seqio:my_task"))[:3] == (0, "größe", None)


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("seqio:other", {}, "seqio has no task or mixture 'other': import the module"),
        ("seqio:", {}, "seqio: has no task: write seqio:TASK"),
        ("seqio:my_task", {"split": "dev"}, "has no split 'dev'; its splits are"),
        (
            "seqio:my_task",
            {"inputs_field": "text"},
            "there is no field 'text': the record has",
        ),
    ],
)
def test_unknown_names_give_an_error_of_one_line(seqio, source, options, message):
    with pytest.raises(ValueError, match=message) as error:
        list(read_examples(source, **options))
    assert "\n" not in str(error.value)


def test_without_seqio_the_error_gives_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "seqio", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[seqio\]'"):
        list(read_examples("seqio:my_task"))


class ConnectError(Exception):
    """As httpx has it: no OSError."""


class Names(dict):
    """seqio's registry."""

    names = dict.keys

    def add(self, name, source, preprocessors, output_features):
        (change,) = preprocessors
        self[name] = types.SimpleNamespace(
            splits=source.splits,
            output_features=output_features,
            get_dataset=lambda **_: change(Rows(source.read())),
        )


class Rows(list):
    as_numpy_iterator = list.__iter__

    def map(self, change):
        return Rows(map(change, self))


def with_tasks(monkeypatch, read):
    """A registry whose data sets `read` reads, by their names."""
    registry, module = Names(), types.ModuleType("seqio")
    module.TaskRegistry, module.get_mixture_or_task = registry, registry.__getitem__
    module.TfdsDataSource = lambda name, splits: types.SimpleNamespace(
        splits=splits, read=lambda: read(name)
    )
    monkeypatch.setitem(sys.modules, "seqio", module)


def test_tasks_on_tensorflow_datasets_have_the_fields_of_public_files(monkeypatch):
    def read(name):
        assert name == "squad/v2.0:3.0.0"
        answers = {"text": np.array([b"gr\xc3\xbcn"], object), "answer_start": np.array([4])}
        return [{"title": b"T", "context": b"C", "question": b"Q", "id": b"7", "answers": answers}]

    with_tasks(monkeypatch, read)
    for _ in range(2):  # it is registered once
        (record,) = read_records("seqio:specjax_squad2", split="validation")
    assert record.values == {
        "title": "T", "context": "C", "question": "Q", "answers": {"text": ["grün"]}
    }  # fmt: skip
    assert record.where == "seqio:specjax_squad2, validation, example 0"
    with pytest.raises(
        ValueError, match="unknown seqio task 'specjax_other': choose from specjax_wmt14"
    ):
        list(read_records("seqio:specjax_other"))


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (
            ConnectError("[Errno -2] Name or\nservice not known"),
            ValueError,
            r"seqio task 'specjax_xsum': the data set xsum:1\.1\.0 is not prepared in TFDS_DATA_"
            r"DIR .*cannot be downloaded \(ConnectError: \[Errno -2\] Name or service not known\): "
            "connect to the internet, set TFDS_DATA_DIR",
        ),
        (
            ModuleNotFoundError("No module named 'datasets'", name="datasets"),
            ImportError,
            "'specjax_xsum': TensorFlow Datasets needs the package datasets, which is not "
            "installed: run pip install datasets$",
        ),
    ],
    ids=["offline", "package"],
)
def test_data_that_cannot_be_prepared_give_the_remedy(monkeypatch, error, kind, message):
    def read(name):
        raise error

    with_tasks(monkeypatch, read)
    with pytest.raises(kind, match=message) as raised:
        list(read_examples("seqio:specjax_xsum", inputs_field="document"))
    assert "\n" not in str(raised.value)


def test_an_own_task_s_error_is_its_own(monkeypatch, seqio):
    def read(*args, **options):
        raise ConnectError("own")

    monkeypatch.setattr(Task, "get_dataset", read)
    with pytest.raises(ConnectError, match="own"):
        list(read_examples("seqio:my_task"))


def test_seqio_brings_what_tensorflow_datasets_imports():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = extras["optional-dependencies"]
    assert any(name.startswith("importlib_resources") for name in extras["seqio"])
    assert "specjax[seqio]" in extras["t5x"]
    assert "\nimportlib_resources==" in (ROOT / "constraints.txt").read_text()


def test_files_are_read_without_seqio_or_tensorflow(tmp_path):
    (tmp_path / "a.txt").write_text("a\n")
    code = (
        "import sys; from specjax.data.examples import read_examples;"
        f"list(read_examples({str(tmp_path / 'a.txt')!r}));"
        "assert not {'seqio', 'tensorflow', 'gin'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(importlib.util.find_spec("seqio") is None, reason="seqio is not installed")
def test_a_real_task(tmp_path):
    code = f"""
import functools, seqio, tensorflow as tf
open({str(tmp_path / "a.tsv")!r}, "w").write("hallo\\thello\\ngröße\\tsize\\n")
def columns(dataset):
    def split(line):
        parts = tf.strings.split(line, "\\t")
        return {{"inputs": parts[0], "targets": parts[1]}}
    return dataset.map(split)
for keep in (True, False):
    seqio.TaskRegistry.add(
        f"specjax_toy_{{keep}}",
        source=seqio.TextLineDataSource({{"train": {str(tmp_path / "a.tsv")!r}}}),
        preprocessors=[
            columns,
            functools.partial(seqio.preprocessors.tokenize, copy_pretokenized=keep),
            seqio.preprocessors.append_eos,
        ],
        output_features={{k: seqio.Feature(seqio.ByteVocabulary()) for k in ("inputs", "targets")}},
    )
seqio.MixtureRegistry.add("specjax_mix", ["specjax_toy_True"], default_rate=1.0)
from specjax.data.examples import read_examples
expected = [(0, "hallo", "hello"), (1, "größe", "size")]
for name in ("specjax_toy_True", "specjax_toy_False", "specjax_mix"):
    found = [e[:3] for e in read_examples(f"seqio:{{name}}", targets_field="targets")]
    assert found == expected, (name, found)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
