"""A sweep in its directory: what a point has, what fails, what a kill leaves."""

import dataclasses
import gzip
import importlib
import json
import shutil

import jax
import numpy as np
import pytest

from specjax.data import Example
from specjax.runs.evaluation import evaluate
from specjax.runs.lines import line_of
from specjax.runs.run_directory import RunDirectory
from specjax.sweeping import Point, Times, measure, plots
from specjax.sweeping.measurement import Bench
from specjax.sweeping.scores import RELATIVE
from tests.sweeping import world

ASKED = world.points(("opt", 0.1), ("opt", 0.5), ("token_cascade", 0.7), ("lossy", 0.4))


def lines(output):
    return [json.loads(line) for line in (output / "points.jsonl").read_text().splitlines()]


def without_times(record):
    """What does not depend on how fast the machine was."""
    figures = record.get("figures", {})
    kept = {k: v for k, v in figures.items() if "latency" not in k and "time" not in k}
    rest = {k: v for k, v in record.items() if k not in ("process", "checksum", "traceback")}
    return rest | {"figures": kept}


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    output = tmp_path_factory.mktemp("sweep") / "out"
    return output, world.run(output, ASKED)


def test_every_point_has_its_figures(done):
    output, results = done
    records = lines(output)
    assert [Point.of(record) for record in records] == ASKED
    assert results["done"] == len(ASKED) and not results["failed"]
    verifier, drafter, opt, lenient, cascade, _ = records
    for record in records:
        figures = record["figures"]
        assert record["status"] == "done" and record["seeds"] == [0, 1] and record["texts"] == 6
        for name in ("chrf", "output_length", "cut_share", "latency", RELATIVE):
            assert figures[name]["low"] <= figures[name]["value"] <= figures[name]["high"], name
        assert record["latency_of"] == {"texts": 2, "batch_size": 1, "repeats": 1}
        assert set(record["over_verifier"]) == {"chrf"}
    assert verifier["figures"][RELATIVE]["value"] == 1.0
    assert verifier["figures"]["nats_per_token"]["value"] == 0.0
    assert verifier["figures"]["deferrals_per_token"]["value"] == 1.0
    # The drafter alone is no verifier of itself.
    assert "nats_per_token" not in drafter["figures"]
    assert "deferrals_per_token" not in drafter["figures"]
    assert lenient["strength"] == 0.5 and lenient["max_draft"] == 2
    for name in ("rejection_rate", "discard_rate", "tokens_per_verifier_call", "nats_per_token"):
        assert opt["figures"][name]["value"] is not None
    assert opt["figures"]["nats_per_token"]["error"] > 0.0
    rates = [record["figures"]["rejection_rate"]["value"] for record in (lenient, opt)]
    assert rates[0] <= rates[1]
    # Its drafter writes, but no blocks, of which anything could be rejected.
    assert 0.0 < cascade["figures"]["deferrals_per_token"]["value"] < 1.0
    assert cascade["figures"]["drafter_share"]["value"] > 0.0
    for name in ("rejection_rate", "discard_rate", "nats_per_token", "impossible_share"):
        assert cascade["figures"][name]["value"] is None, name
    ours, theirs = (r["figures"]["chrf"]["value"] for r in (opt, verifier))
    assert opt["over_verifier"]["chrf"]["value"] == pytest.approx(ours - theirs)


def test_points_of_one_method_share_their_programs(done):
    records = {record["point"]: record for record in lines(done[0])}
    first, second = (next(r for r in records if r.startswith(f"opt({a})")) for a in (0.1, 0.5))
    assert records[first]["process"]["compiled"] > 0, "the count counts nothing"
    assert records[second]["process"]["compiled"] == 0
    assert all(record["process"]["compiled_while_timed"] == 0 for record in records.values())


class Late:
    """A decoder that compiles a program of its own at the second text, as a deferral may."""

    def __init__(self, decoder):
        self._decoder, self.buckets, self.rows = decoder, decoder.buckets, decoder.rows
        self._own = jax.jit(lambda x: x + 1.0)
        self._always, self.asked = False, []

    def always(self):
        self._always = True
        return self

    def __call__(self, prompts, *, ids, **options):
        self.asked.append(ids[0])
        if ids == [1]:
            own = jax.jit(lambda x: x + 1.0) if self._always else self._own
            own(1.0)
        return self._decoder(prompts, ids=ids, **options)


def test_no_time_has_compiling_in_it():
    bench = Bench(world.EXAMPLES, [world.Toys()(ASKED[0], 4).encode(t) for t in world.TEXTS],
                  world.REFERENCES, world.measuring())  # fmt: skip
    made = []

    def make(rows):
        made.append(Late(world.Toys()(ASKED[2], rows)))
        return made[-1]

    found = measure(make, None, bench, 1.0)
    # One text warms; of two seeds the first compiles at the second text, which is timed again.
    assert made[-1].asked == [0, 0, 1, 1, 0, 1]
    assert found.compiled_late == 0  # in the times that count
    made_anew = measure(lambda rows: make(rows).always(), None, bench, 1.0)
    # A text that compiles whenever it runs is timed three times with each seed, and told.
    assert made[-1].asked == [0, 0, 1, 1, 1, 0, 1, 1, 1]
    assert made_anew.compiled_late > 0


def test_times_with_compiling_in_them_are_told(done, tmp_path, capsys):
    output = tmp_path / "out"
    shutil.copytree(done[0], output)
    assert "include compiling" not in capsys.readouterr().err
    changed = [{k: v for k, v in record.items() if k != "checksum"} for record in lines(output)]
    changed[2]["process"] = {**changed[2]["process"], "compiled_while_timed": 3}
    (output / "points.jsonl").write_bytes(b"".join(map(line_of, changed)))
    world.run(output, ASKED)
    told = capsys.readouterr().err
    assert "warning: times of opt(0.1) G=2 T=1 include compiling" in told
    # As it says: without the line the point is measured again.
    (output / "points.jsonl").write_bytes(b"".join(map(line_of, changed[:2] + changed[3:])))
    assert world.run(output, ASKED)["done"] == len(ASKED)
    assert "include compiling" not in capsys.readouterr().err
    assert lines(output)[2]["process"]["compiled_while_timed"] == 0


def test_another_temperature_compiles_nothing(done, tmp_path):
    greedy = [dataclasses.replace(point, temperature=0.0) for point in ASKED[:3]]
    world.run(tmp_path / "out", [*ASKED[:3], *greedy])
    records = lines(tmp_path / "out")
    assert [len(record["seeds"]) for record in records] == [2, 2, 2, 1, 1, 1]
    assert all(record["process"]["compiled"] == 0 for record in records)


def test_predictions_can_be_scored_by_themselves(done):
    output, _ = done
    record = lines(output)[2]
    files = [str(output / name) for name in record["predictions"]]
    with gzip.open(files[0]) as file:
        assert json.loads(file.readline())["inputs"] == world.TEXTS[0]
    scores = evaluate({"opt": files}, metrics=(), bootstrap=world.measuring().bootstrap)
    figures = scores["methods"]["opt"]["figures"]
    for name, values in figures.items():
        assert values == record["figures"][name], name
    assert {"deferrals_per_token", "rejection_rate", "impossible_share"} <= {*figures}


def test_a_point_is_what_its_decoder_gives_in_any_part_of_the_texts(done):
    """For `tune`, which measures more and more texts."""
    bench = Bench(world.EXAMPLES, [world.Toys()(ASKED[0], 4).encode(t) for t in world.TEXTS],
                  world.REFERENCES, world.measuring())  # fmt: skip
    make = world.Toys()
    part = measure(lambda rows: make(ASKED[2], rows), None, bench.part(2, 5), 1.0)
    with gzip.open(done[0] / lines(done[0])[2]["predictions"][1]) as file:
        whole = [json.loads(line) for line in file]
    assert [r["tokens"] for r in part.records[1]] == [r["tokens"] for r in whole[2:5]]
    assert part.verifier_times is None and part.times.seconds.shape == (2, 1, 2)


def test_figures_are_drawn(done):
    output, _ = done
    for name in {*plots.PLOTS} - {"quality_cost.png"}:  # it has no costs
        assert (output / name).read_bytes().startswith(b"\x89PNG")


class Costly:
    """A decoder whose policy weighs costs."""

    costs = object()

    def __init__(self, stopping, measured):
        self._stopping, self.measured = stopping, measured

    def describe(self):
        return {"environment": {}, "stopping": self._stopping, "own_params": None}


@pytest.mark.parametrize("measured", [True, False])
def test_costs_of_a_file_are_part_of_a_point_and_measured_ones_are_not(measured):
    module = importlib.import_module("specjax.sweeping.sweep")  # `sweep` is the function
    one, other = (module._fingerprint(Costly(costs, measured)) for costs in ("a", "b"))
    assert (one == other) == measured


def test_a_done_sweep_measures_nothing_and_a_larger_grid_what_is_new(done, tmp_path):
    asked = world.points(("opt", 0.1))
    world.run(tmp_path / "out", asked)
    before = lines(tmp_path / "out")
    make = world.Toys()
    more = [*asked, dataclasses.replace(asked[2], strength=0.3)]
    world.run(tmp_path / "out", more, make)
    after = lines(tmp_path / "out")
    assert after[:3] == before and len(after) == 4
    # An earlier grid's points stay.
    results = world.run(tmp_path / "out", asked)
    assert lines(tmp_path / "out") == after and results["done"] == 4


class Killed(BaseException):
    """Ends a process without a word to anything that catches errors."""


@pytest.mark.parametrize("moment", ["while it is measured", "before its line is written"])
def test_a_killed_sweep_goes_on_with_the_same_points(done, tmp_path, monkeypatch, moment):
    output = tmp_path / "out"
    make, write = world.Toys(), RunDirectory.write

    class Dies(world.Toys):
        def __call__(self, point, batch_size):
            decoder = super().__call__(point, batch_size)
            if self.made.count(ASKED[3]) == 2:  # the decoder that is timed
                raise Killed
            return decoder

    def write_or_die(run, name, data):
        if name == "points.jsonl" and data.count(b"\n") == 4:
            raise Killed
        return write(run, name, data)

    with monkeypatch.context() as patched:
        if moment == "while it is measured":
            make = Dies()
        else:
            patched.setattr(RunDirectory, "write", write_or_die)
        with pytest.raises(Killed):
            world.run(output, ASKED, make)
    there = lines(output)
    assert len(there) == 3  # what was measured last is lost, and no more
    world.run(output, ASKED)
    assert lines(output)[:3] == there
    expected = lines(done[0])
    assert list(map(without_times, lines(output))) == list(map(without_times, expected))
    for record in expected:
        for name in record["predictions"]:
            assert (output / name).read_bytes() == (done[0] / name).read_bytes()
    assert not [p for p in (output / "points").iterdir() if p.name.startswith(".")]


def test_a_failing_point_is_told_and_the_others_are_measured(tmp_path, capsys):
    asked = world.points(("opt", 0.1), ("lossy", 1.5), ("opt", 0.5))
    full = world.Toys()

    def make(point, batch_size):
        if point.strength == 0.5 and full_memory:
            raise MemoryError("no room")
        return full(point, batch_size)

    make.command = full.command
    full_memory = True
    results = world.run(tmp_path / "out", asked, make)
    records = lines(tmp_path / "out")
    assert [r["status"] for r in records] == ["done", "done", "done", "failed", "failed"]
    assert results["done"] == 3 and results["failed"] == 2
    assert records[3]["error"] == "alpha must lie in [0, 1), got 1.5"
    assert records[4]["error"] == "MemoryError: no room" and "make" in records[4]["traceback"]
    assert "failed: alpha must lie in [0, 1), got 1.5" in capsys.readouterr().err
    full_memory = False
    # What failed is tried again, what is done is not.
    results = world.run(tmp_path / "out", asked, make)
    again = lines(tmp_path / "out")
    assert [r["status"] for r in again] == ["done", "done", "done", "failed", "done"]
    assert again[:3] == records[:3]


def test_without_the_verifier_there_is_nothing_to_compare_with(tmp_path):
    own = world.Toys()
    asked = world.points(("opt", 0.1), temperatures=(1.0, 0.0))

    def make(point, batch_size):
        if point.method == "verifier_alone" and point.temperature == 0.0:
            raise ValueError("broken")
        return own(point, batch_size)

    make.command = own.command
    results = world.run(tmp_path / "out", asked, make)
    assert [r["status"] for r in lines(tmp_path / "out")] == 3 * ["done"] + 3 * ["failed"]
    assert len(results["table_2"]) == 1
    told = results["failures"]["opt(0.1) G=2 T=0"]
    assert told == "verifier_alone T=0 failed: there is nothing to compare with"


def test_another_sweep_is_refused(done, tmp_path):
    output = tmp_path / "out"
    asked = ASKED[:3]
    world.run(output, asked)
    with pytest.raises(
        ValueError, match=r"holds a run of another configuration .*seeds: 2 there, 3"
    ):
        world.run(output, asked, how=world.measuring(seeds=3))
    with pytest.raises(ValueError, match=r"another configuration .*texts"):
        world.run(output, asked, references=world.REFERENCES[::-1])
    with pytest.raises(ValueError, match=r"another configuration .*max_new_tokens"):
        world.run(output, asked, world.Toys(new_tokens=9))

    class Other(world.Toys):
        def __call__(self, point, batch_size):
            return super().__call__(dataclasses.replace(point, max_draft=3), batch_size)

    with pytest.raises(ValueError, match=r"has the point opt\(0.1\) G=2 T=1 of other settings"):
        world.run(output, asked, Other())
    path = output / "points.jsonl"
    kept = path.read_bytes()
    for damaged in (kept.replace(b'"value"', b'"vale"', 1), kept + b"{}\n", b"\n" + kept):
        path.write_bytes(damaged)
        with pytest.raises(
            ValueError, match=r"points.jsonl:\d: the line is no point of this sweep"
        ):
            world.run(output, asked)
    path.write_bytes(kept)
    [resampled] = output.glob("points/opt-*/resampled.npz")
    data = resampled.read_bytes()
    resampled.write_bytes(data[: len(data) // 2])
    with pytest.raises(ValueError, match=r"points.jsonl:3: .*resampled.npz has: delete line 3"):
        world.run(output, asked)
    resampled.write_bytes(data)
    assert world.run(output, asked)["done"] == 3


@pytest.mark.parametrize("lost", ["", "resampled.npz", "seed1.jsonl.gz"])
def test_a_line_without_its_files_is_measured_again(done, tmp_path, capsys, lost):
    """So a copy of the directory that was cut between two files is left."""
    output = tmp_path / "out"
    shutil.copytree(done[0], output)
    [directory] = output.glob("points/token_cascade-*")
    shutil.rmtree(directory) if not lost else (directory / lost).unlink()
    make = world.Toys()
    assert world.run(output, ASKED, make)["done"] == len(ASKED)
    assert "token_cascade(0.7) T=1 lacks" in capsys.readouterr().err
    again = [record["point"] for record in lines(output)]
    assert again == [record["point"] for record in lines(done[0])]
    assert sorted(p.name for p in directory.iterdir()) == [
        "resampled.npz",
        "seed0.jsonl.gz",
        "seed1.jsonl.gz",
    ]


def test_a_point_that_is_kept_under_another_key_stays(done, tmp_path):
    """Strengths that were whole numbers had keys of their own."""
    output = tmp_path / "out"
    shutil.copytree(done[0], output)
    [directory] = output.glob("points/token_cascade-*")
    directory.rename(directory.with_name("token_cascade-0"))
    text = (output / "points.jsonl").read_text().replace(directory.name, "token_cascade-0")
    kept = [{k: v for k, v in json.loads(x).items() if k != "checksum"} for x in text.splitlines()]
    (output / "points.jsonl").write_bytes(b"".join(map(line_of, kept)))
    there = lines(output)
    assert world.run(output, ASKED)["done"] == len(ASKED) and lines(output) == there


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"how": {"latency_texts": 7}}, "there are 6 texts, but latency_texts=7"),
        ({"how": {"latency_texts": 1}}, "latency_texts must be at least twice"),
        ({"how": {"seeds": 0}}, "seeds must be a whole number of at least 1, got 0"),
        ({"how": {"seed": -1}}, "seed must be a whole number of at least 0"),
        ({"references": world.REFERENCES[:5]}, "there are 6 texts, but 5 references"),
        ({"chat": 1}, "chat must be True or False"),
        ({"examples": [Example(0, " "), *world.EXAMPLES[1:]]}, "text 0 is empty"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_before_anything_is_measured(tmp_path, change, message):
    change = dict(change)
    with pytest.raises((TypeError, ValueError), match=message):
        how = world.measuring(**change.pop("how", {}))
        world.run(tmp_path / "out", ASKED, how=how, **change)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("metrics", [("blue",), (), "bleu"])
def test_metrics_are_checked(metrics):
    with pytest.raises((TypeError, ValueError), match="metrics"):
        dataclasses.replace(world.measuring(), metrics=metrics)


def test_times_are_of_the_median_repeat_and_the_mean_seed():
    seconds = np.array([[[1.0], [9.0], [2.0]], [[4.0], [4.0], [4.0]]])  # 2 seeds, 3 repeats
    times = Times(seconds, np.ones((2, 1), int))
    assert times.usual.tolist() == [3.0] and times.mean.tolist() == [4.0]
