"""The demo runs on any pair, and writes what it prints."""

import json
import re
import sys
from types import SimpleNamespace

import pytest

import specjax
from specjax.cli import demo
from specjax.cli.main import main
from specjax.text.directories import real_path
from tests import tiny_pair

LOSSLESS = ("lossless", "lossless, adaptive")
RULES = ("OPT(0.1)", "OPT(0.2)", "OPT(0.4)", "TokenV3(0.8)")


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    directory = tmp_path_factory.mktemp("demo")
    paths = tiny_pair.write_pair(directory / "models")
    texts = tiny_pair.sentences(4, seed=5)
    samples = directory / "samples.tsv"
    lines = ["en\tde", *(f"{text}\t{text}" for text in texts)]
    samples.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return ["demo", *(f"--{k}={v}" for k, v in paths.items()), f"--samples={samples}", "--rows=4"]


@pytest.mark.parametrize(
    "left_out",
    # Each takes long to compile.
    [(LOSSLESS[1], *RULES), pytest.param((), marks=pytest.mark.exhaustive)],
)
def test_results_and_plot(arguments, tmp_path, capsys, monkeypatch, left_out):
    everything = demo.settings

    def some(max_draft):
        return {k: v for k, v in everything(max_draft).items() if k not in left_out}

    monkeypatch.setattr(demo, "settings", some)
    assert main([*arguments, f"--output={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results) == 16 - 2 * len(left_out) and {row["temperature"] for row in results} == {
        0.0,
        1.0,
    }
    assert [row["speedup"] for row in results if row["setting"] == "verifier alone"] == [1.0, 1.0]
    by_name = {(row["setting"], row["temperature"]): row for row in results}
    # Greedy lossless decoding writes what the verifier writes.
    for name in set(LOSSLESS) - set(left_out):
        assert by_name[name, 0.0]["bleu"] == by_name["verifier alone", 0.0]["bleu"]
        assert by_name[name, 0.0]["bleu_over_verifier"] == 0.0
        assert by_name[name, 0.0]["bleu_over_verifier_interval"] == [0.0, 0.0]
        assert by_name[name, 0.0]["tokens_per_verifier_call"] >= 1
    for row in results:
        low, high = row["bleu_interval"]
        assert low <= row["bleu"] <= high and f"[{low:.1f}, {high:.1f}]" in printed
        alone = by_name["verifier alone", row["temperature"]]
        assert row["bleu_over_verifier"] == pytest.approx(row["bleu"] - alone["bleu"])
        slow, fast = row["speedup_interval"]
        assert fast is None or slow <= row["speedup"] <= fast  # None: there was a single turn
    assert all(row["setting"] in printed for row in results)
    end = printed.split("mean acceptance length")[1]
    for temperature in (0, 1):
        assert re.search(
            rf"^(Fastest|No gain|Drafting).* at temperature {temperature}: ", end, re.M
        )
    assert re.search(r"\n0: .*\n1: .*\nsource of \d+ tokens: .*\nmean acceptance length", printed)
    plot = tmp_path / "quality_speed.png"
    assert plot.read_bytes().startswith(b"\x89PNG") and str(plot) in printed


def test_the_settings_of_the_plot_differ_without_colours(monkeypatch):
    names, figures = [f"OPT({i / 10})" for i in range(8)], []
    values = {"bleu": 30.0, "bleu_over_verifier": 1.0, "bleu_over_verifier_interval": [0, 2]}
    rows = [
        {"temperature": t, "setting": name, "speedup": x, "speedup_interval": [x - 0.1, x + 0.1]}
        | values
        for t in (0.0, 1.0)
        for name, x in [*((name, 1.2) for name in names), (demo.DRAFTER, 9.0)]
    ]
    from matplotlib import pyplot

    monkeypatch.setattr(pyplot, "close", figures.append)
    demo._write(SimpleNamespace(write=lambda name, _: name), rows)
    (drawn,) = figures
    assert [text.get_text() for text in drawn.legends[0].get_texts()] == names
    for axis in drawn.axes:
        lines = [each.lines[0] for each in axis.containers]
        assert len({line.get_marker() for line in lines}) == len(names)
        # The drafter alone is told, and does not squeeze all else.
        assert axis.get_xlim()[1] < 1.5
        assert "drafter alone: 30.0 BLEU at 9x" in axis.texts[0].get_text()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--samples=/missing.tsv", "/missing.tsv"),
        ("--rows=0", "--rows must be at least 1, got 0"),
        ("--output=/dev/null/x", "/dev/null/x"),
    ],
)
def test_bad_input_is_one_line(arguments, capsys, change, message):
    assert main([*arguments, change]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize("module", ["sacrebleu", "matplotlib"])
def test_a_missing_library_is_named_before_the_models_load(
    arguments, tmp_path, capsys, monkeypatch, module
):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("specjax.cli.demo.load_pair", lambda **_: pytest.fail("loaded"))
    assert main([*arguments, f"--output={tmp_path}"]) == 2
    assert capsys.readouterr().err == (
        f"specjax demo: {module} is not installed: run pip install '.[eval]' in the checkout\n"
    )


def test_a_ragged_sample_is_named(arguments, tmp_path, capsys):
    samples = tmp_path / "bad.tsv"
    samples.write_text("en\tde\na\tb\nc\n", encoding="utf-8")
    assert main([*arguments, f"--samples={samples}"]) == 2
    assert (
        f"{samples}:3: must have 2 columns, a source and a reference, got 1"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (b"", "is empty: it must have at least one line"),
        (b"en\tde\n", "has no samples after its header"),
        (b"en\tde\na\t\xff\n", ":2: byte 0xff at column 3 is not UTF-8"),
    ],
)
def test_unreadable_samples_are_told_in_one_line(arguments, tmp_path, capsys, written, message):
    samples = tmp_path / "odd.tsv"
    samples.write_bytes(written)
    assert main([*arguments, f"--samples={samples}"]) == 2
    error = capsys.readouterr().err
    assert str(samples) in error and message in error and error.count("\n") == 1


def test_results_that_no_demo_made_are_refused_and_kept(arguments, tmp_path, capsys):
    mine = tmp_path / "results.json"
    mine.write_text("mine")
    assert main([*arguments, f"--output={tmp_path}"]) == 2
    assert f"{mine} exists, but demo_config.json does not list" in capsys.readouterr().err
    assert mine.read_text() == "mine"


def test_samples_may_be_objects(tmp_path):
    samples = tmp_path / "samples.jsonl"
    samples.write_text('{"question": "a\\nb", "answer": "c"}\n', encoding="utf-8")
    assert demo._read(samples) == (["a\nb"], ["c"])


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ('{"a": "b"}', ":1: must be an object of 2 texts, a source and a reference"),
        ('{"a": "b", "c": 3}', ":1: must be an object of 2 texts"),
        ("[1, 2]", ":1: must be an object of 2 texts"),
        ("a\tb", ":1: must be an object of 2 texts"),
    ],
)
def test_other_objects_are_told(arguments, tmp_path, capsys, written, message):
    samples = tmp_path / "odd.jsonl"
    samples.write_text(written + "\n", encoding="utf-8")
    assert main([*arguments, f"--samples={samples}"]) == 2
    error = capsys.readouterr().err
    assert f"{samples}{message}" in error and error.count("\n") == 1


@pytest.mark.parametrize("name", demo._SAMPLES)
def test_a_built_in_pair_is_that_of_load_pair(name, tmp_path, monkeypatch):
    """One drafter everywhere, so that figures of the demo are those of the other commands."""
    loaded = []
    monkeypatch.setattr(demo, "load_pair", lambda **paths: loaded.append(paths))  # and no pair
    main(["demo", f"--built-in={name}", f"--output={tmp_path}"])
    found = {key: real_path(path) for key, path in loaded[0].items()}
    monkeypatch.setattr("specjax.text.directories._loaded", lambda paths, *_, **__: paths)
    monkeypatch.setattr("specjax.text.directories.Pair", lambda **paths: paths)
    assert found == specjax.load_pair(name)
