"""Records of a run by key: whole or absent, equal bytes, and none that belongs elsewhere."""

import contextlib
import os
import shutil

import numpy as np
import pytest

from specjax.runs.run_directory import RunDirectory, Store

VALUE = {"rows": [{"text": "schön \ud800", "tokens": [1, 2]}], "score": 1.5, "none": None}
ARRAYS = {
    "times": np.arange(6.0).reshape(2, 3),
    "empty": np.zeros((0, 4), np.int32),
    "right": np.array([True, False]),
    "transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
    "scalar": np.array(3),
    "infinite": np.array([np.inf, np.nan]),
}


@contextlib.contextmanager
def store_of(path, **configuration):
    """The store of a run that is open and claimed."""
    with RunDirectory(path, config_name="config.json", makes=("records",)) as run:
        run.claim({"seed": 0, **configuration})
        yield Store(run, "records")


@pytest.fixture
def opened(tmp_path):
    with store_of(tmp_path / "run") as store:
        yield store


FIRST, SECOND = ("OPT(0.2)", 0), ("OPT(0.2)", 1)


def fill(store):
    store.put(FIRST, VALUE, ARRAYS)
    store.put(SECOND, [])


def filled(path, **configuration):
    """The store of a closed run with two records."""
    with store_of(path, **configuration) as store:
        fill(store)
    return store


def test_a_record_comes_back_as_it_was_put(opened):
    assert opened.get("a") is None and opened.keys() == []
    opened.put("a", VALUE, ARRAYS)
    opened.put(("b", 3), 1)
    value, arrays = opened.get("a")
    assert value == VALUE
    assert arrays.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(arrays[name], array)
        assert arrays[name].dtype == array.dtype
    assert opened.get(("b", 3)) == (1, {})
    assert set(opened.keys()) == {"a", ("b", 3)}
    opened.put("a", 2)
    assert opened.get("a") == (2, {})


def test_arrays_can_stay_on_disk(opened):
    opened.put("a", VALUE, ARRAYS)
    value, arrays = opened.get("a")
    assert value == VALUE
    for name, array in ARRAYS.items():
        np.testing.assert_array_equal(arrays[name], array)
    opened.put("a", 0)  # what is mapped stays as it was
    np.testing.assert_array_equal(arrays["times"][1:], ARRAYS["times"][1:])


def test_keys_that_look_alike_have_files_of_their_own(opened):
    keys = ["a/b", "a.b", "../a-b", ("a", "b"), "A/B", "1", 1, (1,), "", "é" * 300]
    for number, key in enumerate(keys):
        opened.put(key, number)
    assert [opened.get(key).value for key in keys] == list(range(len(keys)))
    assert set(opened.keys()) == set(keys)
    assert len({opened.path(key).name.lower() for key in keys}) == len(keys)
    assert {opened.path(key).parent for key in keys} == {opened.path("a").parent}


def test_equal_records_have_equal_bytes(tmp_path):
    def data(name, **configuration):
        directory = filled(tmp_path / name, **configuration).path(FIRST).parent
        return {entry.name: entry.read_bytes() for entry in directory.iterdir()}

    first = data("a")
    assert first == data("b", environment={"device": "other"})
    assert first != data("c", seed=1)


def test_a_run_is_read_without_owning_it(tmp_path):
    with store_of(tmp_path) as store:  # another process is at work
        fill(store)
        reader = RunDirectory(tmp_path, config_name="config.json", makes=("records",))
        reader.peek()
        assert Store(reader, "records").keys() == [FIRST, SECOND]


def other_key(store, path):
    shutil.copy(store.path(SECOND), path)


def other_run(store, path):
    shutil.copy(filled(path.parents[2] / "other", seed=1).path(FIRST), path)


def changed(store, path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def resealed(store, path):
    path.write_bytes(path.read_bytes().replace(b"OPT(0.2)", b"OPT(0.3)"))


def pipe(store, path):
    path.unlink()
    os.mkfifo(path)


def link(store, path):
    path.unlink()
    path.symlink_to(store.path(SECOND))


CHANGES = {
    other_key: r"its key is",
    other_run: "it is from a run of another configuration",
    changed: "it was changed",
    resealed: "it was changed",
    pipe: "it is not a regular file",
    link: "it is not a regular file",
    lambda _, path: path.write_bytes(path.read_bytes()[:-1]): "it is damaged",
    lambda _, path: path.write_bytes(b""): "it is damaged",
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_record_that_is_not_this_one_is_refused(tmp_path, change):
    store = filled(tmp_path / "run")
    path = store.path(FIRST)
    change(store, path)
    with pytest.raises(ValueError, match=CHANGES[change]) as told:
        store.get(FIRST)
    assert str(told.value).startswith(str(path))
    assert str(told.value).endswith("delete it, and run the same command again")
    assert store.get(SECOND) == ([], {})


def test_a_configuration_that_was_edited_has_no_records(tmp_path):
    filled(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"seed": 0', '"seed": 1'))
    run = RunDirectory(tmp_path, config_name="config.json", makes=("records",))
    run.peek()
    with pytest.raises(ValueError, match="another configuration"):
        Store(run, "records").keys()
