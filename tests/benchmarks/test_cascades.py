"""`benchmarks.cascades`: figures that fit together."""

import numpy as np
import pytest

import specjax
from benchmarks import cascades
from specjax.evaluation import Bootstrap
from tests import tiny_pair


def test_the_improvement_counts_passes_of_all_models():
    found = cascades.Decoded(
        seconds=np.ones(2),
        tokens=np.array([6, 10]),
        calls={"verifier": np.array([2, 2]), "drafter": np.array([10, 10])},
    )
    costs = {"verifier": 1.0, "drafter": 0.2}
    found = Bootstrap().interval(found.improvement(costs))
    assert found.value == pytest.approx(16 / (4 + 0.2 * 20))
    assert (found.low, found.high) == pytest.approx((6 / 4, 10 / 4))


@pytest.fixture
def arguments(tmp_path, monkeypatch):
    common = tiny_pair.write_bench_inputs(tmp_path)
    pair = specjax.Pair(tiny_pair.tabular(1), tiny_pair.tabular(2))
    monkeypatch.setattr(specjax, "load_pair", lambda **_: pair)
    monkeypatch.setattr(cascades, "load_text_model", lambda _: tiny_pair.tabular(3))
    few = ["--max-new=6", "--prompts=2", "--repeats=1", "--temperatures", "0"]
    cascade = "Cascade(((1, 1), (0, 1)), ('drafter', 'drafter_2'))"
    return [*common, *few, "--drafters", "third", "--drafts", "2", "1", "Lookup()", cascade]


@pytest.mark.exhaustive
def test_figures_fit_together(arguments, rows):
    assert cascades.main(arguments) == 0
    alone, *others = rows()
    assert alone["ms"] == alone["wall"] == alone["tokens_per_call"] == 1.0
    for row in others:
        assert row["ms_low"] <= row["ms"] <= row["ms_high"] and row["same"] == 2
        # A pass of the verifier costs 1, and others cost something.
        assert row["ms"] <= row["tokens_per_call"] + 1e-9
        assert row["wall_low"] <= row["wall"] <= row["wall_high"]
        if "Lookup" in row["drafts"]:
            assert row["ms"] == pytest.approx(row["tokens_per_call"])
    assert max(row["ms_gain"] for row in others[:2]) == 0.0
