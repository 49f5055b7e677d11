"""Matrices in 8 and in 4 bits: their products, their rows, and what a compiled loop reads."""

import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from benchmarks.shapes import abstract_quantised
from specjax import cpu_kernels
from specjax.models import int8, model_from_config, preset
from specjax.models.int4 import Int4Embedding, Int4Weight
from specjax.models.int8 import Int8Embedding, Int8Weight
from specjax.models.quantised import (
    FORMS,
    check_form,
    form_of,
    quantised_form,
)
from specjax.models.weights import float32_logits, is_stored, product, rows
from specjax.types import Prompts
from tests.models.test_ragged import worst_error
from tests.models.tiny import CONFIGS, error, quick_jit, tiny
from tests.variants import variants


def made(kind, shape, seed=0):
    """A random weight."""
    rng = np.random.default_rng(seed)
    if issubclass(kind, Int4Weight):
        return kind.of(jnp.asarray(rng.normal(size=shape), jnp.float32))
    values = jnp.asarray(rng.integers(-127, 128, shape), jnp.int8)
    scales = rng.uniform(0.001, 0.01, shape[kind.channel_axis])
    return kind(values, jnp.asarray(scales, jnp.float32))


def quantise(params, form="int8"):
    """Parameters with every matrix in fewer bits, as `load_model` would make them."""

    def change(like, leaf):
        if isinstance(like, Int4Weight):
            return like.of(leaf.astype(jnp.float32))
        if not isinstance(like, Int8Weight):
            return leaf
        axis = -1 - like.channel_axis
        scales = jnp.max(jnp.abs(leaf.astype(jnp.float32)), axis=axis) / 127.5
        wide = jnp.expand_dims(scales, axis)
        values = jnp.clip(jnp.round(leaf.astype(jnp.float32) / wide), -127, 127)
        return type(like)(values.astype(jnp.int8), scales)

    shapes = abstract_quantised(params, form)
    return jax.tree.map(change, shapes, params, is_leaf=is_stored)


def in_floats(params, dtype=jnp.float32):
    """The same numbers as arrays."""
    return jax.tree.map(lambda x: x.read(dtype) if is_stored(x) else x, params, is_leaf=is_stored)


def product_error(depth):
    """The largest error of a product, over the largest number.

    Kernels may multiply in 8 bits, if the inputs come in whole groups.
    """
    return 1e-2 if cpu_kernels.has_bytes() and depth % 32 == 0 else 1e-6


# Without kernels, 768 rows are read in pieces of 128, 300 of 100; 60 and 131 (a prime) in one.
@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("size", [60, 131, 300, 768, 96])
@pytest.mark.parametrize("tokens", [1, 5, 64, 300])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_are_those_of_the_matrix(kernels, size, tokens, dtype, patched):
    if not kernels:
        patched.setattr(cpu_kernels, "available", lambda: False)
    weight = made(Int4Weight if size == 96 else Int8Weight, (size, 40))
    x = jnp.asarray(np.random.default_rng(1).normal(size=(tokens, size)), dtype)
    found = jax.jit(lambda x, weight: product(x, weight))(x, weight)
    assert found.dtype == jnp.dtype(dtype) and found.shape == (tokens, 40)
    exact = np.asarray(x, np.float64) @ np.asarray(weight.read(jnp.float32), np.float64)
    assert error(found, exact) < (product_error(size) if dtype == "float32" else 2**-7)


@pytest.mark.parametrize("size", [60, 131, 300])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", [Int8Weight, Int8Embedding, Int4Embedding])
def test_logits_and_rows_are_those_of_the_matrix(size, dtype, kind):
    shape = (64, size) if kind is Int8Weight else (size, 64)
    contract = shape.index(64)
    weight = made(kind, shape)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 64)), dtype)
    logits = jax.jit(lambda x, w: float32_logits(x, w, contract))(x, weight)
    matrix = np.asarray(weight.read(jnp.float32), np.float64)
    exact = np.asarray(x, np.float64) @ (matrix if contract == 0 else matrix.T)
    assert logits.dtype == jnp.float32
    assert error(logits, exact) < product_error(
        64
    )  # operands of bfloat16 are exact, and so are their products
    index = jnp.asarray([[0, 3], [shape[0] - 1, shape[0] + 9]])
    found = rows(weight, index, jnp.dtype(dtype))
    clipped = np.minimum(index, shape[0] - 1)
    assert found.dtype == jnp.dtype(dtype)
    assert error(found, matrix[clipped]) <= (1e-6 if dtype == "float32" else 2**-8)


def test_a_number_in_4_bits_is_the_nearest_of_its_group():
    matrix = np.random.default_rng(0).normal(size=(96, 40)).astype(np.float32)
    matrix[:32] += 5.0  # far from 0
    matrix[32:64, 0], matrix[40, 1] = 0.25, 30.0
    weight = Int4Weight.of(jnp.asarray(matrix))
    groups = matrix.reshape(3, 32, 40)
    steps = (groups.max(axis=1) - groups.min(axis=1)) / 14
    # Half a step, and a rounding of the scale and of the lowest number.
    bound = (steps / 2 + 2**-10 * np.abs(groups).max(axis=1)).repeat(32, axis=0)
    difference = np.abs(np.asarray(weight.read(jnp.float32)) - matrix)
    assert weight.shape == (96, 40) and (difference <= bound).all()
    assert not difference[32:64, 0].any()
    # In all no worse than with 15 steps everywhere.
    lows, steps = groups.min(axis=1, keepdims=True), np.ptp(groups, axis=1, keepdims=True) / 15
    q = np.round((groups - lows) / np.where(steps == 0, 1, steps))
    of_15 = np.square(q * steps + lows - groups).sum(axis=1)
    assert (np.square(difference).reshape(3, 32, 40).sum(axis=1) <= 1.02 * of_15 + 1e-6).all()
    fewer = np.abs(np.asarray(weight.read(jnp.float32))[::-1] - matrix)  # a control
    assert (fewer > bound).any()


def test_numbers_that_had_4_bits_have_them_again():
    rng, half = np.random.default_rng(0), np.float16
    for count, bound in ((15, 1e-3), (14, 1e-3), (13, np.inf)):  # the last is a control
        q = rng.integers(0, count + 1, (3, 32, 40))
        q[:, 0], q[:, 1] = 0, count
        scales, lows = (rng.uniform(0.5, 1.0, (3, 1, 40)).astype(half) for _ in range(2))
        groups = q * scales.astype(np.float32) - lows.astype(np.float32)
        found = Int4Weight.of(jnp.asarray(groups.reshape(96, 40))).read(jnp.float32)
        largest = np.abs(found - groups.reshape(96, 40)).max()
        assert largest < bound * count and (bound < np.inf or largest > 0.1)


QUICK = [("t5_v1_0", "int8+embedding"), ("llama", "int8"), ("gemma2", "int4+embedding")]


@pytest.mark.parametrize("case", variants(itertools.product(CONFIGS, FORMS), *QUICK), ids=str)
def test_every_family_gives_the_logits_of_the_same_numbers_as_arrays(case):
    """In batches of ragged rows that roll back, and against a full pass over each row alone."""
    name, form = case
    t = tiny(name)
    t = t._replace(params=quantise(t.params, form))
    bound = max(2e-5, 10 * product_error(32))
    assert worst_error(t) < bound
    inputs, lengths = np.array([[3, 4, 5, 6]], np.int32), np.array([4], np.int32)
    outputs = np.array([[0, 7, 8]], np.int32)
    if not t.has_encoder:
        outputs[0, 0] = inputs[0, -1]
    floats = t._replace(params=in_floats(t.params)).full(inputs, lengths, outputs)
    assert error(t.full(inputs, lengths, outputs), floats) < bound


@pytest.mark.parametrize("name", CONFIGS)
def test_which_parameters_are_in_8_bits(name):
    shapes = flatten_dict(model_from_config(CONFIGS[name]).abstract_params(), sep="/")
    plain, embedded, fewer, fewest = (
        {path: quantised_form(path, leaf.shape, form) for path, leaf in shapes.items()}
        for form in FORMS
    )
    for path, leaf in shapes.items():
        of_expert = path.endswith(("/wi_0", "/wi_1", "/wo"))
        assert not of_expert or name in ("mixtral", "gpt_oss", "qwen3_next", "gemma4")
        of_product = path.endswith("/kernel") and "_conv" not in path
        assert plain[path] == (Int8Weight if of_product or of_expert else None), path
        assert quantised_form(path, leaf.shape, None) is None
    changed = {path for path in shapes if plain[path] != embedded[path]}
    assert changed == {"token_embedder/embedding", "layer_inputs/embedding"} & shapes.keys()
    assert {embedded[path] for path in changed} == {Int8Embedding}
    for path, leaf in shapes.items():
        few = plain[path] is Int8Weight and len(leaf.shape) == 2 and leaf.shape[0] % 32 == 0
        assert fewer[path] is (Int4Weight if few else embedded[path]), path
        table = path == "token_embedder/embedding" and leaf.shape[1] % 32 == 0
        assert fewest[path] is (Int4Embedding if table else fewer[path]), path


@pytest.mark.parametrize("bad", ["int2", "", 8, True, ("int8",)])
def test_other_forms_are_refused(bad):
    expected = r"`weights` must be one of int8, int8\+embedding, int4, int4\+embedding, or None"
    with pytest.raises(ValueError, match=expected):
        check_form(bad)
    with pytest.raises(ValueError, match="one of int8, int8"):
        form_of({"verifier": bad}, "verifier")
    assert form_of({"verifier": "int8"}, "drafter") is None


def loop_text():
    """The compiled text of a loop of passes, and the sizes of the matrices."""
    config = preset("t5_v1_1_small", num_encoder_layers=1, num_decoder_layers=2, vocab_size=640)
    model = model_from_config(config).for_devices("cpu")
    params = quantise(model.init(jax.random.key(0)))
    inputs, lengths = np.ones((2, 8), np.int32), np.full(2, 8, np.int32)
    first = quick_jit(model.prefill, static_argnums=2)(params, Prompts(inputs, lengths), 32)

    def loop(params, cache, tokens, positions):
        def body(state):
            cache, tokens, positions, step = state
            out = model.extend(params, cache, tokens, positions)
            tokens = jnp.argmax(out.logits, -1).astype(jnp.int32)
            return out.cache, tokens, positions + 1, step + 1

        start = cache, tokens, positions, jnp.int32(0)
        return jax.lax.while_loop(lambda state: state[-1] < 20, body, start)

    given = params, first.cache, first.tokens[:, None], first.positions
    shapes = {
        ",".join(map(str, x.shape)) for x in jax.tree.leaves(params["decoder"]) if x.dtype == "int8"
    }
    return jax.jit(loop).lower(*given).compile().as_text(), shapes | {"512,640"}


def carried(text, dtype, shapes):
    """The number of a loop's carried arrays of this dtype that have a matrix's shape."""
    loops = [line for line in text.splitlines() if re.search(r"= \(.*\) while\(", line)]
    outer = max(loops, key=len)
    return len(re.findall(rf"\b{dtype}\[(?:{'|'.join(shapes)})\]", outer.split(" while(")[0]))


@pytest.mark.parametrize(
    ("few", "kernels", "barrier"),
    [(64, True, True), (64, False, True), (0, False, True), (0, False, False)],
)
def test_a_loop_carries_integers_and_no_converted_matrix(few, kernels, barrier, patched):
    """In kernels, in pieces, as on CPUs for few tokens, and whole, as elsewhere; and a control."""
    patched.setattr(int8, "_FEW_TOKENS", few)
    if kernels:
        pytest.importorskip("llvmlite")
    else:
        patched.setattr(cpu_kernels, "available", lambda: False)
    if not barrier:
        patched.setattr(jax.lax, "optimization_barrier", lambda x: x)
    text, shapes = loop_text()
    # Of a layer: four and two kernels of attention (two are used only before the loop), three of
    # the MLP; and the logits.
    assert carried(text, "s8", shapes) == 2 * 9 + 1 or not barrier
    assert (carried(text, "f32", shapes) == 0) == barrier


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "control"])
def test_a_loop_reads_rows_of_bfloat16_and_copies_no_matrix(tied, patched):
    if not tied:
        patched.setattr(jax.lax, "optimization_barrier", lambda x: x)
    table, index = jnp.ones((4096, 64), jnp.bfloat16), jnp.zeros((2,), jnp.int32)

    def looped(table, index):
        def add(i, x):
            return x + rows(table, index + i, jnp.bfloat16)

        return jax.lax.fori_loop(0, 3, add, jnp.zeros((2, 64), jnp.bfloat16))

    memory = jax.jit(looped).lower(table, index).compile().memory_analysis()
    assert (memory.temp_size_in_bytes < table.nbytes) == tied
