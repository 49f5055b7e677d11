"""The benchmarks of whole pairs run on any pair, and name bad input."""

import json

import numpy as np
import pytest

from specjax.api import RunInfo
from specjax.cli.bench import acceptance
from specjax.cli.main import main
from specjax.decoding import DecodeInfo
from tests import tiny_pair

CALLS = (("drafter", "draft"), ("verifier", "verifier"))


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    directory = tmp_path_factory.mktemp("pair")
    paths = tiny_pair.write_pair(directory / "models")
    prompts = directory / "prompts.txt"
    prompts.write_text("\n".join(tiny_pair.sentences(4, seed=1)) + "\n", encoding="utf-8")
    named = [f"--{name}={path}" for name, path in paths.items()]
    small = ["--rows=2", "--drafts=2", "--temperatures=0", "--max-new=6", "--repeats=1"]
    return [*named, f"--inputs={prompts}", *small]


def test_figures_fit_together(arguments, capsys):
    assert main(["bench", "speedup", *arguments]) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    ideal = row["tokens_per_call"] / (row["max_draft"] * row["c"] + row["r"])
    assert row["ideal"] == pytest.approx(ideal)
    assert row["of_ideal"] == pytest.approx(row["speedup"] / ideal)
    assert 1 <= row["tokens_per_call"] <= 3


def test_overhead_is_the_loops_time_over_its_passes(arguments, capsys):
    assert main(["bench", "loop", *arguments]) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    drafter, verifier = (row[f"{m}_calls"] * row[f"{t}_ms"] for m, t in CALLS)
    assert row["overhead"] == pytest.approx(row["loop_ms"] / (drafter + verifier))
    # Two drafts a round, and a third where the whole block stood.
    assert 2 * row["verifier_calls"] <= row["drafter_calls"] <= 3 * row["verifier_calls"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--rows=9", "has 4 prompts, but a batch takes 9"),
        ("--drafts=0", "--drafts must be at least 1, got [0]"),
        ("--inputs=/missing.txt", "/missing.txt"),
    ],
)
def test_bad_input_is_one_line(arguments, capsys, change, message):
    assert main(["bench", "loop", *arguments, change]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_acceptance_counts_rows(arguments, capsys):
    pair_and_prompts = arguments[:3]
    sizes = ["--rows=4", "--drafts=2", "--max-new=6", "--temperatures", "0", "1"]
    assert main(["bench", "acceptance", *pair_and_prompts, *sizes]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["temperature"], row["verification"]) for row in rows] == [
        *((0.0, "Token"), (0.0, "Block"), (1.0, "Token"), (1.0, "Block"))
    ]
    assert [row["same_as_verifier"] for row in rows] == [4, 4, None, None]
    for row in rows:
        assert row["rows_below"] == 0 and row["sum_P"] >= row["sum_prod"] * (1 - 1e-5)
        assert row["standard_error"] >= 0


def test_the_standard_error_is_that_of_a_ratio():
    # Of each row 6 tokens in 2 calls, or 2 in 2: rate 2, residuals 2 and -2, 4 calls.
    counts = {"emitted": np.array([6, 2]), "verifier_calls": np.array([2, 2])}
    zeros = {name: np.zeros(2) for name in DecodeInfo._fields}
    found = acceptance.figures(RunInfo(DecodeInfo(**{**zeros, **counts})))
    assert found["tokens_per_call"] == 2.0
    assert found["standard_error"] == pytest.approx(np.sqrt(8) / 4)
