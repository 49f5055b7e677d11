"""The benchmark of networks measures what it says; no time is asserted."""

import json
import sys

import pytest

from benchmarks import models
from specjax.models import Seq2SeqLM

TINY = ["--models", "tiny", "--steps", "2", "--repeats", "1"]


def _rows(capsys, *options):
    assert models.main([*TINY, *options]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]


def test_the_measured_models_have_the_sizes_they_are_named_after():
    for name, millions in (("60m", 60), ("220m", 220)):
        assert Seq2SeqLM(models._MODELS[name]).num_params() == pytest.approx(
            millions * 1e6, rel=0.02
        )


@pytest.mark.exhaustive
def test_each_block_is_compared_with_a_read_and_with_transformers(capsys):
    rows = _rows(capsys, "--tokens", "1", "3")
    assert [row["what"] for row in rows] == ["extend", "extend", "plain read", "transformers"]
    one, three, read, peer = rows
    assert three["times_one"] == pytest.approx(three["ms"] / one["ms"])
    assert one["read_fraction"] == pytest.approx(read["ms"] / one["ms"])
    assert three["vs_peer"] == pytest.approx(peer["ms"] / three["ms"])
    assert all(row["ms"] > 0 for row in rows)
    # Decoder, tied table, self and cross entries; no encoder, no cross-attention kernels.
    width, joined, mlp = 32, 6 * 64, 64
    layer = 4 * width * joined + 2 * width * joined + 3 * width * mlp + 3 * width
    floats = 2 * layer + width + 6 * 32 + 64 * width + 2 * 2 * joined * (160 + 32)
    assert one["bytes_read"] == 4 * floats + 32


def test_without_transformers_it_says_so(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert models.main([*TINY, "--tokens", "2"]) == 0
    out = capsys.readouterr().out
    assert "transformers and torch are not installed: no comparison" in out
    assert [r["what"] for r in json.loads(out.splitlines()[-1])["rows"]] == ["extend", "plain read"]


def test_other_logits_than_the_peers_stop_it(capsys, monkeypatch):
    real = models._random_params

    def spoilt(model):
        """Prepared from one embedding, compared with another."""
        params = real(model)
        monkeypatch.setattr(Seq2SeqLM, "extend", lambda self, p, *args: extend(self, wrong, *args))
        wrong = {
            **params,
            "token_embedder": {"embedding": params["token_embedder"]["embedding"] + 1},
        }
        return params

    extend = Seq2SeqLM.extend
    monkeypatch.setattr(models, "_random_params", spoilt)
    with pytest.raises(RuntimeError, match="transformers' logits differ from ours by"):
        models.main([*TINY, "--tokens", "1"])


def test_a_plain_read_takes_every_step():
    read = models._plain_read(4_000, 3)
    assert float(read()) == 3_000
    assert float(read()) == 3_000
