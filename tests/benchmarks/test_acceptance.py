"""`benchmarks.acceptance` counts rows, and its figures are those of the rows."""

import numpy as np
import pytest

import specjax
from benchmarks import acceptance
from specjax.text.results import Result, Row, RowInfo, RunInfo
from tests import tiny_pair


@pytest.fixture(scope="module")
def arguments(tmp_path_factory):
    return tiny_pair.write_bench_inputs(tmp_path_factory.mktemp("pair"))


@pytest.mark.exhaustive
def test_acceptance_counts_rows(arguments, rows, monkeypatch):
    alone = []
    decode = specjax.Decoder.__call__

    def spy(self, *args, **options):
        if isinstance(self.models, specjax.TextModel):
            alone.append(self.describe()["temperature"])
        return decode(self, *args, **options)

    monkeypatch.setattr(specjax.Decoder, "__call__", spy)
    sizes = ["--rows=4", "--drafts=2", "--max-new=6", "--temperatures", "0", "1"]
    assert acceptance.main([*arguments, *sizes]) == 0
    assert alone == [0.0]
    rows = rows()
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


def test_one_row_has_no_standard_error_and_no_drafts_no_rate():
    one = _info(emitted=[6], verifier_calls=[2])
    found = acceptance.figures(one, one)
    assert found["tokens_per_call"] == 3.0 and found["difference"] == 0.0
    assert found["standard_error"] is found["difference_se"] is found["acceptance_rate"] is None


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
