"""The benchmarks of networks and layouts measure what they say; no time is asserted."""

import json
import sys

import jax
import numpy as np
import pytest

from benchmarks import fusions, layouts, models
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


def test_all_forms_of_experts_compute_the_same():
    rng = np.random.default_rng(0)
    stack = rng.standard_normal((5, 8, 6), np.float32)
    numbers = np.array([0, 0, 1, 3, 3, 4], np.int32)
    rows = rng.standard_normal((6, 8), np.float32)
    given = rows, stack, np.bincount(numbers, minlength=5).astype(np.int32), numbers
    for function in layouts._of_experts(3).values():
        y = jax.jit(function)(*given)
        np.testing.assert_allclose(
            y, np.einsum("rn,rnm->rm", rows, stack[numbers]), rtol=1e-5, atol=1e-6
        )


def test_all_layouts_compute_the_same():
    rng = np.random.default_rng(0)
    shapes = {"query": (4, 6), "key": (4, 6), "value": (4, 6), "out": (6, 4)}
    shapes |= {"wi_0": (4, 5), "wi_1": (4, 5), "wo": (5, 4)}
    layers = [{k: rng.normal(size=s).astype(np.float32) for k, s in shapes.items()} for _ in "ab"]
    x = rng.normal(size=(3, 4)).astype(np.float32)
    expected = layouts._separate(x, layers)
    turned = [{k: v.T for k, v in layer.items()} for layer in layers]
    stacked = {k: np.stack([layer[k] for layer in layers]) for k in shapes}
    for y in (
        layouts._transposed(x, turned),
        layouts._fused(x, [layouts._fuse(layer) for layer in layers]),
        layouts._stacked(x, stacked),
    ):
        np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


def test_layouts_prints_a_row_for_each(capsys):
    sizes = ["--embed-dim", "8", "--joined-kv", "8", "--mlp-dim", "8", "--layers", "2"]
    more = ["--vocab", "16", "--tokens", "1", "2", "--repeats", "1", "--experts", "8"]
    assert layouts.main([*sizes, *more]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert len(rows) == 20
    assert len({(row["layout"], row["tokens"]) for row in rows}) == 20


def test_a_plain_read_takes_every_step():
    read = models._plain_read(4_000, 3)
    assert float(read()) == 3_000
    assert float(read()) == 3_000


@pytest.mark.exhaustive
def test_fusions_prints_a_row_for_each_way(capsys):
    sizes = ["--tokens", "16", "--length", "8", "--prompts", "1", "--repeats", "1"]
    assert fusions.main(sizes) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert {row["way"] for row in rows} == set(fusions._WAYS)
    assert len({row["program"] for row in rows}) * 3 == len(rows)
    assert fusions.main(["--tokens", "0"]) == 2
