"""The directory of `specjax train`: it touches what it has made, and nothing else."""

import json
import os
import shutil

import pytest

from specjax.cli.main import main
from specjax.runs.run_directory import RunDirectory
from tests.cli.test_train import FILES, SYLLABLES


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    for name, count in (("train", 40), ("validation", 8)):
        texts = [f"{a} {b}" for a in SYLLABLES for b in SYLLABLES][:count]
        (directory / f"{name}.tsv").write_text("".join(f"{t}\t{t}\n" for t in texts))
    return directory


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
