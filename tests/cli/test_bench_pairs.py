"""The benchmarks of pairs run on any pair, and name bad input."""

import json

import numpy as np
import pytest

import specjax
from specjax.cli.bench import acceptance
from specjax.cli.main import main
from specjax.text import Result, Row, RowInfo, RunInfo
from tests import tiny_pair

CALLS = (("drafter", "draft"), ("verifier", "verifier"))


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    named = tiny_pair.write_bench_inputs(tmp_path_factory.mktemp("pair"))
    small = ["--rows=2", "--drafts=2", "--temperatures=0", "--max-new=6", "--repeats=1"]
    return [*named, *small]


def test_figures_fit_together(arguments, capsys, monkeypatch):
    # One whose programs compile quickly.
    pair = specjax.Pair(tiny_pair.tabular(1), tiny_pair.tabular(2))
    monkeypatch.setattr(specjax, "load_pair", lambda **_: pair)
    assert main(["bench", "speedup", *arguments]) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    ideal = row["tokens_per_call"] / (row["max_draft"] * row["c"] + row["r"])
    assert row["ideal"] == pytest.approx(ideal)
    assert row["of_ideal"] == pytest.approx(row["speedup"] / ideal)
    assert 1 <= row["tokens_per_call"] <= 3


@pytest.mark.exhaustive
def test_overhead_is_the_loops_time_over_its_passes(arguments, capsys):
    assert main(["bench", "loop", *arguments]) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    drafter, verifier = (row[f"{m}_calls"] * row[f"{t}_ms"] for m, t in CALLS)
    assert row["overhead"] == pytest.approx(row["loop_ms"] / (drafter + verifier))
    # Two drafts per round, and a third if the whole block was accepted.
    assert 2 * row["verifier_calls"] <= row["drafter_calls"] <= 3 * row["verifier_calls"]
    assert np.isfinite(row["start_ms"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--rows=9", "has 4 prompts, but a batch needs 9"),
        ("--drafts=0", "--drafts must be at least 1, got [0]"),
        ("--inputs=/missing.txt", "/missing.txt"),
        ("--max-new=2000000000", "give a smaller --max-new or --rows, or shorter prompts"),
        ("--max-new=2147483648", "--max-new must be below 2147483648, got 2147483648"),
    ],
)
def test_bad_input_is_one_line(arguments, capsys, change, message):
    assert main(["bench", "loop", *arguments, change]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


@pytest.mark.exhaustive
def test_acceptance_counts_rows(arguments, capsys, monkeypatch):
    alone = []
    decode = specjax.Decoder.__call__

    def spy(self, *args, **options):
        if isinstance(self.models, specjax.TextModel):
            alone.append(self.describe()["temperature"])
        return decode(self, *args, **options)

    monkeypatch.setattr(specjax.Decoder, "__call__", spy)
    pair_and_prompts = arguments[:3]
    sizes = ["--rows=4", "--drafts=2", "--max-new=6", "--temperatures", "0", "1"]
    assert main(["bench", "acceptance", *pair_and_prompts, *sizes]) == 0
    assert alone == [0.0]
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert [(row["temperature"], row["verification"]) for row in rows] == [
        *((0.0, "Token"), (0.0, "Block"), (1.0, "Token"), (1.0, "Block"))
    ]
    assert [row["same_as_verifier"] for row in rows] == [4, 4, None, None]
    for row in rows:
        assert row["rows_below"] == 0 and row["sum_P"] >= row["sum_prod"] * (1 - 1e-5)
        assert row["standard_error"] >= 0
    for token, block in (rows[:2], rows[2:]):
        assert token["difference"] is None and token["difference_se"] is None
        assert block["difference"] == block["tokens_per_call"] - token["tokens_per_call"]
    # When greedy, both accept the same drafts, row by row.
    assert rows[1]["difference"] == rows[1]["difference_se"] == 0.0


def _info(emitted, verifier_calls, drafted=(0, 0), accepted=(0, 0), **sums):
    rows = len(emitted)
    zeros = {name: np.zeros(rows) for name in RowInfo._fields}
    # The number of rounds of one token.
    lengths = {
        f"{name}_lengths": np.stack([np.zeros(rows, int), np.array(counts[:rows])], axis=1)
        for name, counts in (("drafted", drafted), ("accepted", accepted))
    }
    given = {"emitted": np.array(emitted), "calls": {"verifier": np.array(verifier_calls)}}
    return RunInfo(
        RowInfo(**{**zeros, **lengths, **given, **{k: np.array(v) for k, v in sums.items()}})
    )


# Rate 2; residuals 2 and -2 of 4 calls.
FIRST = _info(
    emitted=[6, 2],
    verifier_calls=[2, 2],
    drafted=[5, 5],
    accepted=[4, 0],
    block_sum=[3.0, 1.0],
    token_sum=[2.5, 1.5],
)
# Rate 4; residuals -2 and 2 of 3 calls.
SECOND = _info(emitted=[6, 6], verifier_calls=[2, 1])


def test_acceptance_figures_are_those_of_the_rows():
    # A sum of n parts with estimated mean: the root of n / (n - 1) times the sum of squares.
    assert acceptance.figures(FIRST) == {
        "tokens_per_call": 2.0,
        "standard_error": 1.0,
        "difference": None,
        "difference_se": None,
        "acceptance_rate": 0.4,
        "sum_P": 4.0,
        "sum_prod": 4.0,
        "rows_below": 1,
    }


def test_a_difference_is_compared_row_by_row():
    found = acceptance.figures(SECOND, FIRST)
    assert found["difference"] == 2.0
    # -2/3 - 2/4 and 2/3 + 2/4.
    assert found["difference_se"] == pytest.approx(np.sqrt(2 * 2 * (7 / 6) ** 2))
    assert acceptance.figures(FIRST, FIRST)["difference_se"] == 0.0


def test_one_row_has_no_standard_error():
    one = _info(emitted=[6], verifier_calls=[2])
    found = acceptance.figures(one, one)
    assert found["tokens_per_call"] == 3.0 and found["difference"] == 0.0
    assert found["standard_error"] is None and found["difference_se"] is None


def test_outputs_are_the_same_by_tokens_and_end():
    def result(*rows):
        ended_by = {True: "eos", False: "length"}
        return Result(
            tuple(
                Row(i, "a", np.array(tokens), ended_by[ended], FIRST.rows)
                for i, (tokens, ended) in enumerate(rows)
            )
        )

    first = result(([3, 4], True), ([3, 4], True), ([3, 4], True), ([3, 4], False))
    second = result(([3, 4], True), ([3, 5], True), ([3, 4], False), ([3, 4, 4], False))
    assert acceptance.same(first, first) == 4
    assert acceptance.same(first, second) == 1
    with pytest.raises(ValueError, match="zip"):
        acceptance.same(first, result(([3, 4], True)))


@pytest.mark.parametrize(
    ("line", "message"),
    [("", "prompt 2 is empty"), ("ba " * 1100, "prompt 2 has 1101 tokens, more than 1024")],
)
@pytest.mark.parametrize("bench", ["speedup", "acceptance"])
def test_a_prompt_that_cannot_be_decoded_is_named(
    arguments, tmp_path, capsys, bench, line, message
):
    inputs = tmp_path / "odd.txt"
    inputs.write_text(f"ba\n{line}\nba\nba\n", encoding="utf-8")
    assert main(["bench", bench, *arguments[:2], f"--inputs={inputs}", "--rows=2"]) == 2
    assert f"{inputs}, {message}" in capsys.readouterr().err


def test_a_network_that_cannot_be_grown_is_told(arguments, capsys, monkeypatch):
    models = [tiny_pair.tabular(seed) for seed in (1, 2)]
    monkeypatch.setattr(specjax, "load_pair", lambda **_: specjax.Pair(*models))
    assert main(["bench", "speedup", *arguments, "--grown"]) == 2
    assert (
        "is neither a T5 nor a Llama, which --grown needs: leave out --grown"
        in capsys.readouterr().err
    )
