"""Attacks on the directory of a finished run of each command: nothing outside is touched."""

import json
import os
import shutil

import pytest

from tests.fuzzing import records
from tests.fuzzing.law import assert_untouched, contents
from tests.variants import variants


def configuration(place):
    return min(place.rglob("*_config.json"), key=lambda path: len(path.parts))


def listing(name):
    def attack(place, other, outside):
        path = configuration(place)
        values = json.loads(path.read_text())
        # An unfinished start would be taken back, with all files that it lists.
        values.update(files=[name.format(outside)], kept=False)
        path.write_text(json.dumps(values))

    return attack


def taking_the_configuration(place, other, outside):
    mine = configuration(place)
    theirs = json.loads(configuration(other).read_text())
    kept = {key: json.loads(mine.read_text())[key] for key in ("files", "kept")}
    mine.write_text(json.dumps(theirs | kept))


def replacing(how):
    """Puts something in the place of each file or directory that has records."""

    def attack(place, other, outside):
        for path in tops(place):
            shutil.move(path, outside / path.name)
            how(path, outside / path.name)

    return attack


def replacing_inside(how):
    """The same for the first file in each directory of records."""

    def attack(place, other, outside):
        for top in tops(place):
            inside = sorted(path for path in top.rglob("*") if path.is_file())
            for path in inside[:1]:
                shutil.move(path, outside / path.name)
                how(path, outside / path.name)

    return attack


def tops(place):
    """The files and directories of records in the run's directory, or in that of its first part."""
    home = configuration(place).parent
    names = ("predictions.jsonl", "points", "samples", "checkpoints", "head_data")
    return [home / name for name in names if (home / name).exists()]


# Attack -> what it does, and whether the start must be refused.
ATTACKS = {
    "a directory beside it is listed": (listing("../outside"), True),
    "an absolute path is listed": (listing("{}"), True),
    "the configuration of another run": (taking_the_configuration, True),
    "links": (replacing(lambda path, moved: path.symlink_to(moved)), True),
    "pipes inside": (replacing_inside(lambda path, moved: os.mkfifo(path)), True),
    "pipes": (replacing(lambda path, moved: os.mkfifo(path)), True),
    "copies": (
        replacing(
            lambda path, moved: (shutil.copytree if moved.is_dir() else shutil.copy2)(moved, path)
        ),
        False,
    ),
}


# These read rows of the directory, and write elsewhere.
READING = {"evaluate"}


# These have the stores of `compare` and `train`.
ALIKE = {"limits", "train head"}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("name", variants(sorted(records.RUNS), *(set(records.RUNS) - ALIKE)))
def test_nothing_outside_is_touched(name, attack, tmp_path):
    finished, other, expected = records.made(name)
    place, outside = tmp_path / "out", tmp_path / "outside"
    shutil.copytree(finished, place)
    outside.mkdir()
    (outside / "mine.txt").write_text("mine")
    change, refused = ATTACKS[attack]
    if name in READING and ("listed" in attack or attack == "links"):
        refused = False
    if attack == "pipes inside" and not any(top.is_dir() for top in tops(place)):
        refused = False  # nothing is inside
    change(place, other, outside)
    before = contents(outside)
    if refused:
        with pytest.raises((OSError, ValueError), match=str(place)):
            records.RUNS[name].again(place)
    else:
        assert records.RUNS[name].again(place) == expected
    assert_untouched(before, contents(outside), set())


@pytest.mark.parametrize(
    "name", variants(sorted(set(records.RUNS) - READING), *(set(records.RUNS) - READING - ALIKE))
)
def test_the_run_of_another_command_is_refused(name, tmp_path):
    theirs = "train" if name == "infer" else "infer"
    place = shutil.copytree(records.made(theirs)[0], tmp_path / "out")
    (place / "config.gin").write_text("")  # as the commands write
    before = contents(place)
    with pytest.raises(FileExistsError, match="is not a file of this run"):
        records.RUNS[name].again(place)
    assert_untouched(before, contents(place), set())
