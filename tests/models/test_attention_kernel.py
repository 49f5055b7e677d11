"""Attention to a long cache: the kernel against the plain code, in Pallas' interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas import primitives

from specjax.models import attention, attention_kernel, cache
from specjax.models.attention import Memory, Segment, block_bias
from specjax.models.cache import CacheLayout, RaggedCache
from specjax.types import Prompts, TreeShape
from tests.models.tiny import error, quick_jit, tiny

LENGTH = 40  # positions, in blocks of 16, so that the last is cut
POSITIONS = jnp.array([0, 5, 16, LENGTH - 9], jnp.int32)


@pytest.fixture(autouse=True, params=[0, np.nan], ids=["zero", "nan"])
def small_blocks(request, patched):
    """In the interpreter."""
    filler = request.param
    patched.setattr(attention_kernel, "BLOCK", 16)

    def fill(shape, dtype):
        return jnp.full(shape, filler if jnp.issubdtype(dtype, jnp.floating) else 0, dtype)

    # After an array's end a TPU reads what was there before, such as a bias that hides nothing.
    patched.setattr(primitives, "uninitialized_value", fill)
    interpreted = functools.partial(attention_kernel.attend_long, interpret=True)
    patched.setattr(attention, "attend_long", interpreted)
    attention.forms.cache_clear()
    yield
    attention.forms.cache_clear()


def _random(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def _parts(query, *segments):
    parts = [query]
    for keys, values, bias, _ in segments:
        parts += [keys, values, jnp.broadcast_to(bias, (len(query), *bias.shape[1:]))]
    return parts


def _check(query, *segments, scale=0.3, softcap=None, tolerance=2e-5):
    kernel, plain = attention.forms(scale, softcap)
    parts = _parts(query, *segments)
    got, want = jax.jit(kernel)(*parts), jax.jit(jax.vmap(plain))(*parts)
    assert got.dtype == query.dtype
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    np.testing.assert_allclose(got, want, atol=tolerance, rtol=tolerance)


def _entries(length, sizes, dtype=jnp.float32):
    kv_heads, _, width = sizes
    shape = len(POSITIONS), length, 1, kv_heads * width
    return _random(*shape, seed=1, dtype=dtype), _random(*shape, seed=2, dtype=dtype)


def _memory(written=False, tree=None):
    empty = jnp.zeros((len(POSITIONS), LENGTH, 1, 1))
    layout = CacheLayout(1, by_position=True)
    return Memory(RaggedCache((empty,), (empty,)), POSITIONS, layout, written, tree)


# K, N and D: one head; Llama 3's and its drafter's groups; T5 small's; odd widths; Gemma 4's.
SIZES = [
    *(((1, 1, 256), 1), ((8, 4, 128), 6), ((8, 4, 64), 1), ((8, 4, 64), 2)),
    *(((6, 1, 64), 9), ((5, 3, 64), 6), ((2, 2, 96), 5), ((1, 8, 64), 1), ((2, 4, 512), 6)),
]
CASES = [
    *((*case, {"written": written}) for case in SIZES for written in (False, True)),
    *(((4, 2, 64), 6, options) for options in ({"softcap": 2.0}, {"window": 7})),
    ((4, 2, 64), 6, {"softcap": 1.0, "window": 20}),
    ((4, 2, 64), 6, {"written": True, "dtype": jnp.bfloat16, "tolerance": 2e-2}),
    *(((6, 1, 64), length, {"written": True, "of_heads": True}) for length in (1, 6)),
]


@pytest.mark.parametrize(("sizes", "length", "options"), CASES, ids=str)
def test_equals_plain_code(sizes, length, options):
    """With a block that was written before, or lies beside the cache."""
    options = {"written": False, "window": None, "dtype": jnp.float32, "of_heads": False, **options}
    written, window, dtype, of_heads = map(options.pop, tuple(options)[:4])
    query = _random(len(POSITIONS), length, *sizes, dtype=dtype)
    bias = _memory(written).bias(length, window)
    if of_heads:
        bias += _random(len(POSITIONS), sizes[0], 1, length, LENGTH)
    segments = [Segment(*_entries(LENGTH, sizes, dtype), bias)]
    if not written:
        segments.append(Segment(*_entries(length, sizes), block_bias(length)))
    _check(query, *segments, **options)


@pytest.mark.parametrize("written", [False, True])
def test_trees(written):
    # Nodes 1 and 2 are children of the root, nodes 3 and 4 of those.
    seen = np.eye(5, dtype=bool)
    seen[1:, 0] = seen[3, 1] = seen[4, 2] = True
    rows = len(POSITIONS)
    shape = TreeShape(
        jnp.tile(jnp.array([[0, 1, 1, 2, 2]], jnp.int32), (rows, 1)),
        jnp.tile(jnp.asarray(seen)[None], (rows, 1, 1)),
    )
    sizes, memory = (4, 2, 64), _memory(written, shape)
    query = _random(rows, 5, *sizes)
    segments = [Segment(*_entries(LENGTH, sizes), memory.bias(5))]
    if not written:
        segments.append(Segment(*_entries(5, sizes), memory.tree_bias(5)))
    _check(query, *segments)


def _stale(kind):
    """Attention to a cache whose stale entries are of a kind."""
    sizes, length = (4, 2, 64), 2
    live = (jnp.arange(LENGTH)[None] < POSITIONS[:, None] + length)[..., None, None]
    assert not live.all()
    keys, values = (jnp.where(live, x, kind) for x in _entries(LENGTH, sizes))
    query = _random(len(POSITIONS), length, *sizes)
    kernel, _ = attention.forms(0.3, None)
    bias = _memory(written=True).bias(length)
    return np.asarray(jax.jit(kernel)(*_parts(query, Segment(keys, values, bias))))


@pytest.mark.parametrize("kind", [np.nan, np.inf, 1e30])
def test_stale_entries_are_not_seen(kind):
    np.testing.assert_array_equal(_stale(kind), _stale(0.0))


@pytest.mark.parametrize(("window", "blocks"), [(None, [1, 1, 2, 3]), (4, [1, 1, 2, 2])])
def test_only_blocks_that_a_row_sees_are_read(window, blocks):
    bias = _memory(written=True).bias(3, window)
    rows, places, _, count = attention_kernel._steps(bias, 16)
    assert count == sum(blocks)
    assert np.bincount(rows[: int(count)]).tolist() == blocks
    assert places[int(count) - 1] == (LENGTH - 7) // 16


# One of each way of knowing positions, of groups, windows and sinks.
@pytest.mark.parametrize("name", ["t5_v1_1", "llama", "gemma2", "t5gemma", "gpt_oss"])
def test_networks_of_long_caches(name, patched):
    patched.setattr(cache, "LONG", 8)
    read = []

    def chosen(*args, kernel, plain):
        @jax.custom_batching.custom_vmap
        def one(*args):
            return plain(*args)

        read.append(len(args))
        one.def_vmap(lambda size, mapped, *args: (kernel(*args), True))
        return one(*args)

    tokens = jnp.asarray(np.random.default_rng(0).integers(3, 9, (3, 3)))
    prompts = Prompts(tokens, jnp.array([1, 2, 3]))
    found = []
    for model in (tiny(name).model, tiny(name).model.for_devices("tpu")):
        state = quick_jit(model.prefill, static_argnums=2)(tiny(name).params, prompts, LENGTH)
        score, extend = quick_jit(model.score), quick_jit(model.extend)
        logits, *_ = score(tiny(name).params, state.cache, tokens, state.positions)
        out = extend(tiny(name).params, state.cache, tokens, state.positions)
        found.append((logits, out.logits))
        patched.setattr(attention, "on_one_tpu", chosen)
    assert read and state.cache.keys[0].shape[2] == 1
    for plain, kernel in zip(*found, strict=True):
        assert error(plain, kernel) <= 2e-5
