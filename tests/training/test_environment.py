import json

import jax
import pytest

from specjax.training import environment as current
from specjax.training.environment import ENVIRONMENTS_NAME, check_environment, streams
from specjax.training.trainer import run_directory
from tests.training.toy import train_copies


def record(directory, **changes):
    """What an earlier start at step 0 would have left."""
    entry = {"step": 0, **current(), **changes}
    with run_directory(directory) as run:
        if not run.kept:
            run.claim({})
        run.write(ENVIRONMENTS_NAME, json.dumps([entry]).encode())


def history(directory):
    return json.loads((directory / ENVIRONMENTS_NAME).read_text())


def check(directory, step=5, allow=False):
    with run_directory(directory) as run:
        check_environment(run, step, allow_other_streams=allow)


def older(name="jax", version="0.9.0"):
    return {"versions": {**current()["versions"], name: version}}


def test_a_run_records_versions_generator_and_device(tmp_path):
    train_copies(tmp_path, num_steps=1)
    (entry,) = history(tmp_path)
    assert entry["step"] == 0
    assert entry["versions"].keys() >= {"specjax", "jax", "jaxlib", "flax", "optax"}
    assert entry["versions"]["jax"] == jax.__version__
    assert entry["generator"] == "threefry2x32"
    assert entry["device"].startswith("cpu: ")


def test_streams_do_not_follow_the_default_generator():
    expected = streams()
    with jax.default_prng_impl("rbg"):
        assert streams() == expected


def test_the_same_environment_is_silent_and_leaves_the_record(tmp_path, capsys):
    record(tmp_path)
    before = history(tmp_path)
    check(tmp_path)
    assert history(tmp_path) == before
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (older(), f"jax: 0.9.0 there, {jax.__version__} here"),
        (older("flax", "0.11.0"), "flax: 0.11.0 there, "),
        ({"device": "gpu: some card"}, "device: gpu: some card there, cpu: "),
    ],
)
def test_other_versions_with_the_same_streams_warn(tmp_path, capsys, changes, told):
    record(tmp_path, **changes)
    check(tmp_path)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert told in error
    assert "warning" in error
    assert [entry["step"] for entry in history(tmp_path)] == [0, 5]
    # It is said once: the run is now this environment's.
    check(tmp_path, step=6)
    assert capsys.readouterr().err == ""


def test_other_streams_are_refused_unless_allowed(tmp_path, capsys):
    train_copies(tmp_path, num_steps=1)
    record(tmp_path, **older(), streams="0123456789abcdef")
    with pytest.raises(ValueError, match="was trained with other random streams") as error:
        train_copies(tmp_path, num_steps=2)
    assert f"jax: 0.9.0 there, {jax.__version__} here" in str(error.value)
    assert "allow_other_streams=True" in str(error.value)
    assert "\n" not in str(error.value)
    assert len(history(tmp_path)) == 1
    assert train_copies(tmp_path, num_steps=2, allow_other_streams=True).step == 2
    assert "streams: 0123456789abcdef there" in capsys.readouterr().err
    assert [entry["step"] for entry in history(tmp_path)] == [0, 1]


def test_a_run_without_a_checkpoint_belongs_to_nobody(tmp_path):
    record(tmp_path, streams="0123456789abcdef")
    check(tmp_path, step=0)
    assert history(tmp_path) == [{"step": 0, **current()}]


def test_a_damaged_record_is_told(tmp_path):
    record(tmp_path)
    (tmp_path / ENVIRONMENTS_NAME).write_text("[{}]")
    with pytest.raises(ValueError, match="environments.json is damaged; delete it, and the run"):
        check(tmp_path)
