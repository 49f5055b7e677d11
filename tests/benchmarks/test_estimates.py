"""`benchmarks.estimates` on a tiny pair."""

import json

import pytest

from benchmarks import estimates
from benchmarks.estimates import main
from tests.tiny_pair import write_bench_inputs


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    return [*write_bench_inputs(tmp_path_factory.mktemp("screening"), 80), "--max-new=12"]


@pytest.mark.exhaustive
def test_expected_and_decoded_tokens_agree(options, capsys):
    sizes = ["--screened=40", "--prompts=40", "--rules", "Lossless", "--drafts", "1", "4"]
    assert main([*options, *sizes]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["settings"] == 4 == len(found["rows"])
    for row in found["rows"]:
        assert row["decoded_nats"] == pytest.approx(0.0, abs=1e-6) == row["expected_nats"]
        # Both are means over 40 texts: about five standard errors of their difference.
        assert abs(row["expected"] - row["decoded"]) < 7 * row["expected_error"] + 1e-9
    by_draft = {(r["max_draft"], r["verification"]): r["expected"] for r in found["rows"]}
    assert by_draft[4, "Token"] > by_draft[1, "Token"]
    assert found["rank_correlation"] > 0.3
    assert found["seconds_of_estimating"] > 0 < found["seconds_of_decoding"]


def test_ranks_are_compared():
    found = estimates.rank_correlation
    assert found([1.0, 2.0, 3.0], [1.1, 5.0, 9.0]) == pytest.approx(1.0)
    assert found([1.0, 2.0, 3.0], [3.0, 2.0, 1.0]) == pytest.approx(-1.0)
    assert found([1.0, 1.0, 1.0], [3.0, 2.0, 1.0]) is None
    assert found([1.0, 2.0], [3.0, 2.0]) is None
