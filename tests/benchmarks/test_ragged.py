"""`benchmarks.ragged`: figures that fit together with known costs, and refusals."""

import json

import pytest

import specjax
from benchmarks import ragged
from benchmarks.ragged import main
from specjax import drafting
from tests import tiny_pair

COSTS = drafting.Costs((1, 2), (1, 2, 3), (0.1, 0.2), ((1.0, 1.2, 1.4), (2.0, 2.4, 2.8)))


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    pair = specjax.Pair(tiny_pair.tabular(1), tiny_pair.tabular(2))
    monkeypatch.setattr("specjax.cli.bench.load_pair", lambda **_: pair)
    monkeypatch.setattr(ragged, "measure_costs", lambda _, rows, widths: COSTS.at_widths(widths))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("ba\nde\n", encoding="utf-8")
    sizes = ["--max-draft=2", "--max-new=5", "--repeats=1", "--temperatures", "0"]
    lists = ["--rows", "2", "--fixed", "2", "--tokens", "2"]
    return [f"--inputs={prompts}", *sizes, *lists]


@pytest.mark.exhaustive
def test_figures_fit_together(arguments, capsys):
    assert main(arguments) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["policy"] for row in rows] == [
        *("verifier alone", "fixed", "confidence", "confidence", "budget", "cost")
    ]
    alone, fixed, several, one, budget, cost = rows
    assert [row["widths"] for row in rows] == ["1", "3", "2^n", "3", "2^n", "2^n"]
    assert alone["speedup"] == 1.0 and alone["tokens_per_call"] == 1.0
    assert alone["predicted_ms"] is None
    # The same drafts, in passes that are wider or as wide.
    assert several["tokens_per_call"] == one["tokens_per_call"]
    assert several["predicted_ms"] <= one["predicted_ms"]
    # The rows' own tokens fill the budget: it decodes as the verifier alone does.
    assert budget["drafted_per_call"] == 0.0
    # Both rows at each step: two tokens for a pass of 2.0 seconds, until one ends.
    assert 1000.0 <= budget["predicted_ms"] <= 2000.0
    assert 0 < fixed["drafted_per_call"] <= 2 and cost["ms_per_token"] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--confidence=2", "Confidence: threshold must lie in [0, 1], got 2.0"),
        ("--max-draft=0", "--max-draft must be at least 1, got 0"),
        ("--tokens=0", "--tokens must be at least 1, got [0]"),
        ("--rows=9", "has 2 prompts, but a batch needs 9"),
        ("--grown", "--grown is not supported here"),
    ],
)
def test_bad_input_is_one_line(arguments, capsys, change, message):
    assert main([*arguments, change]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
