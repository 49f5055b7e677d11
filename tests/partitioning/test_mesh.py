"""Logits on a mesh equal those of one device, and the arrays are really split."""

import functools
import math
import types
from typing import NamedTuple

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.compiled import collectives
from specjax.models import model_from_config
from specjax.partitioning import (
    STANDARD_RULES,
    Partitioner,
    make_mesh,
    partition_spec,
)
from specjax.platforms import compiled_for
from specjax.sampling.draws import draw, num_uniforms
from specjax.types import Prompts
from tests.models.tiny import CONFIGS as TINY
from tests.models.tiny import FULL, LINEAR, QUICK, error, quick_jit, random_params
from tests.variants import variants

_SPREAD = {"vocab_size": 64, "num_heads": 8, "head_dim": 4, "mlp_dim": 32}
_OF_FOUR = {**_SPREAD, "num_kv_heads": 4}


def _pair(name):
    encoder = TINY[name].encoder.replace(**{**_OF_FOUR, "num_heads": 4})
    return TINY[name].replace(**_OF_FOUR, encoder=encoder)


CONFIGS = {
    "t5": TINY["t5_v1_1"].replace(**_SPREAD),
    "t5_tied": TINY["t5_v1_0"].replace(**_SPREAD),
    "t5gemma": _pair("t5gemma"),
    "t5gemma2": _pair("t5gemma2"),
    "llama": TINY["llama"].replace(**_OF_FOUR),
    "llama_few_kv_heads": TINY["llama"].replace(**_SPREAD, num_kv_heads=2),
    "gemma2": TINY["gemma2"].replace(**_OF_FOUR),
    "gemma4": TINY["gemma4"].replace(
        **_OF_FOUR,
        global_head_dim=8,
        **dict.fromkeys(
            ("num_global_kv_heads", "num_experts", "num_experts_per_tok", "expert_dim")
        ),
    ),
    "qwen3_5": TINY["qwen3_5"].replace(
        **_OF_FOUR,
        num_layers=2,
        layer_types=(FULL, LINEAR),
        partial_rotary_factor=0.5,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
    ),
}
ROWS, MAX_LENGTH, BLOCK = 8, 16, 3
RNG = np.random.default_rng(0)
INPUTS = RNG.integers(0, 64, (ROWS, 7)).astype(np.int32)
LENGTHS = np.array([7, 1, 3, 4, 2, 7, 6, 5], np.int32)
TOKENS = RNG.integers(0, 64, (ROWS, BLOCK)).astype(np.int32)


@pytest.fixture(scope="module", params=CONFIGS)
def alone(request):
    """A model, its parameters, and two extends on one device."""
    model = model_from_config(CONFIGS[request.param])
    params = random_params(model)
    prefilled = quick_jit(model.prefill, static_argnums=2)(
        params, Prompts(INPUTS, LENGTHS), MAX_LENGTH
    )
    extend = quick_jit(model.extend)
    first = extend(params, prefilled.cache, TOKENS, prefilled.positions)
    second = extend(params, first.cache, TOKENS, prefilled.positions + 2)
    return request.param, model, params, prefilled, (first.logits, second.logits)


@pytest.mark.parametrize("shape", variants([(2, 4), (8, 1)], (2, 4)))
def test_logits_on_a_mesh_equal_those_of_one_device(alone, shape):
    name, model, params, expected, logits = alone
    mesh = make_mesh(*shape)
    partitioner = Partitioner(mesh)
    params = jax.device_put(params, partitioner.param_shardings(model, params))
    shapes = jax.eval_shape(lambda: expected.cache)
    cache_at = partitioner.shardings(shapes, model.cache_axes(shapes))
    inputs, lengths, tokens = partitioner.place_rows((INPUTS, LENGTHS, TOKENS))
    rows = lengths.sharding
    prefill = quick_jit(
        model.prefill,
        static_argnums=2,
        out_shardings=type(expected)(cache_at, rows, rows),
    )
    cache, _, positions = prefill(params, Prompts(inputs, lengths), MAX_LENGTH)
    lowered = jax.jit(model.extend).lower(params, cache, tokens, positions)
    extend = lowered.compile(QUICK)
    first = extend(params, cache, tokens, positions)
    assert error(first.logits, logits[0]) <= 1e-5
    moved = jax.device_put(positions + 2, rows)
    second = extend(params, first.cache, tokens, moved)
    assert error(second.logits, logits[1]) <= 1e-5

    data, ways = shape
    flat = {"/".join(path): leaf for path, leaf in flatten_dict(params).items()}
    embedding = flat["token_embedder/embedding"]
    assert embedding.sharding.shard_shape(embedding.shape) == (64 // ways, 16)
    for path, divided in (("mlp/wo/kernel", 0), ("self_attention/query/kernel", 1)):
        kernel = flat[f"decoder/layers_0/{path}"]
        shard = list(kernel.shape)
        shard[divided] //= ways
        assert [s.data.shape for s in kernel.addressable_shards] == [tuple(shard)] * 8
    heads = 2 if name == "llama_few_kv_heads" else model_kv_heads(model) // ways
    widths = [model.config.of_layer(i).head_dim for i in model.config.style.cached]
    for cached in (cache, second.cache):
        for width, keys, values in zip(widths, cached.keys, cached.values, strict=True):
            shape = keys.addressable_shards[0].data.shape
            assert shape == (ROWS // data, heads, MAX_LENGTH, width)
            shape = values.addressable_shards[0].data.shape
            assert shape == (ROWS // data, heads, width, MAX_LENGTH)
    for cached in (cache, second.cache) if name == "qwen3_5" else ():
        for layer in cached.recurrent.layers:
            state, inputs = (x.addressable_shards[0].data for x in (layer.state, layer.inputs[2]))
            assert state.shape == (ROWS // data, 4 // ways, 2, 6, 5)
            assert inputs.shape == (ROWS // data, 35, 40 // ways)
    # The compiler moves activations between devices, never the cache.
    whole = f"{ROWS // data},{model_kv_heads(model)},"
    gathered = [line for line in extend.as_text().splitlines() if "all-gather(" in line]
    for width in set(widths):
        assert not [line for line in gathered if f"{whole}{MAX_LENGTH},{width}]" in line]
        assert not [line for line in gathered if f"{whole}{width},{MAX_LENGTH}]" in line]


def model_kv_heads(model):
    return getattr(model.config, "num_kv_heads", model.config.num_heads)


def test_a_mesh_of_one_device_changes_nothing(alone):
    _, model, params, prefilled, logits = alone
    mesh = make_mesh(1, 1)
    params = jax.device_put(params, Partitioner(mesh).param_shardings(model, params))
    assert all(leaf.is_fully_replicated for leaf in jax.tree.leaves(params))
    extend = quick_jit(model.extend)
    placed = jax.device_put((prefilled.cache, TOKENS, prefilled.positions), jax.devices()[0])
    out = extend(params, *placed)
    assert error(out.logits, logits[0]) == 0


@pytest.mark.parametrize(
    ("shape", "axes", "units", "expected"),
    [
        ((64, 16), ("vocab", "embed"), {}, P("model", None)),
        ((62, 16), ("vocab", "embed"), {}, P(None, None)),  # not divisible: whole
        ((16, 32), ("embed", "joined_kv"), {"joined_kv": 4}, P(None, "model")),
        ((16, 24), ("embed", "joined_kv"), {"joined_kv": 4}, P(None, None)),  # six heads
        ((4, 8, 9, 3), ("batch", "kv_heads", "length", "kv"), {}, P("data", "model", None, None)),
        ((3, 8, 9, 3), ("batch", "kv_heads", "length", "kv"), {}, P(None, "model", None, None)),
        ((8, 8), ("mlp", "heads"), {}, P("model", None)),  # a mesh axis splits one dimension
    ],
)
def test_standard_rules(shape, axes, units, expected):
    assert partition_spec(shape, axes, make_mesh(2, 4), units=units) == expected


def test_rules_are_read_in_order():
    two_ways = [("mlp", "model"), ("embed", "model"), ("embed", "data")]
    mesh = make_mesh(2, 4)
    assert partition_spec((8, 8), ("embed", "mlp"), mesh, two_ways) == P("data", "model")
    assert partition_spec((6, 6), ("embed", "mlp"), mesh, two_ways) == P("data", None)
    fixed = [("embed", None), ("embed", "data")]
    assert partition_spec((8,), ("embed",), mesh, fixed) == P(None)


def test_rows_are_spread_and_scalars_are_not():
    partitioner = Partitioner(make_mesh(8))
    assert partitioner.row_multiple == 8
    placed = partitioner.place_rows({"step": np.zeros(()), "tokens": np.arange(24).reshape(8, 3)})
    assert placed["step"].sharding.spec == P()
    assert placed["tokens"].sharding.spec == P("data", None)
    with pytest.raises(ValueError, match="mesh must come from .*make_mesh, got 4"):
        Partitioner(4)


@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("vocab", [32_128, 128_256])
def test_draws_gather_no_vocabulary(vocab, told):
    """Their 251 and 1,002 nodes of 128 are no multiple of four: a draw that knows pads them."""
    ways, rows = 4, 2
    spread = NamedSharding(make_mesh(2, ways), P("data", "model"))
    uniforms = jax.ShapeDtypeStruct((rows, num_uniforms(vocab)), np.float32)
    weights = jax.ShapeDtypeStruct((rows, vocab), np.float32, sharding=spread)
    with compiled_for(Partitioner(make_mesh(2, ways)) if told else None):
        program = jax.jit(jax.vmap(draw)).lower(weights, uniforms).compile()
    most = max(math.prod(shape) for one in collectives(program.as_text()) for shape in one.shapes)
    # What crosses is a few nodes at the borders, and the sums of all.
    assert (most <= vocab // 30) == told


class Ways(NamedTuple):
    """Stands for a partitioner of as many devices, which need not be there."""

    number: int

    @property
    def mesh(self):
        return types.SimpleNamespace(size=self.number)

    def ways(self, name):
        assert name == "vocab"
        return self.number


@pytest.mark.parametrize(("vocab", "most"), [(32_128, 16), (65_520, 6)])
def test_a_tree_is_the_same_however_many_devices_share_it(vocab, most):
    weights = np.random.default_rng(0).random(vocab, np.float32)
    uniforms = np.random.default_rng(1).random((200, num_uniforms(vocab)), np.float32)

    def tokens(ways):
        with compiled_for(Ways(ways)):
            return np.asarray(jax.vmap(functools.partial(draw, weights))(uniforms))

    assert (tokens(1) == tokens(most)).mean() > 0.99


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: make_mesh(4, 4), "data=4 times model=4 needs 16 devices, but there are 8"),
        (lambda: make_mesh(model=3), "model=3 does not divide 8 devices: give `data` too"),
        (lambda: make_mesh(model=16), "model=16 needs 16 devices, but there are 8: choose"),
        (
            lambda: make_mesh(model=8, devices=jax.devices()[:1]),
            "model=8 needs 8 devices, but there is 1: choose smaller sizes",
        ),
        (lambda: make_mesh(devices=[]), r"devices must have at least one device, got \[\]"),
        (lambda: make_mesh(0, 4), "mesh size data must be a whole number of at least 1, got 0"),
        (lambda: make_mesh(2.0, 4), "mesh size data must be a whole number .*, got 2.0"),
        (lambda: make_mesh(model=None), "mesh size model must be a whole number .*, got None"),
        (lambda: make_mesh(model=True), "mesh size model must be a whole number .*, got True"),
        (
            lambda: partition_spec((2,), ("batch",), make_mesh(8), [("batch", "rows")]),
            r"rules must name axes of the mesh, \['data', 'model'\], got \['rows'\]",
        ),
        (
            lambda: partition_spec((2,), ("beam",), make_mesh(8), STANDARD_RULES),
            r"no entry for the logical axes \['beam'\]: add \(name, None\)",
        ),
    ],
)
def test_bad_mesh_sizes_and_rules_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
