"""`benchmarks.loop`: the overhead is the loop's time over that of its passes."""

import pytest

from benchmarks import loop


def test_overhead_is_the_loops_time_over_that_of_its_passes():
    found = loop.figures(
        {"loop": 32.0, "policy": 34.0},
        {"loop": (14, 5), "policy": (16, 5)},
        {"draft": 0.5, "verifier": 3.0},
    )
    assert found["overhead"] == pytest.approx(32 / (14 * 0.5 + 5 * 3.0))
    assert found["policy_overhead"] == pytest.approx(34 / (16 * 0.5 + 5 * 3.0))
    assert found["draft_ms"] == 500.0 and found["verifier_calls"] == 5


@pytest.mark.exhaustive
def test_figures_fit_together(quick, rows):
    sizes = ["--rows=2", "--drafts=2", "--temperatures=0", "--repeats=1"]
    assert loop.main([*quick, *sizes]) == 0
    (row,) = rows()
    spent = row["drafter_calls"] * row["draft_ms"] + row["verifier_calls"] * row["verifier_ms"]
    assert row["overhead"] == pytest.approx(row["loop_ms"] / spent)
    # Two drafts per round, and a third if the whole block was accepted.
    assert 2 * row["verifier_calls"] <= row["drafter_calls"] <= 3 * row["verifier_calls"]


@pytest.mark.parametrize("pair", ["t5_v1_1_base+t5_v1_1_small", "qwen3_30b_a3b+qwen3_0.6b"])
def test_a_pair_of_sizes_accepts_what_it_is_told(pair, rows):
    sizes = ["--trial", "--rows=2", "--drafts=4", "--max-new=12", "--temperatures=1"]
    words = ["--repeats=1", "--prompt=8", "--accepted=2", "--chip=h100"]
    assert loop.main([f"--pair={pair}", *sizes, *words]) == 0
    (row,) = rows()
    # Three tokens a round, of four drafts.
    assert (row["verifier_calls"], row["drafter_calls"]) == (4, 16)
    assert row["round_ms"] == pytest.approx(row["loop_ms"] / 4) and row["roofline"] > 1
