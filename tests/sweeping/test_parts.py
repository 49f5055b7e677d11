"""How replicas share the points of a sweep."""

import contextlib
import json
import types

import pytest

from specjax.cli.main import main
from specjax.runs.processes import Part
from specjax.runs.run_directory import RunDirectory
from specjax.sweeping import Point, parts
from specjax.sweeping.directory import CONFIG_NAME, MADE, PointsDirectory
from specjax.sweeping.scores import RELATIVE, Scores
from tests.sweeping import world

T = (0.0, 1.0)
POINTS = [
    point
    for t in T
    for point in (
        Point(method="verifier_alone", temperature=t),
        Point(method="drafter_alone", temperature=t),
        *(Point(method="opt", strength=s, temperature=t) for s in (0.1, 0.2, 0.3)),
    )
]


KEYS = [point.key for point in POINTS]


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_shares_are_all_points_and_come_back_in_order(count):
    shares = [parts.share(POINTS, Part(i, count)) for i in range(count)]
    others = [point for own in shares for point in own if point.method != "verifier_alone"]
    assert sorted(others, key=POINTS.index) == [
        point for point in POINTS if point.method != "verifier_alone"
    ]
    for own in shares:
        assert own == sorted(own, key=POINTS.index)
        alone = {point.temperature for point in own if point.method == "verifier_alone"}
        assert alone == {point.temperature for point in own}
    assert parts._order(KEYS, shares) == POINTS
    # The points of a smaller grid were the same parts'.
    for i, own in enumerate(shares if count < 4 else ()):
        assert set(parts.share(POINTS[::2], Part(i, count))) <= {*own, POINTS[0]}


def test_a_temperature_with_the_verifier_alone_is_one_parts():
    points = [*POINTS, Point(method="verifier_alone", temperature=0.5)]
    shares = [parts.share(points, Part(i, 2)) for i in range(2)]
    assert sum(points[-1] in own for own in shares) == 1
    assert {point for own in shares for point in own} == set(points)


def test_points_that_no_part_has_and_too_many_parts_are_refused():
    share = parts.share(POINTS, Part(0, 2))
    assert parts._order([share[0].key], [share, share]) == share
    with pytest.raises(ValueError, match="points that one part was asked for are in none, the fi"):
        parts._order(KEYS, [share, share])
    with pytest.raises(ValueError, match="process_count must be at most 8, the points of the grid"):
        parts.share(POINTS, Part(0, 9))
    with pytest.raises(ValueError, match="are replicas, each with a machine of its own"):
        parts.share(POINTS, Part(0, 2, together=True))


ASKED = world.points(("opt", 0.1), ("token_cascade", 0.3), ("opt", 0.5))
GROWN = world.points(("opt", 0.1), ("opt", 0.2), ("token_cascade", 0.3), ("opt", 0.4), ("opt", 0.5))


def lines(output):
    return [json.loads(line) for line in (output / "points.jsonl").read_text().splitlines()]


def test_replicas_measure_each_point_once_and_the_last_merges(tmp_path, capsys):
    alone, output = tmp_path / "alone", tmp_path / "out"
    expected = world.run(alone, ASKED)
    mine = world.Toys()
    world.run(output, ASKED, mine, part=Part(1, 2))
    assert "this is part 1 of 2. The last part to end merges" in capsys.readouterr().err
    assert not (output / "points.jsonl").exists()
    assert {point.method for point in mine.made} == {"verifier_alone", "opt"}
    world.run(output, ASKED, part=Part(0, 2))
    assert "the 2 parts are one: 5 points are in" in capsys.readouterr().err
    # What one process has: its points in its order, the same texts and quality.
    for ours, theirs in zip(lines(output), lines(alone), strict=True):
        for name in ("point", "status", "seeds", "fingerprint", "infer", "over_verifier"):
            assert ours[name] == theirs[name]
        assert ours["figures"]["chrf"] == theirs["figures"]["chrf"]
        for path in ours["predictions"]:
            assert (output / path).read_bytes() == (alone / path).read_bytes()
    results = json.loads((output / "results.json").read_text())
    rows = [[row["curve"] for row in found["table_2"]] for found in (results, expected)]
    assert rows[0] == rows[1] and results["done"] == 5
    # It is a sweep like any other, which a single process goes on with.
    later = world.Toys()
    world.run(output, ASKED, later)
    assert len(later.made) <= 1 + len(ASKED)  # each is made to be compared, none is measured
    # A grown grid moves no point to another part.
    for index, told in ((1, "this is part 1 of 2"), (0, "the 2 parts are one: 7 points")):
        world.run(output, GROWN, part=Part(index, 2))
        captured = capsys.readouterr().err
        assert told in captured and captured.count(": opt(") == 1, captured
    assert [line["point"] for line in lines(output)] == [point.described() for point in GROWN]
    # Elsewhere; and a part that has not ended is none.
    assert main(["merge", str(tmp_path / "elsewhere"), str(output)]) == 0
    assert lines(tmp_path / "elsewhere") == lines(output)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["done"] == 7
    (output / Part(1, 2).name / "results.json").unlink()
    assert main(["merge", str(output)]) == 2
    told = capsys.readouterr().err
    assert "part-00001-of-00002 has not been measured to its end: start that process" in told


def test_parts_of_another_sweep_are_refused(tmp_path):
    one = world.points(("opt", 0.1))
    for index, seeds in ((0, 1), (1, 2)):
        how = world.measuring(seeds=seeds)
        with (
            contextlib.nullcontext()
            if index == 0
            else pytest.raises(
                ValueError, match=r"is a part of another sweep than .*seeds: 1 there, 2 here"
            )
        ):
            world.run(tmp_path / "out", one, how=how, part=Part(index, 2))
    assert not (tmp_path / "out" / "points.jsonl").exists()


@pytest.mark.parametrize("failed_first", [True, False])
def test_what_one_part_has_done_another_does_not_make_fail(tmp_path, failed_first):
    """The verifier alone is in several parts, and one of them may have failed it."""
    point = POINTS[0]
    none = {"value": None, "low": None, "high": None}
    with contextlib.ExitStack() as stack:

        def directory(name):
            run = RunDirectory(tmp_path / name, config_name=CONFIG_NAME, makes=MADE)
            stack.enter_context(run).claim({"name": name})
            return PointsDirectory(run, "chrf", None)

        failed, done, whole = map(directory, ("failed", "done", "whole"))
        failed.put_failed(point, MemoryError("no room"), POINTS)
        measured = types.SimpleNamespace(seeds=[0], records=[[{"id": 0}]])
        done.put(point, measured, Scores({"chrf": none, RELATIVE: none}, {}), {}, POINTS)
        for source in (failed, done) if failed_first else (done, failed):
            whole.take(source, [point])
        assert whole.has(point) and whole.records[point]["status"] == "done"
