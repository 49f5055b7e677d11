"""The demo prints a table and a verdict for each temperature, and writes a comparison."""

import json
import sys

import pytest

import specjax
from specjax.cli import demo
from specjax.cli.main import main
from specjax.study import read_points
from tests.study import world


@pytest.fixture
def quick(monkeypatch):
    """A pair and samples whose programs compile quickly."""
    monkeypatch.setattr(demo, "load_pair", lambda _: specjax.Pair(**world.models()))
    texts = specjax.study.Texts(world.EXAMPLES, world.REFERENCES)
    monkeypatch.setattr(demo, "samples", lambda _: texts)
    monkeypatch.setitem(demo._SAMPLES, "multi30k_ende", ("", "", "", 8))


def test_a_table_a_plot_and_a_verdict_for_each_temperature(quick, tmp_path, capsys, monkeypatch):
    everything = demo.settings

    def some(max_draft, temperature):  # the others take long to compile
        return everything(max_draft, temperature)[:2] + everything(max_draft, temperature)[-1:]

    monkeypatch.setattr(demo, "settings", some)
    output = tmp_path / "out"
    assert main(["demo", "--max-draft=2", f"--output={output}"]) == 0
    shown = capsys.readouterr()
    results = json.loads((output / "results.json").read_text())
    assert results["done"] == 6 and not results["failed"]
    for verdict, temperature in zip(results["verdicts"], (0, 1), strict=True):
        assert verdict["text"] in shown.out and f"at temperature {temperature}" in verdict["text"]
    assert "verifier alone, T=0" in shown.out and "specjax compare --gin.VERIFIER" in shown.err
    assert (output / "quality_latency.png").read_bytes().startswith(b"\x89PNG")
    # Greedy lossless decoding writes what the verifier writes.
    found = read_points(output)
    alone, lossless = everything(2, 0.0)[:2]
    texts = [[row["prediction"] for row in found.measured(x).rows[0]] for x in (alone, lossless)]
    assert texts[0] == texts[1]
    assert main(["demo", "--max-draft=2", f"--output={output}"]) == 0
    assert "6 of 6 settings were measured before" in capsys.readouterr().err


@pytest.mark.parametrize("module", ["sacrebleu", "matplotlib.figure"])
def test_a_missing_library_is_named_before_the_models_load(tmp_path, capsys, monkeypatch, module):
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(demo, "load_pair", lambda _: pytest.fail("loaded"))
    assert main(["demo", f"--output={tmp_path}"]) == 2
    assert f"{module} is not installed: run pip install" in capsys.readouterr().err


@pytest.mark.parametrize("name", demo._SAMPLES)
def test_the_samples_of_each_pair_have_references(name):
    texts = demo.samples(name)
    assert len(texts.examples) > 10 and all(map(any, texts.references))
