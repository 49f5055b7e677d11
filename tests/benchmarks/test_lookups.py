"""`benchmarks.lookups`: figures that fit together."""

import json

import pytest

from benchmarks import lookups
from benchmarks.lookups import main
from specjax.models import preset

SIZES = ["--contexts", "20", "40", "--rows", "1", "2", "--matches", "5", "--vocab=50"]
COMMAND = [*SIZES, "--max-draft=3", "--pass-context=40", "--repeats=1"]
TINY = {"embed_dim": 16, "num_heads": 2, "head_dim": 8, "mlp_dim": 16}
TINY |= {"num_encoder_layers": 1, "num_decoder_layers": 1}


@pytest.mark.exhaustive
def test_figures_fit_together(monkeypatch, capsys):
    monkeypatch.setattr(lookups, "preset", lambda name, **sizes: preset(name, **TINY, **sizes))
    assert main(COMMAND) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert len(rows) == 4
    for row in rows:
        assert row["round_us"] == pytest.approx(row["us_per_row"] * row["rows"]) and row["rows"] > 0
        beside = (row["context"], row["rows"]) == (40, 1)
        assert ("share_of_pass" in row) == beside
        if beside:
            assert row["share_of_pass"] * row["pass_ms"] == pytest.approx(row["round_us"] / 1e3)


@pytest.mark.parametrize("match", [0, 5])
def test_the_rounds_match_as_they_say(match):
    drafter = lookups.LookupDrafter(1000, 3)
    state, _ = lookups._rounds(drafter, 40, 2, match)()
    assert state.match.lengths.tolist() == [match] * 2 and state.lengths.tolist() == [40] * 2
