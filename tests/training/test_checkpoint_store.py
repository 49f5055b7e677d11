"""A damaged checkpoint is told and set aside, and the run ends as if it had not been damaged."""

import json
import os
import shutil

import pytest

from specjax.training.checkpoint_store import CHECKPOINTS_NAME, DAMAGED_NAME, CheckpointStore
from specjax.writing import find_damage
from tests.training.toy import assert_equal_trees, train_copies


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of 30 steps, and where it stood after 20."""
    directory = tmp_path_factory.mktemp("store")
    train_copies(directory / "run", num_steps=20)
    shutil.copytree(directory / "run", directory / "half")
    return directory / "half", train_copies(directory / "run")


def data_files(step):
    """Orbax keeps some data twice; a damaged copy that nobody reads does no harm."""
    return [path for path in (step / "default").rglob("*") if path.parent.name == "d"]


def truncate(step):
    for file in data_files(step):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def tear_the_metrics(step):
    (step / "metrics" / "metrics").write_text('{"validation_lo')


def flip_a_bit(step):
    for file in data_files(step):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 4
        file.write_bytes(data)


def change_the_loss(step):
    file = step / "metrics" / "metrics"
    file.write_text(json.dumps({**json.loads(file.read_text()), "validation_loss": 0.5}))


@pytest.mark.parametrize("damage", [truncate, tear_the_metrics, flip_a_bit, change_the_loss])
def test_the_run_goes_on_from_the_checkpoint_before(whole, tmp_path, capsys, damage):
    half, result = whole
    run = tmp_path / "run"
    shutil.copytree(half, run)
    damage(run / CHECKPOINTS_NAME / "20")
    again = train_copies(run)
    error = capsys.readouterr().err
    assert "damaged checkpoints" in error and "step 20: " in error and error.count("\n") == 1
    assert "continues from step 10" in error
    assert again[:2] == result[:2]
    assert_equal_trees(again.params, result.params)
    assert (run / DAMAGED_NAME / "20").is_dir()
    train_copies(run)
    assert capsys.readouterr().err == ""


def test_a_checkpoint_that_would_not_be_repeated_is_refused(whole, tmp_path):
    """It may be the best, whose parameters are the result."""
    run = tmp_path / "run"
    shutil.copytree(whole[0], run)
    flip_a_bit(run / CHECKPOINTS_NAME / "10")
    with pytest.raises(ValueError, match="10 cannot be read .*delete it to take the best"):
        train_copies(run)
    assert not (run / DAMAGED_NAME).exists()


@pytest.mark.parametrize("source", ["another run", "another step"])
def test_a_checkpoint_of_another_run_or_step_is_set_aside(whole, tmp_path, capsys, source):
    half, result = whole
    run, other = tmp_path / "run", tmp_path / "other"
    shutil.copytree(half, run)
    if source == "another run":
        train_copies(other, num_steps=20, seed=8)
    place = run / CHECKPOINTS_NAME / "20"
    shutil.rmtree(place)
    shutil.copytree(
        other / CHECKPOINTS_NAME / "20" if other.exists() else place.with_name("10"), place
    )
    again = train_copies(run)
    assert "is of another run or step" in capsys.readouterr().err
    assert again[:2] == result[:2]
    assert_equal_trees(again.params, result.params)


def test_links_among_damaged_checkpoints_lead_nowhere(whole, tmp_path, capsys):
    run, mine = tmp_path / "run", tmp_path / "mine"
    shutil.copytree(whole[0], run)
    mine.mkdir()
    (run / DAMAGED_NAME).mkdir()
    (run / DAMAGED_NAME / "20").symlink_to(mine)
    config = json.loads((run / "train_config.json").read_text())
    (run / "train_config.json").write_text(
        json.dumps({**config, "files": [*config["files"], DAMAGED_NAME]})
    )
    flip_a_bit(run / CHECKPOINTS_NAME / "20")
    train_copies(run)
    assert not list(mine.iterdir()) and (run / DAMAGED_NAME / "20").is_dir()
    step = run / CHECKPOINTS_NAME / "20"
    shutil.rmtree(step)
    step.symlink_to(mine)
    with pytest.raises(ValueError, match="20 cannot be read"):
        train_copies(run)
    step.unlink()
    shutil.copytree(whole[0] / CHECKPOINTS_NAME / "20", step)
    (step / "specjax_checksums.json").unlink()
    os.mkfifo(step / "specjax_checksums.json")
    with pytest.raises(ValueError, match="20 cannot be read"):  # it does not wait for a writer
        train_copies(run)
    capsys.readouterr()


def test_an_incomplete_checkpoint_is_removed(whole, tmp_path, capsys):
    half, result = whole
    run = tmp_path / "run"
    shutil.copytree(half, run)
    shutil.rmtree(run / CHECKPOINTS_NAME / "20")
    (run / CHECKPOINTS_NAME / "20").mkdir()
    again = train_copies(run)
    assert "the checkpoint of step 20 in" in capsys.readouterr().err
    assert_equal_trees(again.params, result.params)


def test_checkpoints_that_are_not_kept_go_whole(whole, tmp_path, capsys, monkeypatch):
    """A deletion in place that is killed would leave what looks like a damaged checkpoint."""
    run = tmp_path / "run"
    shutil.copytree(whole[0], run)
    place = run / CHECKPOINTS_NAME
    monkeypatch.setattr(CheckpointStore, "_empty_deleted", lambda _: None)
    train_copies(run, num_steps=40)
    gone = sorted((place / "deleted").iterdir())
    assert gone and all(find_damage(step) is None for step in gone)
    monkeypatch.undo()
    (gone[0] / "metrics" / "metrics").unlink()
    train_copies(run, num_steps=40)
    assert not (place / "deleted").exists() and not (run / DAMAGED_NAME).exists()
    assert capsys.readouterr().err == ""


def test_without_a_sound_checkpoint_the_remedy_is_told(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole[0], run)
    for step in (run / CHECKPOINTS_NAME).iterdir():
        flip_a_bit(step)
    with pytest.raises(ValueError, match="no checkpoint can be read .*delete it to train from the"):
        train_copies(run)
    assert {step.name for step in (run / CHECKPOINTS_NAME).iterdir()} == {"10", "20"}


def test_checkpoints_without_their_configuration_are_nobodys(whole, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(whole[0], run)
    (run / "train_config.json").unlink()
    with pytest.raises(FileExistsError, match="checkpoints exists, but train_config.json does not"):
        train_copies(run, seed=8)
