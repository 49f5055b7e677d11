"""Speed-up, ideal and overhead from known times and counts."""

import argparse

import pytest

from specjax.cli.bench import loop, pairs, speedup, timing

# Two rows in a batch. Alone: 6 and 10 tokens in 10 passes; together: in 3 and 5 rounds.
MEASURED = timing.Measured(
    alone=40.0,
    loop=32.0,
    policy=34.0,
    draft=0.5,
    draft_two=0.75,
    one=2.0,
    block=3.0,
    lone_totals=pairs.Totals(emitted=16, rounds=16, verifier=10),
    totals=pairs.Totals(emitted=16, rounds=8, verifier=5, drafter=14),
    policy_totals=pairs.Totals(emitted=16, rounds=8, verifier=5, drafter=16),
)
SIZES = {"rows": 2, "max_draft": 2, "temperature": 0.0}


@pytest.fixture(autouse=True)
def measured(monkeypatch):
    monkeypatch.setattr(timing, "measure_all", lambda args, **_: iter([(SIZES, MEASURED)]))


def test_speedup_and_its_ideal():
    (row,) = speedup.run(argparse.Namespace()).rows
    assert row["c"] == 0.25 and row["r"] == 1.5 and row["tokens_per_call"] == 2.0
    assert row["speedup"] == pytest.approx(40 / 32)
    # Passes alone: 10 of 2.0; together: 5 times (two drafts and a block) = 5 * 4.0.
    assert row["ideal"] == pytest.approx(20 / 20)
    assert row["of_ideal"] == pytest.approx(1.25)
    assert row["alone_tokens_per_s"] == pytest.approx(16 / 40)


def test_overhead_is_the_loops_time_over_that_of_its_passes():
    (row,) = loop.run(argparse.Namespace()).rows
    assert row["overhead"] == pytest.approx(32 / (14 * 0.5 + 5 * 3.0))
    assert row["policy_overhead"] == pytest.approx(34 / (16 * 0.5 + 5 * 3.0))
