"""`benchmarks.trees` on few samples of a built-in pair."""

import argparse

import pytest

from benchmarks import trees
from benchmarks.trees import main
from tests.tiny_pair import write_bench_inputs

SIZES = [
    *("--pairs=multi30k_ende", "--prompts=4", "--drafted", "3", "--depth=3", "--widest=2"),
    *("--temperatures", "0", "--like", "llama3_8b+llama3.2_1b", "--chips", "v5e"),
]


@pytest.fixture
def by_kind(rows):
    return lambda: {(row["machine"], row["children"]): row for row in rows()}


def test_trees_and_chains_are_compared(by_kind):
    assert main([*SIZES, "--children", "top", "--apart=4"]) == 0
    rows = by_kind()
    chip = "llama3_8b+llama3.2_1b on v5e, B=1"
    assert set(rows) == {(machine, kind) for machine in ("-", chip) for kind in ("chain", "top")}
    chain, tree = (rows["-", kind] for kind in ("chain", "top"))
    assert chain["drafted"] == tree["drafted"] == 3 == len(tree["parents"])
    assert chain["speedup"] is None and tree["tokens_per_call"] > 1.0
    for kind in ("chain", "top"):
        assert 1 <= rows[chip, kind]["drafted"] <= 3
        assert 0.5 < rows[chip, kind]["speedup"] < 3.0
    # A pass over fewer tokens costs no more.
    times = trees.roofline("llama3_8b+llama3.2_1b", "h100", 2, trees_args())
    costs = times.pair
    assert costs.rows == (2,) and list(costs.verifier[0]) == sorted(costs.verifier[0])
    assert times.drafter.verifier[0][0] < costs.alone[0] == costs.verifier[0][0]


def trees_args():
    parser = argparse.ArgumentParser()
    trees.add_arguments(parser)
    return parser.parse_args(SIZES)


@pytest.mark.exhaustive
def test_a_pair_of_the_user(by_kind, tmp_path):
    inputs = write_bench_inputs(tmp_path)
    sizes = [x for x in SIZES if not x.startswith("--pairs")]
    assert main([*sizes, *inputs, "--children", "top", "--like", "--max-new=8"]) == 0
    assert {row["pair"] for row in by_kind().values()} == {"given"}


@pytest.mark.exhaustive
def test_the_best_are_decoded(by_kind):
    assert main([*SIZES[:-4], "--children", "top+1", "--like", "--decode", "--repeats=1"]) == 0
    rows = by_kind()
    for kind in ("chain", "top+1"):
        row = rows["here", kind]
        assert row["measured_tokens"] == pytest.approx(row["tokens_per_call"], rel=0.02)
        assert row["measured_speedup"] > 0.1 and row["speedup"] > 0.1
