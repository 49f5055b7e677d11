"""What the passes of a sweep's points cost, by prices that are given."""

import dataclasses
import gzip
import json

import pytest

from specjax.sweeping.scores import prices
from tests.sweeping import world

ASKED = world.points(("opt", 0.1))


def test_passes_are_priced(tmp_path):
    how = world.measuring(costs={"verifier": 1, "drafter": 0.25, "other": 0.5})
    output = tmp_path / "out"
    world.run(output, ASKED[:3], how=how)
    records = [json.loads(line) for line in (output / "points.jsonl").read_text().splitlines()]
    found = [record["figures"]["cost_per_token"]["value"] for record in records]
    rows = []
    for name in records[2]["predictions"]:
        with gzip.open(output / name) as file:
            rows += [json.loads(line)["info"] for line in file]
    verifier, drafter = (sum(r["calls"][name] for r in rows) for name in ("verifier", "drafter"))
    assert found[:2] == [1.0, 0.25] and drafter > 0  # a pass of a model alone is a token
    emitted = sum(row["emitted"] for row in rows)
    assert found[2] == pytest.approx((verifier + 0.25 * drafter) / emitted)
    assert (output / "quality_cost.png").exists()
    # Another drafter has a price of its own, or none.
    other = dataclasses.replace(ASKED[1], drafter="other")
    assert prices(other, how.costs) == {"verifier": 0.5}
    assert prices(dataclasses.replace(ASKED[2], drafter="other"), how.costs)["drafter"] == 0.5
    assert prices(dataclasses.replace(other, drafter="unknown"), how.costs) is None
    with pytest.raises(ValueError, match="costs has no cost of a pass of the drafter"):
        world.measuring(costs={"verifier": 1.0})
