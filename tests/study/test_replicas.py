"""How replicas share the settings of a comparison."""

import contextlib
import json

import numpy as np
import pytest

from specjax.cli.main import main
from specjax.runs.processes import Process
from specjax.runs.run_directory import RunDirectory, Store
from specjax.study import Grid, Setting, read_points
from specjax.study.measure import Measured, Times
from specjax.study.points import CHOSEN_NAME, CONFIG_NAME, MADE, Points
from specjax.study.replicas import share
from specjax.study.scores import RELATIVE, Scores
from tests.study import world

SETTINGS = Grid(methods={"OPT({})": (0.1, 0.2, 0.3)}, temperatures=(0.0, 1.0)).settings()


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_shares_are_all_points_and_come_back_in_order(count):
    shares = [share(SETTINGS, Process(i, count)) for i in range(count)]
    others = [point for own in shares for point in own if point.method != "VerifierAlone"]
    assert sorted(others, key=SETTINGS.index) == [
        point for point in SETTINGS if point.method != "VerifierAlone"
    ]
    for own in shares:
        assert own == sorted(own, key=SETTINGS.index)
        alone = {point.temperature for point in own if point.method == "VerifierAlone"}
        assert alone == {point.temperature for point in own}
    # The points of a smaller grid were the same parts'.
    for i, own in enumerate(shares if count < 4 else ()):
        assert set(share(SETTINGS[::2], Process(i, count))) <= {*own, SETTINGS[0]}


def test_a_temperature_with_the_verifier_alone_is_one_parts():
    asked = [*SETTINGS, Setting(method="VerifierAlone", temperature=0.5)]
    shares = [share(asked, Process(i, 2)) for i in range(2)]
    assert sum(asked[-1] in own for own in shares) == 1
    assert {point for own in shares for point in own} == set(asked)


def test_too_many_parts_are_refused():
    with pytest.raises(
        ValueError, match="process_count must be at most 8, the number of settings to"
    ):
        share(SETTINGS, Process(0, 9))


ASKED = world.settings({"OPT({})": (0.1, 0.5), "TokenCascade(rule=Chow({}))": 0.3})
GROWN = world.settings({"OPT({})": (0.1, 0.2, 0.4, 0.5), "TokenCascade(rule=Chow({}))": 0.3})


def lines(output):
    return [json.loads(line) for line in (output / "points.jsonl").read_text().splitlines()]


def test_replicas_measure_each_setting_once_and_the_last_merges(tmp_path, capsys):
    alone, output = tmp_path / "alone", tmp_path / "out"
    expected = world.run(alone, ASKED)
    shares = [share(ASKED, Process(i, 2)) for i in range(2)]
    assert all(len(own) > 1 for own in shares)
    world.run(output, ASKED, process=Process(1, 2))
    assert "part 1 of 2 is done. The last part to end merges" in capsys.readouterr().err
    assert not (output / "points.jsonl").exists()
    assert set(read_points(output / Process(1, 2).directory).of()) == set(shares[1])
    world.run(output, ASKED, process=Process(0, 2))
    assert "merged 2 parts: 5 settings in" in capsys.readouterr().err
    # What one process has: its settings in its order, the same texts and quality.
    for ours, theirs in zip(lines(output), lines(alone), strict=True):
        for name in ("setting", "status", "seeds", "infer", "over_verifier"):
            assert ours[name] == theirs[name]
        assert ours["figures"]["chrf"] == theirs["figures"]["chrf"]
    for one in ASKED:
        ours, theirs = (read_points(place).measured(one).rows for place in (output, alone))
        assert ours == theirs
    results = json.loads((output / "results.json").read_text())
    rows = [[row["method"] for row in found["table_2"]] for found in (results, expected)]
    assert rows[0] == rows[1] and results["done"] == 5
    # It is a run like any other, which a single process goes on with.
    world.run(output, ASKED)
    assert "5 of 5 settings were measured before" in capsys.readouterr().err
    assert (output / CHOSEN_NAME).is_file()
    # A grown grid moves no setting to another part.
    for index, told in ((1, "part 1 of 2 is done"), (0, "merged 2 parts: 7 settings")):
        world.run(output, GROWN, process=Process(index, 2))
        captured = capsys.readouterr().err
        assert told in captured
        new = set(share(GROWN, Process(index, 2))) - set(shares[index])
        assert captured.count(": OPT(") == len(new), captured
    assert [line["setting"] for line in lines(output)] == [one.described() for one in GROWN]
    assert not (output / CHOSEN_NAME).exists()  # of the smaller grid
    # Elsewhere; and a part that has not ended is none.
    assert main(["merge", str(tmp_path / "elsewhere"), str(output)]) == 0
    assert lines(tmp_path / "elsewhere") == lines(output)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["done"] == 7
    part = output / Process(1, 2).directory
    with RunDirectory(part, config_name=CONFIG_NAME, makes=MADE) as run:
        Store(run, "points").remove("grid")
    assert main(["merge", str(output)]) == 2
    told = capsys.readouterr().err
    assert "part-00001-of-00002 has not measured all of its settings: run the same command" in told


def test_parts_of_another_run_are_refused(tmp_path):
    one = world.settings({"OPT({})": 0.1})
    for index, count in ((0, 1), (1, 2)):
        how = world.measuring(num_samples=count)
        with (
            contextlib.nullcontext()
            if index == 0
            else pytest.raises(
                ValueError, match=r"is not part of the same comparison as .*num_samples: 1 there, 2"
            )
        ):
            world.run(tmp_path / "out", one, how=how, process=Process(index, 2))
    assert not (tmp_path / "out" / "points.jsonl").exists()


@pytest.mark.parametrize("failed_first", [True, False])
def test_what_one_part_has_done_another_does_not_make_fail(tmp_path, failed_first):
    """The verifier alone is in several parts, and one of them may have failed it."""
    none = {"value": None, "low": None, "high": None}
    times = Times(np.ones((1, 1, 2)), np.ones((1, 2), int))
    with contextlib.ExitStack() as stack:

        def directory(name):
            run = RunDirectory(tmp_path / name, config_name=CONFIG_NAME, makes=MADE)
            stack.enter_context(run).claim({"name": "same"})
            return Points(run, "chrf", None)

        failed, done, whole = map(directory, ("failed", "done", "whole"))
        failed.put_failed(world.VERIFIER, "texts", MemoryError("no room"))
        measured = Measured([0], [[{"id": 0}]], times, None, 0, 0)
        done.put(world.VERIFIER, "texts", measured, Scores({"chrf": none, RELATIVE: none}, {}), {})
        for source in (failed, done) if failed_first else (done, failed):
            whole.take(source)
        assert set(whole.scored()) == {world.VERIFIER}
