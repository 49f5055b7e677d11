"""Attention to a long cache: the kernel against the plain code, in Pallas' interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import attention, attention_kernel
from specjax.models.attention import Memory, Segment, block_bias
from specjax.models.cache import CacheLayout, RaggedCache

LENGTH = 300  # positions, in blocks of 128, so that the last is cut
POSITIONS = jnp.array([0, 5, 128, LENGTH - 8], jnp.int32)


@pytest.fixture(autouse=True)
def small_blocks(patched):
    """In the interpreter."""
    patched.setattr(attention_kernel, "BLOCK", 128)
    interpreted = functools.partial(attention_kernel.attend_long, interpret=True)
    patched.setattr(attention, "attend_long", interpreted)
    attention._forms.cache_clear()


def _random(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def _both(query, *segments, scale=0.3, softcap=None):
    """The kernel's values and those of plain code, `[B, T, K, N, D]`."""
    kernel, plain = attention._forms(scale, softcap)
    parts = [query]
    for keys, values, bias in segments:
        parts += [keys, values, jnp.broadcast_to(bias, (len(query), *bias.shape[1:]))]
    return jax.jit(kernel)(*parts), jax.jit(jax.vmap(plain))(*parts)


def _close(got, want, tolerance=2e-5):
    np.testing.assert_allclose(
        np.asarray(got, np.float32), np.asarray(want, np.float32), atol=tolerance, rtol=tolerance
    )


def _entries(length, sizes, dtype=jnp.float32):
    kv_heads, _, width = sizes
    shape = len(POSITIONS), length, 1, kv_heads * width
    return _random(*shape, seed=1, dtype=dtype), _random(*shape, seed=2, dtype=dtype)


def _memory(written=False, tree=None):
    empty = jnp.zeros((len(POSITIONS), LENGTH, 1, 1))
    layout = CacheLayout(1, by_position=True)
    return Memory(RaggedCache((empty,), (empty,)), POSITIONS, layout, written, tree)


# K, N and D: one head; Llama 3's and its drafter's groups; T5 small's; odd widths.
SIZES = [(1, 1, 256), (8, 4, 128), (8, 4, 64), (6, 1, 64), (5, 3, 64), (2, 2, 96), (1, 8, 64)]


@pytest.mark.parametrize("length", [1, 2, 6, 9])
@pytest.mark.parametrize("sizes", SIZES)
def test_equals_plain_code(sizes, length):
    query = _random(len(POSITIONS), length, *sizes)
    keys, values = _entries(LENGTH, sizes)
    _close(*_both(query, Segment(keys, values, _memory(written=True).bias(length))))
    block = Segment(*_entries(length, sizes), block_bias(length))
    _close(*_both(query, Segment(keys, values, _memory().bias(length)), block))
