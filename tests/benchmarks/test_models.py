"""The benchmark of networks measures what it says; no time is asserted."""

import pytest

from benchmarks import models
from specjax.models import Seq2SeqLM


def test_the_measured_models_have_the_sizes_they_are_named_after():
    for name, millions in (("60m", 60), ("220m", 220)):
        assert Seq2SeqLM(models._MODELS[name]).num_params() == pytest.approx(
            millions * 1e6, rel=0.02
        )


def test_each_block_is_compared_with_a_read(rows):
    few = ["--models", "tiny", "--steps", "2", "--repeats", "1"]
    assert models.main([*few, "--tokens", "1", "3"]) == 0
    rows = rows()
    assert [row["what"] for row in rows] == ["extend", "extend", "plain read"]
    one, three, read = rows
    assert three["times_one"] == pytest.approx(three["ms"] / one["ms"])
    assert one["read_fraction"] == pytest.approx(read["ms"] / one["ms"])
    assert all(row["ms"] > 0 for row in rows)
    # Decoder, tied table, self and cross entries; no encoder, no cross-attention kernels.
    width, joined, mlp = 32, 6 * 64, 64
    layer = 4 * width * joined + 2 * width * joined + 3 * width * mlp + 3 * width
    floats = 2 * layer + width + 6 * 32 + 64 * width + 2 * 2 * joined * (160 + 32)
    assert one["bytes_read"] == 4 * floats + 32


def test_a_plain_read_takes_every_step():
    read = models._plain_read(4_000, 3)
    assert float(read()) == float(read()) == 3_000
