"""Matrices that are quantised while a checkpoint is loaded."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import qwix
from checkpoint_helpers import CONFIGS, assert_same, logits, one_line, random_params
from jax.sharding import NamedSharding, PartitionSpec

from specjax.checkpoints import load_model, quantising, save_model
from specjax.checkpoints.arrays import flatten, unflatten
from specjax.checkpoints.saving import FORMATS
from specjax.models.int4 import Int4Weight
from specjax.models.int8 import Int8Embedding, Int8Weight
from specjax.partitioning import Partitioner, make_mesh
from tests.models.test_int8 import product_error
from tests.models.tiny import CONFIGS as TINY
from tests.variants import variants

MIXTRAL = TINY["mixtral"]
WO = "decoder/layers_0/mlp/wo/kernel"


@pytest.fixture
def saved(tmp_path):
    """Writes a model; returns its directory and its parameters."""

    def save(name="t5_v1_1", format="hf", entries=(), **sizes):
        config = CONFIGS[name].replace(**sizes)
        flat = {path: np.array(x) for path, x in flatten(random_params(config)).items()}
        for at, value in entries:
            flat[WO][at] = value
        params = unflatten(flat)
        path = save_model(tmp_path / format, config, params, format=format, replace=True)
        return path, params

    return save


@pytest.mark.parametrize("name", variants(CONFIGS, "t5_v1_0", "gemma2"))
@pytest.mark.parametrize("block", [quantising._BLOCK, 50])
def test_the_integers_are_those_of_qwix(saved, monkeypatch, name, block):
    """Of whole matrices, though blocks of channels are quantised."""
    monkeypatch.setattr(quantising, "_BLOCK", block)
    path, params = saved(name)
    floats = flatten(params)
    found = flatten(load_model(path, weights="int8+embedding").params)
    assert found.keys() == floats.keys()
    for name, weight in found.items():
        if not name.endswith(("/kernel", "/embedding")):
            np.testing.assert_array_equal(weight, floats[name])
            continue
        axis = 1 if name.endswith("/kernel") else 0
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            whole = qwix.quantize(floats[name], jnp.int8, channelwise_axes=(axis,))
        assert type(weight) is (Int8Weight if axis else Int8Embedding)
        np.testing.assert_array_equal(weight.values, whole.qvalue)
        np.testing.assert_allclose(weight.scales, whole.scale.reshape(-1), rtol=1e-6)
        difference = np.abs(np.asarray(weight.read(jnp.float32)) - floats[name])
        assert difference.max() <= 0.51 * weight.scales.max()
    kernels = flatten(load_model(path, weights="int8").params)
    assert not isinstance(kernels["token_embedder/embedding"], Int8Weight)


@pytest.mark.parametrize("block", [quantising._BLOCK, 50])
def test_4_bits_are_those_of_whole_matrices(saved, monkeypatch, block):
    monkeypatch.setattr(quantising, "_BLOCK", block)
    path, params = saved("llama", embed_dim=32)
    floats, mesh, out = (
        flatten(params),
        make_mesh(1, 2),
        "decoder/layers_0/self_attention/out/kernel",
    )
    for found in (load_model(path, weights="int4+embedding", mesh=x) for x in (None, mesh)):
        weights = flatten(found.params)
        weights = {name: x for name, x in weights.items() if isinstance(x, Int4Weight)}
        assert {out, "token_embedder/embedding"} <= weights.keys()
        for name, weight in weights.items():
            whole = type(weight).of(jnp.asarray(floats[name]))
            difference = np.abs(weight.read(jnp.float32) - whole.read(jnp.float32))
            assert difference.max() <= 1e-3 * np.abs(floats[name]).max()
    assert weights[out].values.sharding.spec[0] == "model"
    assert weights[out].scales.sharding.is_fully_replicated


@pytest.mark.parametrize("format", ["hf", "orbax"])
def test_each_expert_has_its_own_scales(tmp_path, format):
    config = MIXTRAL.replace(dense_layers=(), expert_dim=None)
    params = random_params(config)
    mlp = params["decoder"]["layers_1"]["mlp"]
    mlp["wi_0"] = mlp["wi_0"] * np.array([1, 10, 0.1, 3], np.float32)[:, None, None]
    save_model(tmp_path / "model", config, params, format=format)
    mesh = make_mesh(1, 2)
    for loaded in (load_model(tmp_path / "model", weights="int8", mesh=m) for m in (None, mesh)):
        found = loaded.params["decoder"]["layers_1"]["mlp"]["wi_0"]
        assert found.scales.shape == (4, 24)
        error = np.abs(np.asarray(found.read(jnp.float32)) - mlp["wi_0"])
        assert (error <= 0.51 * np.asarray(found.scales)[:, None]).all()
        assert (np.abs(found.values).max((1, 2)) == 127).all()
    assert found.values.sharding.spec[0] == found.scales.sharding.spec[0] == "model"
    mlp["wi_0"] = np.array(mlp["wi_0"])
    mlp["wi_0"][2, 5, 7] = np.nan
    save_model(tmp_path / "damaged", config, params, format=format)
    for weights in ("int8", None):
        with pytest.raises(ValueError, match=r"layers_1/mlp/wi_0 has nan at \(2, 5, 7\)"):
            load_model(tmp_path / "damaged", weights=weights)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_format_gives_the_same(saved, format, dtype):
    """The dtype is that of the other parameters and of the activations, not of what is rounded."""
    loaded = load_model(saved("t5_v1_1", format)[0], dtype=dtype, weights="int8")
    assert loaded.config.dtype == loaded.config.param_dtype == dtype
    assert_same(loaded.params, load_model(saved()[0], dtype=dtype, weights="int8").params)
    others = [x for x in flatten(loaded.params).values() if not isinstance(x, Int8Weight)]
    assert {x.dtype for x in others} == {jnp.dtype(dtype)}


def test_nearly_the_logits_of_the_floats(saved):
    path, params = saved("llama")
    loaded = load_model(path, weights="int8")
    exact = logits(loaded.model, params)
    found = logits(loaded.model, loaded.params)
    assert 0 < np.abs(found - exact).max() < 0.05 * np.abs(exact).max()


@pytest.mark.parametrize("format", ["hf", "orbax"])
def test_on_a_mesh_every_device_has_its_part(saved, format):
    path, _ = saved("t5_v1_1", format)
    mesh = make_mesh(2, 2)
    one = load_model(path, weights="int8+embedding")
    split = load_model(path, weights="int8+embedding", mesh=mesh)
    assert_same(split.params, one.params)
    wanted = Partitioner(mesh).param_shardings(one.model, one.params)
    for leaf, where in zip(*map(jax.tree.leaves, (split.params, wanted)), strict=True):
        assert leaf.sharding.is_equivalent_to(where, leaf.ndim)
    mlp = split.params["decoder"]["layers_0"]["mlp"]
    for name, values, scales in (("wi_0", (None, "model"), ("model",)), ("wo", ("model",), ())):
        kernel = mlp[name]["kernel"]
        for part, axes in ((kernel.values, values), (kernel.scales, scales)):
            where = NamedSharding(mesh, PartitionSpec(*axes))
            assert part.sharding.is_equivalent_to(where, part.ndim)
    found, exact = logits(split.model, split.params), logits(one.model, one.params)
    # A mesh has no kernels, which may multiply in 8 bits.
    assert np.abs(found - exact).max() < 5 * product_error(32) * np.abs(exact).max()


def test_the_largest_number_of_a_channel_is_127(saved):
    """Its quotient is 127.5, which would round to 128; a channel of zeros stays zero."""
    path, _ = saved(entries=[(np.s_[:, 0], 0.0), (np.s_[0, 1:], 100.0)])
    weight = flatten(load_model(path, weights="int8").params)[WO]
    assert not np.any(weight.values[:, 0]) and np.all(np.isfinite(weight.scales))
    np.testing.assert_array_equal(weight.values[0, 1:], 127)


@pytest.mark.parametrize(("block", "bad"), [(quantising._BLOCK, np.nan), (50, -np.inf)])
def test_numbers_that_are_not_finite_are_named(saved, monkeypatch, bad, block):
    monkeypatch.setattr(quantising, "_BLOCK", block)
    path, _ = saved(entries=[((3, 5), bad)])
    one_line(lambda: load_model(path, weights="int8"), f"{WO} has {bad} at (3, 5)")


def test_a_quantised_model_is_not_saved(saved, tmp_path):
    loaded = load_model(saved()[0], weights="int8")
    one_line(
        lambda: save_model(tmp_path / "new", loaded.model, loaded.params),
        "`params` must be arrays, got type Int8Weight",
        "quantise it when it is loaded",
    )
    assert not (tmp_path / "new").exists()


def test_other_forms_and_shardings_are_refused(saved, monkeypatch):
    path, _ = saved()
    one_line(lambda: load_model(path, weights="int2"), "`weights` must be one of int8", "'int2'")
    monkeypatch.setitem(sys.modules, "qwix", None)
    quantising._quantiser.cache_clear()
    one_line(lambda: load_model(path, weights="int8"), "pip install '.[int8]'", error=ImportError)


def test_the_check_of_the_memory_counts_bytes(saved, monkeypatch):
    path, params = saved()
    # On 8 devices of one host, which each have everything.
    whole = NamedSharding(make_mesh(8, 1), PartitionSpec())
    floats = sum(8 * x.nbytes for x in jax.tree.leaves(params))
    monkeypatch.setattr("specjax.memory.host_bytes", lambda: floats - 1)
    one_line(lambda: load_model(path, sharding=whole), "the parameters in float32: this needs")
    loaded = load_model(path, sharding=whole, weights="int8")
    for leaf in jax.tree.leaves(loaded.params):
        assert leaf.sharding.is_equivalent_to(whole, leaf.ndim)
