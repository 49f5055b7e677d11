"""`benchmarks.costs` recovers the costs of a loop whose times are known."""

import pytest

from benchmarks.costs import main
from benchmarks.loops import Loops

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


def test_known_costs_are_found_and_predicted(quick, timed, rows):
    sizes = ["--rows=2", "--max-draft=3", "--held-out=2", "--repeats=2"]
    assert main([*quick, *sizes]) == 0
    (row,) = rows()
    assert row["draft_ms"] == pytest.approx(1e3 * DRAFT)
    assert row["call_ms"] == pytest.approx(1e3 * CALL)
    for width, cost in VERIFIER.items():
        assert row[f"verifier_{width}_ms"] == pytest.approx(1e3 * cost)
    assert row["r_squared"] == pytest.approx(1.0) and row["one_width_r_squared"] < 0.999
    assert [(x["temperature"], x["max_draft"]) for x in row["predictions"]] == [(0, 2), (1, 2)]
    assert row["worst_error"] == pytest.approx(0.0, abs=1e-9)
