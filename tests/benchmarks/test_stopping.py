"""`benchmarks.stopping`: figures that fit together."""

import pytest

from benchmarks.stopping import main


@pytest.mark.exhaustive
def test_figures_fit_together(quick, rows, tmp_path):
    plot = tmp_path / "front.png"
    few = ["--max-draft=2", "--repeats=1", "--prompts=4", "--temperatures", "0"]
    lists = ["--fixed", "1", "2", "--confidence", "0.06", "--entropy", "--online", "--head"]
    choose = quick[0].replace("--inputs", "--choose")
    assert main([*quick, *few, *lists, choose, f"--plot={plot}"]) == 0
    rows = rows()
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
