"""How replicas share the points of a sweep."""

import contextlib
import json

import pytest

from specjax.cli.main import main
from specjax.runs.processes import Part
from specjax.sweeping import Point, parts
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
    assert parts._order(shares) == POINTS


def test_a_part_twice_and_too_many_parts_are_refused():
    share = parts.share(POINTS, Part(0, 2))
    with pytest.raises(ValueError, match="the point drafter_alone T=0 is in two parts"):
        parts._order([share, share])
    with pytest.raises(ValueError, match="process_count must be at most 8, the points of the grid"):
        parts.share(POINTS, Part(0, 9))
    with pytest.raises(ValueError, match="are replicas, each with a machine of its own"):
        parts.share(POINTS, Part(0, 2, together=True))


ASKED = world.points(("opt", 0.1), ("token_cascade", 0.3), ("opt", 0.5))


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
    # Elsewhere; and a part that has not ended is none.
    assert main(["merge", str(tmp_path / "elsewhere"), str(output)]) == 0
    assert lines(tmp_path / "elsewhere") == lines(output)
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["done"] == 5
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
