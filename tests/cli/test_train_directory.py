"""The directory of `specjax train`: it touches what it has made, and nothing else."""

import json
import os
import shutil

import pytest

from specjax.cli.main import main
from specjax.runs.run_directory import RunDirectory
from tests.cli.test_train import FILES


def command(data, output, *bindings):
    names = {"DATA_DIR": data, "OUTPUT_DIR": output, "NUM_STEPS": 1}
    given = [f"--gin.{name}={value}" for name, value in names.items()]
    return ["train", *FILES, *given, *(f"--gin.{binding}" for binding in bindings)]


def run(data, output, *bindings):
    return main(command(data, output, *bindings))


@pytest.fixture(scope="module")
def trained(data, tmp_path_factory):
    output = tmp_path_factory.mktemp("run") / "out"
    assert run(data, output) == 0
    return output


def content(directory):
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("name", ["model", "checkpoints", "results.json"])
def test_what_is_not_the_runs_own_is_refused_and_kept(data, tmp_path, capsys, name):
    mine = tmp_path / name
    if name.endswith(".json"):
        mine.write_text("mine")
    else:
        mine.mkdir()
        (mine / "file").write_text("mine")
    before = content(tmp_path)
    assert run(data, tmp_path) == 2
    error = capsys.readouterr().err
    assert f"{mine} is not a file of this run: choose another OUTPUT_DIR, or move it" in error
    assert error.count("\n") == 1
    assert content(tmp_path) == before


def a_directory(file):
    file.unlink()
    file.mkdir()


def a_file(directory):
    shutil.rmtree(directory)
    directory.write_text("")


@pytest.mark.parametrize(
    ("change", "name"),
    [(a_directory, "metrics.jsonl"), (a_directory, "results.json"), (a_file, "checkpoints")],
)
def test_what_cannot_be_continued_is_refused_and_kept(
    data, trained, tmp_path, capsys, change, name
):
    place = shutil.copytree(trained, tmp_path / "run")
    change(place / name)
    before = content(place)
    assert run(data, place) == 2
    error = capsys.readouterr().err
    assert f"{place / name} is not a file of this run: choose another OUTPUT_DIR, or mo" in error
    assert error.count("\n") == 1
    assert content(place) == before


def test_checkpoints_without_a_configuration_are_not_continued(data, trained, tmp_path, capsys):
    place = shutil.copytree(trained, tmp_path / "run")
    (place / "train_config.json").unlink()
    before = content(place)
    assert run(data, place) == 2
    assert "is not a file of this run" in capsys.readouterr().err
    assert content(place) == before


def test_a_hard_linked_copy_stays_as_it_was(data, trained, tmp_path):
    """As `cp -al` makes it; whichever of the two continues."""
    place, copy = tmp_path / "run", tmp_path / "copy"
    shutil.copytree(trained, place)
    shutil.copytree(place, copy, copy_function=os.link)
    before = content(copy)
    assert run(data, place, "NUM_STEPS=2") == 0
    assert content(copy) == before
    after = content(place)
    assert after["metrics.jsonl"] != before["metrics.jsonl"]
    assert run(data, copy, "NUM_STEPS=2") == 0
    assert content(place) == after


def test_other_files_in_the_runs_directories_are_kept(data, trained, tmp_path, capsys):
    place = shutil.copytree(trained, tmp_path / "run")
    for directory in [place, *filter(os.path.isdir, place.rglob("*"))]:
        (directory / "mine.txt").write_text("mine")
    mine = sorted(path.relative_to(place).as_posix() for path in place.rglob("mine.txt"))
    before = content(place / "model")
    assert run(data, place) == 0
    assert sorted(path.relative_to(place).as_posix() for path in place.rglob("mine.txt")) == mine
    assert content(place / "model") == before
    # What is written anew does not go over what was changed.
    (place / "model" / "config.json").write_text("changed")
    capsys.readouterr()
    assert run(data, place) == 0
    assert (place / "model.earlier-1" / "config.json").read_text() == "changed"
    assert (place / "model.earlier-1" / "mine.txt").read_text() == "mine"
    assert content(place / "model") == content(trained / "model")
    error = capsys.readouterr().err
    assert f"{place / 'model'} is new; what was there is now {place / 'model.earlier-1'}" in error


@pytest.mark.parametrize("binding", ["VOCABULARY={}/tokenizer", "INIT_FROM={}/model"])
def test_a_source_that_the_run_would_replace_is_refused_and_kept(
    data, trained, tmp_path, capsys, binding
):
    place = shutil.copytree(trained, tmp_path / "run")
    assert run(data, place, binding.format(place)) == 2
    error = capsys.readouterr().err
    assert f" is an output of the run in OUTPUT_DIR={place}" in error
    assert content(place) == content(trained)
    # Another name there is nobody's business.
    mine = shutil.copytree(trained / "model", tmp_path / "other" / "mine")
    assert run(data, mine.parent, f"INIT_FROM={mine}") == 0
    assert content(mine) == content(trained / "model")


def test_a_trainer_that_is_kept_out_touches_nothing(data, trained, tmp_path, capsys):
    """Not even the vocabulary, though it asks for another."""
    place = shutil.copytree(trained, tmp_path / "run")
    before = content(place)
    makes = json.loads((place / "train_config.json").read_text())["files"]
    with RunDirectory(place, config_name="train_config.json", makes=makes):
        assert run(data, place, "VOCABULARY=bytes", "T5Config.vocab_size=259") == 2
    assert "is used by another process" in capsys.readouterr().err
    assert content(place) == before
