"""`bench speedup`: figures of known times and counts, on any pair, and refusals."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

import specjax
from specjax.cli.bench import speedup
from specjax.cli.main import main
from specjax.drafting import Costs
from specjax.text.passes import PassTimes
from tests import tiny_pair

# Steps of the verifier alone take 2.0, its passes over three tokens 3.0, drafted tokens 0.5.
TIMES = PassTimes(
    2, {"verifier": 2.0}, {}, 0.0, {("verifier", "drafter"): Costs((2,), (3,), (0.5,), ((3.0,),))}
)


def side(seconds, emitted, calls):
    """Of a single chunk of two rows."""
    rows = SimpleNamespace(emitted=np.asarray(emitted), verifier_calls=np.asarray(calls))
    result = SimpleNamespace(info=SimpleNamespace(per_row=rows))
    return speedup._side(np.full((1, 1, 1), seconds), [result])


def test_speedup_and_its_ideal():
    """Two rows in a batch. Alone: 6 and 10 tokens in 10 passes; together: in 3 and 5 rounds."""
    sides = {"alone": side(40.0, [6, 10], [6, 10]), "drafts": side(32.0, [6, 10], [3, 5])}
    cost = speedup.round_cost(sides, TIMES)
    assert cost.c == 0.25 and cost.r == 1.5 and cost.tokens == 2.0
    row = speedup.figures(sides, cost)
    assert (row["c"], row["r"], row["tokens_per_call"]) == (0.25, 1.5, 2.0)
    assert row["speedup"] == pytest.approx(40 / 32)
    assert row["speedup_high"] is None  # of a single chunk there is no interval
    # Passes alone: 10 of 2.0; together: 5 times (two drafts and a block) = 5 * 4.0.
    assert row["ideal"] == pytest.approx(20 / 20)
    assert row["of_ideal"] == pytest.approx(1.25)
    assert row["alone_tokens_per_s"] == pytest.approx(16 / 40)


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    """Of a pair whose programs compile quickly."""
    pair = specjax.Pair(tiny_pair.tabular(1), tiny_pair.tabular(2))
    for module in ("workload", "acceptance"):
        monkeypatch.setattr(f"specjax.cli.bench.{module}.load_pair", lambda **_: pair)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("ba\nde\nki\nlo\n", encoding="utf-8")
    sizes = ["--rows=2", "--drafts=2", "--temperatures=0", "--max-new=6", "--repeats=1"]
    return ["bench", "speedup", f"--inputs={prompts}", *sizes]


def test_figures_fit_together(arguments, capsys, monkeypatch):
    monkeypatch.setattr(speedup, "measure_times", lambda *_, call, **__: call() and TIMES)
    assert main(arguments) == 0
    *_, legend, verdict, line = capsys.readouterr().out.splitlines()
    assert legend == "other work disturbed the times of the passes."
    assert "at batch 2, temperature 0" in verdict and "drafts of 2" in verdict
    (row,) = json.loads(line)["rows"]
    assert row["speedup_low"] <= row["speedup"] <= row["speedup_high"]
    assert row["of_ideal"] == pytest.approx(row["speedup"] / row["ideal"])
    assert 1 <= row["tokens_per_call"] <= 3 and row["ideal"] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--rows=9", "has 4 prompts, but a batch needs 9"),
        ("--drafts=0", "--drafts must be at least 1, got [0]"),
        ("--inputs=/missing.txt", "/missing.txt"),
        ("--max-new=2147483648", "--max-new must be below 2147483648, got 2147483648"),
        ("--grown", "is neither a T5 nor a Llama, which --grown needs: leave out --grown"),
    ],
)
def test_bad_input_is_one_line(arguments, capsys, change, message):
    assert main([*arguments, change]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [("", "prompt 2 is empty"), ("ba " * 1100, "prompt 2 has 3301 tokens, more than 1024")],
)
@pytest.mark.parametrize("bench", ["speedup", "acceptance"])
def test_a_prompt_that_cannot_be_decoded_is_named(
    arguments, tmp_path, capsys, bench, line, message
):
    inputs = tmp_path / "odd.txt"
    inputs.write_text(f"ba\n{line}\nba\nba\n", encoding="utf-8")
    assert main(["bench", bench, f"--inputs={inputs}", "--rows=2"]) == 2
    assert f"{inputs}, {message}" in capsys.readouterr().err


def test_a_benchmark_that_has_moved_is_named(capsys):
    assert main(["bench", "drafting", "--rows", "1", "--unknown"]) == 2
    error = capsys.readouterr().err
    assert "run python -m benchmarks.lookups in a checkout" in error and error.count("\n") == 1
