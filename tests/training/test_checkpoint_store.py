"""A damaged checkpoint is refused; without it the run ends as if it had not been damaged."""

import json
import os
import shutil

import pytest

from specjax.training.checkpoint_store import CHECKPOINTS_NAME, CheckpointStore
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


def link(step):
    mine = step.parents[2] / "mine"
    mine.mkdir()
    shutil.rmtree(step)
    step.symlink_to(mine)


def pipe(step):
    """A run does not wait for a writer."""
    (step / "specjax_checksums.json").unlink()
    os.mkfifo(step / "specjax_checksums.json")


def of_another_step(step):
    shutil.rmtree(step)
    shutil.copytree(step.with_name("10"), step)


def of_another_run(step):
    other = step.parents[2] / "other"
    train_copies(other, num_steps=20, seed=8)
    shutil.rmtree(step)
    shutil.copytree(other / CHECKPOINTS_NAME / "20", step)


@pytest.mark.parametrize(
    ("damage", "step"),
    [
        *((damage, 10) for damage in (truncate, change_the_loss, link, pipe)),
        *((damage, 20) for damage in (tear_the_metrics, flip_a_bit)),
        *((damage, 20) for damage in (of_another_step, of_another_run)),
    ],
)
def test_a_damaged_checkpoint_is_refused_and_without_it_the_run_ends_alike(
    whole, tmp_path, damage, step
):
    half, result = whole
    run = tmp_path / "run"
    shutil.copytree(half, run)
    place = run / CHECKPOINTS_NAME / str(step)
    damage(place)
    with pytest.raises(ValueError, match="cannot be read .*or delete it, to continue") as error:
        train_copies(run)
    assert str(place) in str(error.value)
    assert ("is of another run or step" in str(error.value)) == ("another" in damage.__name__)
    place.unlink() if place.is_symlink() else shutil.rmtree(place)
    again = train_copies(run)
    assert again[:2] == result[:2]
    assert_equal_trees(again.params, result.params)


@pytest.mark.parametrize("kind", ["empty", "copied", "file", "later"])
def test_what_may_be_an_incomplete_checkpoint_is_set_aside(whole, tmp_path, capsys, kind):
    half, result = whole
    run = tmp_path / "run"
    shutil.copytree(half, run)
    place = run / CHECKPOINTS_NAME / ("999" if kind == "later" else "20")
    if kind == "later":
        shutil.copytree(run / CHECKPOINTS_NAME / "20", place)
    if kind in ("copied", "later"):
        (place / "specjax_checksums.json").unlink()
    else:
        shutil.rmtree(place)
        place.touch() if kind == "file" else place.mkdir()
    before = {path.relative_to(place) for path in place.rglob("*")}
    again = train_copies(run)
    aside = place.with_name(f"{place.name}.earlier-1")
    assert f"is not used, and is now {aside}" in capsys.readouterr().err
    assert {path.relative_to(aside) for path in aside.rglob("*")} == before
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
    assert not (place / "deleted").exists()
    assert capsys.readouterr().err == ""


def test_other_files_among_deleted_checkpoints_are_set_aside(whole, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(whole[0], run)
    place = run / CHECKPOINTS_NAME
    (place / "notes.txt").write_text("mine")
    (place / "10" / "notes.txt").write_text("mine")  # of a checkpoint that will not be kept
    (place / "deleted" / "20").mkdir(parents=True)
    (place / "deleted" / "20" / "notes.txt").write_text("mine")
    shutil.copytree(place / "10", place / "deleted" / "of another")
    train_copies(run, num_steps=50)
    notes = sorted(str(path.relative_to(place)) for path in place.rglob("notes.txt"))
    assert not (place / "10").exists()
    assert notes == [
        "deleted.earlier-1/20/notes.txt",
        "deleted.earlier-1/of another/notes.txt",
        "deleted.earlier-2/10/notes.txt",
        "notes.txt",
    ]
    assert find_damage(place / "deleted.earlier-1" / "of another") is None
    assert [path.name for path in (place / "deleted.earlier-2" / "10").iterdir()] == ["notes.txt"]
    assert capsys.readouterr().err.count("has files that are not this run's: now ") == 2
