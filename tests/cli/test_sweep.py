"""`specjax sweep` from gin files to points, a table and figures."""

import gzip
import json
import subprocess
import sys

import pytest

from specjax.cli import infer
from specjax.cli.main import main
from specjax.cli.sweep import PointFiles
from specjax.sweeping import Grid
from tests import tiny_pair

SETTINGS = {
    "METHODS": "{'opt': (0.1, 0.4), 'lossy': (0.2, 1.5)}",
    "METRICS": "('chrf',)",
    "MAX_DRAFTS": "(2,)",
    "SEEDS": 2,
    "BATCH_SIZE": 4,
    "LATENCY_TEXTS": 4,
    "REPEATS": 1,
    "MAX_NEW_TOKENS": 8,
    "RESAMPLES": 100,
    "TARGETS_FIELD": 1,
    "INFER": "{'Decoder.buckets': (16, 24)}",
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data")
    tiny_pair.write_pair(directory / "pair")
    texts, references = (tiny_pair.sentences(8, seed=seed) for seed in (1, 2))
    rows = zip(texts, references, strict=True)
    (directory / "texts.tsv").write_text("".join(f"{a}\t{b}\n" for a, b in rows))
    (directory / "texts.txt").write_text("".join(f"{a}\n" for a in texts))
    (directory / "references.txt").write_text("".join(f"{a}\n" for a in references))
    own = directory / "own" / "methods"
    own.mkdir(parents=True)
    (own / "mine.gin").write_text("ALPHA = 0.3\n\nDecoder.rule = @Lossy()\nLossy.alpha = %ALPHA\n")
    return directory


def arguments(data, output, **settings):
    pair = {name.upper(): data / "pair" / name for name in ("verifier", "drafter")}
    values = {**SETTINGS, **pair, "INPUT": data / "texts.tsv", "OUTPUT_DIR": output, **settings}
    given = [f"--gin.{name.replace('__', '.')}={value}" for name, value in values.items()]
    return ["sweep", f"--gin_search_paths={data / 'own'}", *given]


def run(data, output, **settings):
    return main(arguments(data, output, **settings))


def lines(output):
    return [json.loads(line) for line in (output / "points.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def done(data, tmp_path_factory):
    output = tmp_path_factory.mktemp("sweep") / "out"
    return output, run(data, output)


def test_points_are_measured_tabulated_and_drawn(data, done, capsys):
    output, status = done
    assert status == 3  # a point failed
    records = lines(output)
    told = [(r["method"], r["strength"], r["max_draft"], r["status"]) for r in records]
    assert told == [
        ("verifier_alone", None, None, "done"),
        ("drafter_alone", None, None, "done"),
        ("opt", 0.1, 2, "done"),
        ("opt", 0.4, 2, "done"),
        ("lossy", 0.2, 2, "done"),
        ("lossy", 1.5, 2, "failed"),
    ]
    assert records[-1]["error"] == "alpha must lie in [0, 1), got 1.5"
    assert records[3]["process"]["compiled"] == 0  # another strength
    made = {path.name for path in output.iterdir()}
    assert made >= {"config.gin", "runs.jsonl", "results.json", "quality_latency.png"}
    assert "'lossy': (0.2, 1.5)" in (output / "config.gin").read_text()
    # Started again, it measures nothing, tries what has failed, and prints all.
    assert run(data, output) == 3
    captured = capsys.readouterr()
    table, line = captured.out.rsplit("\n", 2)[:2]
    assert json.loads(line) == json.loads((output / "results.json").read_text())
    assert "latency_reduction" in table and "opt Block G=2" in table
    assert "5 of 6 points are there already" in captured.err
    assert "1 points failed, the others are done: lossy(1.5)" in captured.err.splitlines()[-1]
    assert lines(output)[:5] == records[:5]


def test_a_point_tells_the_command_that_decodes_like_it(data, done, tmp_path):
    output, _ = done
    record = lines(output)[2]
    settings = {"INPUT": data / "texts.txt", "OUTPUT_DIR": tmp_path / "out", "SEED": 1}
    given = [f"--gin.{name}={value}" for name, value in settings.items()]
    assert main(["infer", *record["infer"], *given]) == 0
    decoded = (tmp_path / "out/predictions.jsonl").read_text().splitlines()
    with gzip.open(output / record["predictions"][1]) as file:
        swept = [json.loads(line) for line in file]
    assert [json.loads(line)["tokens"] for line in decoded] == [row["tokens"] for row in swept]


@pytest.mark.exhaustive
@pytest.mark.parametrize("points", [0, 3])
def test_a_killed_process_leaves_what_goes_on(data, done, tmp_path, points):
    output = tmp_path / "out"
    command = [sys.executable, "-m", "specjax.cli.main", *arguments(data, output)]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    for line in child.stderr:
        if f"point {points + 1} of" in line:
            break
    child.kill()
    child.communicate()
    there = lines(output) if points else []
    assert len(there) == points
    assert run(data, output) == 3
    found, expected = lines(output), lines(done[0])
    assert found[:points] == there
    for ours, theirs in zip(found, expected, strict=True):
        assert ours["point"] == theirs["point"] and ours["status"] == theirs["status"]
        for name in ours.get("predictions", ()):
            assert (output / name).read_bytes() == (done[0] / name).read_bytes()
        if ours["status"] == "done":
            assert ours["figures"]["chrf"] == theirs["figures"]["chrf"]


NO_MODELS = {"VERIFIER": "nowhere", "DRAFTER": "nowhere"}
WRONG = {
    "unknown method": ({"METHODS": "('opd',)"}, "methods: opd: there is no file methods/opd.gin"),
    "reference": ({"METHODS": "('verifier_alone',)"}, "verifier_alone is always measured"),
    "no strength": ({"METHODS": "{'lossless': 0.1}"}, "lossless has no strength: give None"),
    "other name": ({"METHODS": "{'opt': {'BETA': 1}}"}, "BETA"),
    "policy": ({"STOPPING": "('sure',)"}, "stopping: sure: there is no file methods/sure.gin"),
    "drafter": ({"DRAFTERS": "('nowhere',)"}, "no file methods/nowhere.gin and no such directory"),
    "temperature": ({"TEMPERATURES": "(-1,)"}, "temperatures must be finite and at least 0"),
    "lengths": ({"MAX_DRAFTS": "5"}, "Grid: max_drafts must be a tuple, got 5"),
    "metric": ({"METRICS": "('blue',)"}, "`metrics` must be among"),
    "references": ({"TARGETS_FIELD": None}, "give the references once"),
    "column": ({"TARGETS_FIELD": 2}, "there is no column 2"),
    "texts": ({"LATENCY_TEXTS": 9}, "there are 8 texts, but latency_texts=9 are timed"),
    "fewer": ({"TEXTS": 3}, "there are 3 texts, but latency_texts=4 are timed"),
    "input": ({"INPUT": "nowhere.tsv"}, "nowhere.tsv: no such file"),
    "model": ({"VERIFIER": "nowhere"}, "nowhere"),
    "infer": ({"INFER": "{'Decoder.buckts': 3}"}, "buckts"),
    "infer's kind": ({"INFER": "3"}, "infer must be a dict"),
    "name": ({"METHOD": "3"}, "--gin.METHOD: no such name; did you mean METHODS?"),
    "length": ({"MAX_NEW_TOKENS": 0, **NO_MODELS}, "max_new_tokens must be"),
    "counts": ({"TOP_K": 0, **NO_MODELS}, "top_k must be"),
    "nucleus": ({"TOP_P": 2, **NO_MODELS}, "top_p must"),
    "fewest": ({"MIN_DRAFT": -1, **NO_MODELS}, "min_draft must be"),
    "stop": ({"STOP": "('',)", **NO_MODELS}, "stop has an empty text"),
    "buckets": ({"INFER": "{'Decoder.buckets': (9, 3)}", **NO_MODELS}, "buckets must be"),
    "batch": ({"BATCH_SIZE": 0, **NO_MODELS}, "batch_size must be"),
    "draft": ({"MAX_DRAFTS": "(0,)", **NO_MODELS}, "max_drafts must be"),
    "seeds": ({"SEEDS": 0}, "seeds must be a whole number of at least 1, got 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_one_line_before_any_work(data, tmp_path, capsys, name):
    values, told = WRONG[name]
    assert run(data, tmp_path / "out", **values) == 2
    error = capsys.readouterr().err
    assert told in error and error.count("\n") == 1, error
    assert not (tmp_path / "out").exists()


def test_the_references_may_be_in_a_file_of_their_own(data, done, capsys):
    output, _ = done
    settings = {"TARGETS_FIELD": None, "REFERENCES": data / "references.txt"}
    assert run(data, output, INPUT=data / "texts.txt", **settings) == 3  # the same sweep
    assert "points are there already" in capsys.readouterr().err


def test_a_changed_file_of_a_point_is_told(data, done, capsys):
    output, _ = done
    own = data / "own" / "methods" / "opt.gin"
    own.write_text("ALPHA = 0.3\n\nDecoder.rule = @TokenV3()\nTokenV3.alpha = %ALPHA\n")
    try:
        assert run(data, output) == 2
    finally:
        own.unlink()
    error = capsys.readouterr().err
    assert "has the point opt(0.1) Block G=2 T=1 of other settings" in error


def test_what_the_axes_name_makes_decoders(data):
    """Without decoding: sequential cascades, policies, other drafters, copies, one's own files."""
    infer.register()
    names = {name.upper(): str(data / "pair" / name) for name in ("verifier", "drafter")}
    files = PointFiles({**names, "MAX_NEW_TOKENS": 8}, [str(data / "own")])
    other = str(data / "pair" / "verifier")
    grid = Grid(
        methods={
            "mine": 0.2,
            "mentored": 0.05,
            "token_cascade": {"ALPHA": 0.3, "LIMIT": 4},
            "bild_original": {"ALPHA": (1.0, 2.0), "FALLBACK": 0.2},
            "sequence_cascade": {"ALPHA": 0.5, "AGGREGATION": "@Mean()"},
        },
        temperatures=(0.0,),
        max_drafts=(3,),
        stopping={None: None, "adaptive_confidence": {"THRESHOLD": 0.3, "MAX_DRAFT": 7}},
        drafters={None: None, other: None, "lookup_first": 2},
    )
    points = grid.points(files)
    decoders = {point: files(point, 2) for point in points}

    def of(method, **others):
        return [
            (point, decoder)
            for point, decoder in decoders.items()
            if point.method == method
            and all(getattr(point, name) == x for name, x in others.items())
        ]

    assert len(of("verifier_alone")) == 1 and len(of("drafter_alone")) == 2
    assert len(of("mine")) == 6 and len(of("token_cascade")) == 2  # two drafters, no copies
    for _, decoder in of("mine"):
        assert float(decoder.rule.alpha) == pytest.approx(0.2) and decoder.batch_size == 2
    assert {d.method.max_draft for _, d in of("mine", stopping=None, drafter=None)} == {3}
    ((_, sure),) = of("mine", stopping="adaptive_confidence", drafter=None)
    assert sure.method.max_draft == 7
    assert sure.describe()["stopping"].startswith("Confidence")
    ((_, strong),) = of("mine", stopping=None, drafter=other)
    names = [decoder.describe()["models"] for decoder in (strong, of("mine", drafter=None)[0][1])]
    assert names[0]["verifier"] == names[1]["verifier"]
    assert names[0]["drafter"] == names[0]["verifier"] != names[1]["drafter"]
    assert float(of("mentored")[0][1].rule.budget) == pytest.approx(0.05)
    assert {d.method.limit for _, d in of("token_cascade")} == {4}
    assert {float(d.rule.rollback.alpha) for _, d in of("bild_original")} == {1.0, 2.0}
    (fallback,) = {float(d.rule.fallback.alpha) for _, d in of("bild_original")}
    assert fallback == pytest.approx(0.2)
    ((point, _),) = of("mine", stopping=None, drafter="lookup_first")
    words = files.command(point)
    assert "--gin_file=methods/lookup_first.gin" in words and "--gin.MIN_MATCH=2" in words


def test_replicas_of_a_sweep_that_cannot_be_are_refused(data, tmp_path, capsys):
    command = arguments(data, tmp_path / "out")
    assert main([*command, "--process_count=9", "--process_index=0"]) == 2
    assert "process_count must be at most 5, the points of the grid" in capsys.readouterr().err
    assert main([*command, "--distributed"]) == 2
    told = capsys.readouterr().err
    assert "the processes of specjax sweep are no program: leave out" in told
    assert not (tmp_path / "out").exists()
