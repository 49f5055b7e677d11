"""`benchmarks.stopping`: figures that fit together."""

import json

import pytest

import specjax
from benchmarks.stopping import main
from tests import tiny_pair


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    common = tiny_pair.write_bench_inputs(tmp_path_factory.mktemp("bench"))
    few = ["--max-new=6", "--max-draft=2", "--repeats=1", "--prompts=4", "--temperatures", "0"]
    lists = ["--fixed", "1", "2", "--confidence", "0.06", "--entropy", "--online", "--head"]
    return [*common, *few, *lists]


@pytest.mark.exhaustive
def test_figures_fit_together(arguments, capsys, tmp_path, monkeypatch):
    # One whose programs compile quickly.
    pair = specjax.Pair(tiny_pair.tabular(1), tiny_pair.tabular(2))
    monkeypatch.setattr("specjax.cli.bench.load_pair", lambda **_: pair)
    plot = tmp_path / "front.png"
    inputs = next(one for one in arguments if one.startswith("--inputs"))
    choose = inputs.replace("--inputs", "--choose")
    assert main([*arguments, choose, f"--plot={plot}"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [row["policy"] for row in rows] == ["fixed", "confidence", "oracle"]
    fixed, confidence, oracle = rows
    assert fixed["gain"] == 0.0 and fixed["setting"] in (1, 2)
    assert fixed["drafted_per_call"] <= fixed["setting"]
    low, high = confidence["gain_low"], confidence["gain_high"]
    assert low <= confidence["gain"] <= high
    for row in rows:
        assert row["verification_rate"] * row["tokens_per_call"] == pytest.approx(1.0)
        # Each round emits what it drafted and did not discard, and one token more.
        kept = row["drafted_per_call"] - row["discard_rate"] * row["tokens_per_call"]
        assert row["tokens_per_call"] <= kept + 1.0 + 1e-9
    assert oracle["discard_rate"] == 0.0 and oracle["ms_per_token"] is None
    assert oracle["verification_rate"] <= fixed["verification_rate"]
    assert plot.read_bytes().startswith(b"\x89PNG")
