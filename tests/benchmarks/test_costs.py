"""`benchmarks.costs` recovers the costs of a loop whose times are known, and writes them."""

import json

import pytest

from benchmarks.costs import main
from benchmarks.loops import Loops
from specjax.cli import bench
from specjax.drafting import read_costs

DRAFT, VERIFIER, CALL = 0.25, {1: 2.0, 2: 3.0, 4: 3.5}, 0.125


@pytest.fixture
def timed(monkeypatch):
    """Times of the loop that are a sum over its passes."""
    run = Loops.run
    seen = set()

    def known(self, method, part, temperature, limit):
        _, state = run(self, method, part, temperature, limit=limit)
        passes = self.passes(method, part, temperature, limit=limit)
        widths = method.verifier_widths
        width = next(width for width in widths if width > limit)
        # A program with one width costs more.
        verifier = VERIFIER[width] + (len(widths) == 1)
        seconds = CALL + DRAFT * passes["drafter"] + verifier * passes["verifier"]
        case = (method, part.start, temperature, limit)
        # Other work disturbs the first of the repeats.
        disturbed = 1 if case in seen else 5
        seen.add(case)
        return disturbed * seconds, state

    monkeypatch.setattr(Loops, "run", known)


def test_known_costs_are_found_predicted_and_written(quick, timed, rows, tmp_path):
    path = tmp_path / "costs.json"
    sizes = ["--rows=2", "--max-draft=3", "--held-out=2", "--repeats=2"]
    assert main([*quick, *sizes, f"--output={path}"]) == 0
    (row,) = rows()
    assert row["draft_ms"] == pytest.approx(1e3 * DRAFT)
    assert row["call_ms"] == pytest.approx(1e3 * CALL)
    for width, cost in VERIFIER.items():
        assert row[f"verifier_{width}_ms"] == pytest.approx(1e3 * cost)
    assert row["r_squared"] == pytest.approx(1.0) and row["one_width_r_squared"] < 0.999
    assert [(x["temperature"], x["max_draft"]) for x in row["predictions"]] == [(0, 2), (1, 2)]
    assert row["worst_error"] == pytest.approx(0.0, abs=1e-9)
    pair = bench.load_pair()
    costs = read_costs(path)
    assert costs.pair == pair.fingerprint
    assert costs.rows == (2,) and costs.widths == tuple(VERIFIER)
    assert costs.verifier[0] == pytest.approx(list(VERIFIER.values()))
    assert costs.draft == pytest.approx([DRAFT])
    told = json.loads(path.read_text())
    assert told["models"]["dtypes"] == {"verifier": ["float32"], "drafter": ["float32"]}
