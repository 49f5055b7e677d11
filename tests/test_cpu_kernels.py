"""Products of few rows on CPUs: their numbers, the order of their sums, and where they are used."""

import platform
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax import cpu_code, cpu_kernels
from specjax.compilation import jit, step_options
from specjax.models.attention import Segment, _on_cpus
from specjax.models.int4 import Int4Embedding, Int4Weight
from specjax.models.int8 import Int8Embedding, Int8Weight
from specjax.models.layers import normalise
from specjax.models.position_encoding import MASKED
from specjax.models.weights import product
from specjax.types import Prompts
from tests.models.test_int8 import made, product_error
from tests.models.tiny import CONFIGS, tiny
from tests.variants import variants

pytest.importorskip("llvmlite")

# Depths and numbers of columns: none, one number, less than a vector, parts of several threads, and
# remainders of all.
SIZES = [(0, 4), (1, 1), (5, 3), (32, 1), (37, 53), (64, 4096), (96, 5), (130, 1031), (160, 79)]
SIZES += [(1031, 130), (2048, 90), (96, 4160)]  # the last is not narrow
SIZES_OF_4_BITS = [(32, 1), (64, 4096), (96, 5), (160, 1031), (160, 79), (2080, 90)]
SIZES_OF_4_BITS += [(96, 4160)]
FORMS = ["float32", "bfloat16", "int8"]


def matrix(form, shape, contract, seed=0):
    if form in ("int8", "int4"):
        kinds = [Int8Weight, Int8Embedding] if form == "int8" else [Int4Weight, Int4Embedding]
        return made(kinds[contract], shape[::-1] if contract else shape, seed)
    values = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return jnp.asarray(values.T if contract else values, form)


def vectors(rows, depth):
    return jnp.asarray(np.random.default_rng(1).normal(size=(rows, depth)), jnp.float32)


def numbers(weight):
    return np.asarray(weight.read(jnp.float32) if hasattr(weight, "read") else weight, np.float64)


def multiplied(contract):
    return jax.jit(lambda x, w: product(x, w, contract, jnp.float32))


@pytest.mark.parametrize("contract", [0, 1])
@pytest.mark.parametrize("form", [*FORMS, "int4"])
def test_products_are_exact_and_have_one_order(form, contract):
    if form == "int4" and not cpu_kernels.has_bytes():
        pytest.skip("this CPU has no AVX-512 VNNI, so XLA multiplies matrices of 4 bits")
    run = multiplied(contract)
    for shape in SIZES_OF_4_BITS if form == "int4" else SIZES:
        weight, x = matrix(form, shape, contract), vectors(40, shape[0])
        exact = numbers(weight)
        exact = np.asarray(x, np.float64) @ (exact.T if contract else exact)
        alone = np.concatenate([run(x[i : i + 1], weight) for i in range(40)])
        bound = product_error(shape[0]) if "int" in form else 1e-6
        assert np.abs(alone - exact).max() <= bound * np.abs(exact).max(), shape
        many = () if form == "float32" and not contract else (40,)  # those are XLA's
        for rows in (2, 3, 6, 7, 12, 16, *many):
            np.testing.assert_array_equal(run(x[:rows], weight), alone[:rows], err_msg=str(shape))


@pytest.mark.parametrize("contract", [0, 1], ids=["columns", "rows"])
def test_another_order_gives_other_sums(contract):
    # Or the test above would show nothing.
    weight, x, run = (
        matrix("float32", (1031, 130), contract),
        vectors(2, 1031),
        multiplied(contract),
    )
    assert np.any(run(x, weight) != run(x[:, ::-1], jnp.flip(weight, contract)))


@pytest.mark.parametrize("contract", [0, 1], ids=["columns", "rows"])
def test_nan_and_infinity_go_through(contract):
    weight, x = np.array(matrix("float32", (70, 90), contract)), np.array(vectors(3, 70))
    x[0, 3], x[1, 4] = np.nan, np.inf
    weight[(7, 5) if contract else (5, 7)] = -np.inf
    weight[(8, 6) if contract else (6, 8)] = np.nan
    with np.errstate(invalid="ignore"):
        wanted = x @ (weight.T if contract else weight)
    found = multiplied(contract)(x, weight)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted))
    np.testing.assert_array_equal(np.isposinf(found), np.isposinf(wanted))
    np.testing.assert_array_equal(np.isneginf(found), np.isneginf(wanted))


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("contract", [0, 1], ids=["columns", "rows"])
def test_a_row_that_is_not_finite_is_nan_in_8_bits_and_a_row_of_zeros_is_0(contract, sign):
    weight, x = matrix("int8", (64, 90), contract), np.array(vectors(4, 64))
    x[0, 3], x[1, 4], x[2] = np.copysign(np.nan, sign), sign * np.inf, 0.0
    found = multiplied(contract)(x, weight)
    assert np.isnan(found[0]).all() and not np.isfinite(found[1]).any()
    assert not found[2].any() and np.isfinite(found[3]).all()


@pytest.mark.parametrize("contract", [0, 1], ids=["columns", "rows"])
def test_a_number_in_8_bits_is_rounded_by_the_largest_beside_it(contract):
    weight, x = matrix("int8", (512, 90), contract), np.array(vectors(2, 512))
    x[:, 7] = 1e4
    exact = numbers(weight).T if contract else numbers(weight)
    found = multiplied(contract)(x, weight)
    steps = np.abs(x).reshape(2, 16, 32).max(axis=2).repeat(32, axis=1) / 254
    bound = (steps + 1e-6 * np.abs(x)) @ np.abs(exact)
    assert (np.abs(found - x @ exact) <= bound).all()


@pytest.mark.parametrize(
    ("kind", "contract"),
    [(Int8Weight, 0), (Int8Embedding, 1), (Int4Weight, 0), (Int4Embedding, 1)],
)
def test_sums_of_bytes_are_exact(kind, contract):
    """Of x in bytes already: the factor of a group is 1, for its largest number is 127."""
    if not cpu_kernels.has_bytes():
        pytest.skip("this CPU has no AVX-512 VNNI, so it multiplies floats")
    shape = (79, 160) if contract else (160, 79)
    weight = made(kind, shape)
    x = np.random.default_rng(2).integers(-127, 128, (40, 160)).astype(np.float32)
    x[:, ::32] = 127.0
    exact = x.astype(np.float64) @ (numbers(weight).T if contract else numbers(weight))
    found = multiplied(contract)(jnp.asarray(x), weight)
    np.testing.assert_allclose(found, exact, rtol=0, atol=2e-6 * np.abs(exact).max())
    moved = multiplied(contract)(jnp.asarray(x) + 0.4, weight)  # a control
    assert np.abs(moved - exact).max() > 1e-4 * np.abs(exact).max()


def test_tiny_numbers_are_multiplied_or_are_0():
    weight = matrix("int8", (32, 4), 0)
    for scale in (1e-28, 1e-31, 1e-36):
        x = vectors(1, 32) * scale
        exact = np.asarray(x, np.float64) @ numbers(weight)
        found = multiplied(0)(x, weight)
        assert np.abs(found - exact).max() <= max(2e-2 * np.abs(exact).max(), 1e-29)


@pytest.mark.parametrize("depth", [1, 16, 37, 160, 1536])
def test_rows_are_normalised_alike_however_many(depth):
    x = np.random.default_rng(3).normal(size=(3000, depth)).astype(np.float32) * 5.0
    run = jax.jit(lambda x: normalise(x, 1e-6))
    alone = np.concatenate([run(x[i : i + 1]) for i in range(0, 3000, 50)])
    wide = x.astype(np.float64)
    exact = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-6)
    for size in (1, 3, 8, 50):
        found = np.concatenate([run(x[i : i + size])[:1] for i in range(0, 3000, 50)])
        np.testing.assert_array_equal(found, alone)
    np.testing.assert_allclose(run(x), exact, rtol=1e-6, atol=1e-6)
    slopes = jax.grad(lambda x: jnp.sum(normalise(x, 1e-6) ** 3))(x[:4])
    assert np.isfinite(slopes).all()


def test_programs_of_several_threads_do_not_mix():
    weights = [matrix("float32", (256, 2000), 0, seed) for seed in range(4)]
    run, x = multiplied(0), vectors(4, 256)
    wanted = [np.asarray(run(x, weight)) for weight in weights]

    def often(number):
        return all(np.array_equal(run(x, weights[number]), wanted[number]) for _ in range(50))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(often, range(4)))


def test_loops_branches_slopes_and_maps():
    weight, x = matrix("float32", (40, 40), 0), vectors(2, 40)

    def looped(x):
        return jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(product(x, weight)), x)

    np.testing.assert_allclose(
        jax.jit(looped)(x), np.tanh(np.tanh(np.tanh(x @ weight) @ weight) @ weight), rtol=1e-4
    )
    slopes = jax.grad(lambda w: jnp.sum(product(x, w) ** 2))(weight)
    np.testing.assert_allclose(slopes, 2 * x.T @ (x @ weight), rtol=1e-4, atol=1e-4)
    mapped = jax.vmap(product, in_axes=(0, None))(jnp.stack([x, 2 * x]), weight)
    np.testing.assert_allclose(mapped[1], 2 * x @ weight, rtol=1e-4, atol=1e-4)


def test_inside_shard_map_plain_code_runs():
    weight, x = matrix("float32", (40, 40), 0), vectors(4, 40)
    mesh = Mesh(np.array(jax.devices()[:2]), ("data",))

    def split(out, run):
        rows = PartitionSpec("data")
        specs = {"in_specs": (rows, PartitionSpec()), "out_specs": out}
        return jax.jit(jax.shard_map(run, mesh=mesh, **specs))

    def looped(x, weight):
        return jax.lax.fori_loop(0, 2, lambda i, x: jnp.tanh(product(x, weight)), x)

    found = split(PartitionSpec("data"), looped)(x, weight)
    np.testing.assert_allclose(found, looped(x, weight), rtol=1e-4, atol=1e-6)
    with pytest.raises(ValueError, match="out_specs"):  # devices have different rows
        split(PartitionSpec(), product)(x, weight)


def test_what_keeps_the_kernels_away(monkeypatch, tmp_path):
    import llvmlite.binding as llvm

    found = cpu_kernels.obstacle.__wrapped__
    assert found() == ""
    header = tmp_path / "xla/ffi/api/c_api.h"
    header.parent.mkdir(parents=True)
    lines = ["#define XLA_FFI_API_MAJOR 0", "#define XLA_FFI_API_MINOR 4"]
    header.write_text("\n".join(lines))
    for owner, name, value, why in [
        (llvm, "llvm_version_info", (15, 0, 7), "too old"),
        (llvm, "get_host_cpu_features", lambda: {"fma": False}, "no FMA"),
        (cpu_kernels.os, "name", "nt", "not on nt"),
        (jax.ffi, "include_dir", lambda: str(tmp_path), "version 0.4"),
        (jax.ffi, "include_dir", lambda: "nowhere", "version unknown"),
    ]:
        with monkeypatch.context() as patched:
            patched.setattr(owner, name, value)
            assert why in found()


def text(x, weight, platform="cpu", contract=0):
    traced = jax.jit(product, static_argnums=2).trace(x, weight, contract)
    return traced.lower(lowering_platforms=(platform,)).as_text()


def test_only_few_rows_on_one_cpu_have_the_kernel(monkeypatch):
    weight, name = matrix("float32", (40, 48), 0), "specjax_"
    assert name in text(vectors(cpu_kernels.MOST_ROWS, 40), weight)
    assert name not in text(vectors(cpu_kernels.MOST_ROWS + 1, 40), weight)
    assert name in text(vectors(256, 40), weight.astype(jnp.bfloat16))
    assert name in text(vectors(256, 48), weight, contract=1)
    assert name not in text(vectors(257, 48), weight, contract=1)
    assert name not in text(vectors(2, 40), weight, "tpu")
    assert name not in text(vectors(2, 40), weight, "cuda")
    assert name not in text(vectors(2, 40).astype(jnp.float16), weight)
    mesh = Mesh(np.array(jax.devices()[:2]), ("model",))
    split = jax.device_put(weight, NamedSharding(mesh, PartitionSpec(None, "model")))
    assert name not in text(vectors(2, 40), split)
    monkeypatch.setattr(cpu_kernels, "obstacle", lambda: "none here")
    jax.clear_caches()
    assert name not in text(vectors(2, 40), weight)


# XLA rounds norms of Gemma 4 and T5Gemma 2 otherwise in a block; it also computes recurrent layers.
ONE_ORDER = sorted(set(CONFIGS) - {"gemma4", "t5gemma2", "qwen3_5", "qwen3_next"})


@pytest.mark.parametrize(
    "name", variants(ONE_ORDER, "t5_v1_1", "llama_grouped_tied", "gemma2", "mixtral")
)
def test_logits_of_a_block_are_bit_for_bit_those_of_its_tokens_alone(name):
    model, rng = tiny(name), np.random.default_rng(0)
    prompts = rng.integers(2, 48, (3, 9)).astype(np.int32)
    lengths = np.array([9, 4, 7], np.int32)
    filled = model.prefill(model.params, Prompts(prompts, lengths), 45)
    block = rng.integers(2, 48, (3, 5)).astype(np.int32)
    block[:, 0] = filled.tokens
    extend = jit(model.model.extend, options=step_options)
    together = extend(model.params, filled.cache, block, filled.positions).logits
    for row in range(3):
        own = slice(row, row + 1)
        cache = jax.tree.map(lambda x, own=own: x[own], filled.cache)
        for i in range(5):
            alone = extend(model.params, cache, block[own, i : i + 1], filled.positions[own] + i)
            cache = alone.cache
            np.testing.assert_array_equal(alone.logits[0, 0], together[row, i])


def random(*shape, form="float32", seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), form)


def attended(query, segments, sinks=None, softcap=None):
    """What the kernel gives, and what XLA does."""
    numbers, tree = jax.tree.flatten((query, segments, sinks))
    kernel, plain = (jax.jit(run) for run in _on_cpus(tree, 0.3, softcap))
    return np.asarray(kernel(*numbers), np.float64), np.asarray(plain(*numbers), np.float64)


def segment(batch, heads, length, depth, bias, form="float32", start=None, seed=0):
    keys = random(batch, heads, length, depth, form=form, seed=seed)
    values = random(batch, heads, depth, length, form=form, seed=seed)
    return Segment(keys, values, jnp.broadcast_to(bias, (*bias.shape[:-1], length)), start)


# Rows, queries, heads, groups, depth, and keys of each segment.
ATTENTIONS = [
    ((1, 1, 1, 1, 1), (1,)),
    ((1, 1, 4, 1, 16), (45,)),
    ((2, 3, 2, 3, 16), (45, 3)),
    ((3, 5, 1, 7, 20), (37, 5)),
    ((2, 16, 2, 2, 64), (600, 40)),
]


@pytest.mark.parametrize(("has_sinks", "softcap"), [(False, None), (True, 2.0)])
@pytest.mark.parametrize("form", ["float32", "bfloat16"])
@pytest.mark.parametrize(("shape", "lengths"), ATTENTIONS, ids=str)
def test_attention_is_that_of_xla(shape, lengths, form, has_sinks, softcap):
    batch, queries, heads, groups, depth = shape
    starts = jnp.arange(lengths[0] // 2, lengths[0] // 2 + batch, dtype=jnp.int32)
    biases = [random(batch, 1, 1, 1, lengths[0]), random(1, heads, groups, queries, lengths[-1])]
    if len(lengths) > 1:  # a cache, which has nothing from where the block begins
        stale = np.arange(lengths[0]) >= np.asarray(starts)[:, None, None, None, None]
        biases[0] = jnp.where(stale, MASKED, biases[0])
    segments = [
        segment(batch, heads, length, depth, bias, form, start)
        for length, bias, start in zip(
            lengths, biases, [None, starts][: len(lengths)], strict=False
        )
    ]
    sinks = random(1, heads, groups, 1, 1) if has_sinks else None
    bound = 1e-5 if form == "float32" else 0.03
    # Without a cache no segment has a start.
    for parts in (segments, [x._replace(start=None) for x in segments]):
        ours, xlas = attended(random(*shape, form=form), parts, sinks, softcap)
        np.testing.assert_allclose(ours, xlas, atol=bound, rtol=bound)


@pytest.mark.parametrize("start", [0, 1, 15, 16, 17, 37])
def test_a_position_has_one_place_in_the_sums_of_attention(start):
    # All entries in one segment, or the last 6 in a second one that begins at any position.
    query, whole = random(1, 6, 2, 2, 20), segment(1, 2, 43, 20, random(1, 1, 1, 6, 1))
    end = slice(start, start + 6)
    alone = [
        Segment(
            whole.keys[:, :, : end.stop], whole.values[..., : end.stop], whole.bias[..., : end.stop]
        )
    ]
    hidden = jnp.where(jnp.arange(43) < start, whole.bias, MASKED)
    first = Segment(whole.keys, whole.values, hidden)
    second = Segment(
        whole.keys[:, :, end], whole.values[..., end], whole.bias[..., end], jnp.array([start])
    )
    found = attended(query, [first, second])[0]
    np.testing.assert_array_equal(found, attended(query, alone)[0])
    # A control: from another position the sums have another order.
    moved = second._replace(start=jnp.array([start + 5]))
    if start > 20:
        assert np.any(attended(query, [first, moved])[0] != found)


def test_what_is_not_a_number_goes_through_attention():
    query, part = random(1, 3, 1, 1, 20), segment(1, 1, 40, 20, random(1, 1, 1, 3, 1))
    for keys, values in [
        (part.keys.at[0, 0, 7, 3].set(np.nan), part.values),
        (part.keys.at[0, 0, 7, 3].set(np.inf), part.values),
        (part.keys, part.values.at[0, 0, 3, 39].set(np.nan)),
        (part.keys, part.values.at[0, 0, 3, 2].set(-np.inf)),
    ]:
        ours, xlas = attended(query, [Segment(keys, values, part.bias)])
        np.testing.assert_array_equal(np.isnan(ours), np.isnan(xlas))
        np.testing.assert_array_equal(np.isinf(ours), np.isinf(xlas))


X86 = platform.machine() == "x86_64"


@pytest.fixture
def without_avx512(monkeypatch):
    """Kernels for a CPU that has vectors of 8 numbers."""
    import llvmlite.binding as llvm

    cpu_kernels._machine()  # registers the CPU's kind
    target = llvm.Target.from_default_triple()
    options = {"cpu": "haswell", "opt": 3, "codemodel": "jitdefault", "jit": True}
    monkeypatch.setattr(cpu_kernels, "_machine", lambda: target.create_target_machine(**options))
    for module in (cpu_code, cpu_kernels):
        monkeypatch.setattr(module, "lanes", lambda: 8)
        monkeypatch.setattr(module, "has_quads", lambda: False)
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.skipif(not X86, reason="not an x86")
@pytest.mark.parametrize("form", FORMS)
def test_an_x86_may_have_no_avx512(form, without_avx512):
    for contract in (0, 1):
        test_products_are_exact_and_have_one_order(form, contract)
    if form != "int8":
        for shape, lengths in ATTENTIONS:
            test_attention_is_that_of_xla(shape, lengths, form, True, 2.0)
    for start in (1, 15, 37):
        test_a_position_has_one_place_in_the_sums_of_attention(start)


FLOAT32, BFLOAT16, INT8 = map(jnp.dtype, FORMS)


@pytest.mark.parametrize(
    ("form", "options"),
    [
        (cpu_code.ByColumns, (FLOAT32, False, 6)),
        (cpu_code.ByColumns, (INT8, True, 1)),
        (cpu_code.ByRows, (BFLOAT16, False)),
        (cpu_code.Attention, (BFLOAT16, 2, True, 0.5, 50.0)),
    ],
)
def test_kernels_compile_for_arm(form, options, monkeypatch):
    import llvmlite.binding as llvm

    for module in (cpu_code, cpu_kernels):
        monkeypatch.setattr(module, "lanes", lambda: 8)
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    target = llvm.Target.from_triple("aarch64-unknown-linux-gnu")
    module = llvm.parse_assembly(cpu_kernels._text(form, *options))
    assembly = target.create_target_machine(opt=3).emit_assembly(module)
    assert "fmla" in assembly and "fmaf" not in assembly
