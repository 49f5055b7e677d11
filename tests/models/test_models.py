"""Properties of models other than logits: protocol, parameters, axes, dtypes, dropout."""

import contextlib
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict

from specjax import cpu_kernels
from specjax.models import Seq2SeqLM, T5Config, model_from_config
from specjax.models.attention import Attention
from specjax.partitioning import Partitioner, make_mesh
from specjax.platforms import compiled_for
from specjax.types import Prompts
from tests.models.tiny import CONFIGS, error, quick_jit, random_params, tiny
from tests.variants import variants

FIXTURES = pathlib.Path(__file__).parents[3] / "shared" / "fixtures" / "t5x"
# The T5X checkpoints in the fixtures are of this configuration.
T5X_CONFIG = T5Config(
    vocab_size=384,
    embed_dim=64,
    num_heads=4,
    head_dim=16,
    mlp_dim=128,
    num_encoder_layers=2,
    num_decoder_layers=2,
)


def _flat(tree):
    return {"/".join(path): leaf for path, leaf in flatten_dict(tree).items()}


def test_the_layers_of_a_program_share_a_trace(patched):
    model, traced, attend = tiny("llama").model, [], Attention._attend
    assert len(model.config.style.layers) > 1

    def counted(self, *args):
        traced.append(self)
        return attend(self, *args)

    patched.setattr(Attention, "_attend", counted)

    def traces(length, context):
        traced.clear()
        tokens = jnp.ones((1, length), jnp.int32)
        with context:
            jax.make_jaxpr(model.apply)(model.abstract_params(), tokens)
        return len(traced)

    callers, alone = contextlib.nullcontext(), compiled_for(None)
    # The form of a layer depends on the devices of the program.
    meshed = compiled_for(Partitioner(make_mesh(2, 1)))
    assert [traces(3, callers), traces(4, callers), traces(3, alone), traces(3, meshed)] == [1] * 4
    # And on flax's rules of placement, and on the precision of products.
    assert traces(3, nn.logical_axis_rules([("embed", "data")])) == 1
    assert traces(3, jax.default_matmul_precision("float32")) == 1
    assert traces(3, callers) == 0


def test_flax_sees_the_intermediates_of_each_layer():
    model = tiny("llama").model
    tokens = jnp.ones((1, 3), jnp.int32)
    variables = {"params": random_params(model, 0)}
    _, seen = model.network.apply(
        variables, tokens, capture_intermediates=True, mutable=["intermediates"]
    )
    assert {"layers_0", "layers_1"} <= set(seen["intermediates"]["decoder"])


@pytest.mark.parametrize(
    "name", variants(["t5_v1_0", "llama_grouped_tied", "gemma2"], "llama_grouped_tied")
)
def test_init_agrees_with_abstract_params(name):
    model = tiny(name).model
    params = quick_jit(model.init)(jax.random.key(0))
    for path, leaf in _flat(model.abstract_params()).items():
        made = _flat(params)[path]
        assert (made.shape, made.dtype) == (leaf.shape, leaf.dtype)
    axes = _flat(model.param_axes(model.abstract_params()))
    assert {k: len(v) for k, v in axes.items()} == {k: v.ndim for k, v in _flat(params).items()}
    # Logits of about unit scale, so that training starts near log V.
    t = tiny(name)
    tokens = np.random.default_rng(0).integers(0, 48, (2, 8)).astype(np.int32)
    logits = t.apply(params, tokens, tokens) if t.has_encoder else t.apply(params, tokens)
    assert 0.2 < float(jnp.std(logits)) < 3


def _lines(name):
    if not (FIXTURES / name).exists():
        pytest.skip(f"{FIXTURES / name} is not there")
    return [line.split("\t") for line in (FIXTURES / name).read_text().splitlines()]


def test_t5_has_the_tree_and_the_axes_of_t5x():
    model = Seq2SeqLM(T5X_CONFIG)
    shapes = {path: str(leaf.shape) for path, leaf in _flat(model.abstract_params()).items()}
    assert shapes == {line[0]: line[1] for line in _lines("t5_unscanned_params.txt")}
    axes = {
        f"{path}_axes": f"AxisMetadata(names={names})"
        for path, names in _flat(model.param_axes(model.abstract_params())).items()
    }
    assert axes == dict(_lines("t5_unscanned_axes.txt"))


def test_t5_is_initialised_as_t5x_does_it():
    """The parameters are those of the same key, up to the rounding that LLVM's options decide."""
    _lines("t5_unscanned_params.txt")
    expected = np.load(FIXTURES / "t5_unscanned_expected.npz")
    params = _flat(Seq2SeqLM(T5X_CONFIG).init(jax.random.key(0)))
    for path, value in expected.items():
        np.testing.assert_allclose(params[path], value, rtol=1e-6, err_msg=path)


@pytest.mark.parametrize("name", variants(["t5_v1_1", "gemma2"], "t5_v1_1"))
def test_bfloat16(name):
    config = CONFIGS[name].replace(dtype="bfloat16", param_dtype="bfloat16")
    model = model_from_config(config)
    half = random_params(model)
    assert {leaf.dtype for leaf in jax.tree.leaves(half)} == {jnp.bfloat16.dtype}
    single = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), half)
    inputs, lengths = np.full((2, 7), 5, np.int32), np.array([7, 3], np.int32)
    t = tiny(name)
    prompts = Prompts(inputs, lengths)
    cache, _, positions = t.prefill(single, prompts, 40)
    expected = t.extend(single, cache, inputs[:, :3], positions)
    cache, _, positions = quick_jit(model.prefill, static_argnums=2)(
        half, Prompts(inputs, lengths), 40
    )
    out = quick_jit(model.extend)(half, cache, inputs[:, :3], positions)
    assert {leaf.dtype for leaf in [*out.cache.keys, *out.cache.values]} == {jnp.bfloat16.dtype}
    assert out.hidden.dtype == jnp.bfloat16
    assert out.logits.dtype == jnp.float32
    assert error(out.logits, expected.logits) < 0.05
    # Not rounded to bfloat16 on the way out.
    assert np.any(out.logits != out.logits.astype(jnp.bfloat16).astype(jnp.float32))


@pytest.mark.parametrize("name", ["t5_v1_0", "gemma2", "llama"])
def test_prepared_parameters_give_the_same_logits(name, monkeypatch):
    t = tiny(name)
    if cpu_kernels.available():
        assert t.model.prepare(t.params) is t.params
        monkeypatch.setattr(cpu_kernels, "available", lambda: False)
    prepared = t.model.prepare(t.params)
    added = set(_flat(prepared)) - set(_flat(t.params))
    tied = t.model.config.tie_embeddings
    assert added == ({"token_embedder/transposed_embedding"} if tied else set())
    tokens = np.random.default_rng(0).integers(0, 48, (2, 8)).astype(np.int32)
    inputs = (tokens, tokens) if t.has_encoder else (tokens,)
    assert error(t.apply(prepared, *inputs), t.apply(t.params, *inputs)) <= 1e-6
    on_host = t.model.prepare(jax.tree.map(np.asarray, t.params))
    jax.tree.map(np.testing.assert_array_equal, on_host, prepared)
    if tied:  # the copy is read
        embedder = prepared["token_embedder"]
        zero = {**embedder, "transposed_embedding": embedder["transposed_embedding"] * 0}
        assert not np.any(t.apply({**prepared, "token_embedder": zero}, *inputs))


def test_dropout_drops_only_with_a_key():
    t = tiny("t5_v1_1")
    model = Seq2SeqLM(t.model.config.replace(dropout_rate=0.3))
    apply = quick_jit(lambda key: model.apply(t.params, tokens, tokens, dropout_key=key))
    tokens = np.random.default_rng(0).integers(0, 48, (2, 8)).astype(np.int32)
    plain = t.apply(t.params, tokens, tokens)
    assert error(quick_jit(model.apply)(t.params, tokens, tokens), plain) == 0
    first, second = apply(jax.random.key(0)), apply(jax.random.key(1))
    assert error(apply(jax.random.key(0)), first) == 0
    assert error(first, plain) > 0.01
    assert error(first, second) > 0.01


def test_gradients_flow_to_every_parameter():
    t = tiny("t5_v1_1")
    tokens = np.random.default_rng(0).integers(0, 48, (2, 8)).astype(np.int32)

    def loss(params):
        return jnp.mean(jnp.square(t.model.apply(params, tokens, tokens)))

    for path, gradient in _flat(quick_jit(jax.grad(loss))(t.params)).items():
        assert np.all(np.isfinite(gradient)), path
        assert np.any(gradient != 0), path
