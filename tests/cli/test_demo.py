"""The demo writes what it prints."""

import json
import re
import sys
from types import SimpleNamespace

import pytest

import specjax
from specjax.cli import demo
from specjax.cli.main import main
from tests import tiny_pair

LOSSLESS = ("lossless", "lossless, adaptive")
RULES = ("OPT(0.1)", "OPT(0.2)", "OPT(0.4)", "TokenV3(0.8)")


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return specjax.load_pair(**tiny_pair.write_pair(tmp_path_factory.mktemp("demo")))


@pytest.fixture
def arguments(pair, monkeypatch):
    """Of a pair whose programs compile quickly."""
    texts = tiny_pair.sentences(4, seed=5)
    monkeypatch.setattr(demo, "load_pair", lambda _: pair)
    monkeypatch.setattr(demo, "samples", lambda _: (texts, texts))
    return ["demo", "--rows=4"]


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
    monkeypatch.setattr("specjax.cli.demo.load_pair", lambda _: pytest.fail("loaded"))
    assert main([*arguments, f"--output={tmp_path}"]) == 2
    assert capsys.readouterr().err == (
        f"specjax demo: {module} is not installed: run pip install '.[eval]' in the checkout\n"
    )


def test_results_that_no_demo_made_are_refused_and_kept(arguments, tmp_path, capsys):
    mine = tmp_path / "results.json"
    mine.write_text("mine")
    assert main([*arguments, f"--output={tmp_path}"]) == 2
    assert f"{mine} exists, but demo_config.json does not list" in capsys.readouterr().err
    assert mine.read_text() == "mine"


@pytest.mark.parametrize("name", demo._SAMPLES)
def test_the_samples_of_each_pair_have_references(name):
    texts, references = demo.samples(name)
    assert len(texts) == len(references) > 10 and all((*texts, *references))
