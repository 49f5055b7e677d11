"""Writes change only their own positions, and copy no cache."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import cache as cache_lib
from specjax.models.cache import CacheEntries, CacheLayout, RaggedCache
from specjax.types import Prompts
from tests.models.tiny import CONFIGS, tiny

B, K, S, D, T = 7, 2, 6, 3, 4
POSITIONS = np.array([0, 1, 2, 3, 5, 6, 9], np.int32)  # the last four reach past the end


def _cache_and_updates():
    rng = np.random.default_rng(0)
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    cache = RaggedCache((draw(B, K, S, D),) * 2, (draw(B, K, D, S),) * 2)
    updates = CacheEntries((draw(B, K, T, D),) * 2, (draw(B, K, D, T),) * 2, jnp.ones((B, T), bool))
    return cache, updates


def _written(entries, block, positions):
    """The same write in plain loops; positions are on axis 2."""
    entries = np.array(entries)
    for row, position in enumerate(positions):
        for t in range(block.shape[2]):
            if 0 <= position + t < entries.shape[2]:
                entries[row, :, position + t] = block[row, :, t]
    return entries


@pytest.mark.parametrize("positions", [POSITIONS, -POSITIONS, POSITIONS * 300_000_000])
def test_write_drops_what_falls_outside(positions):
    cache, updates = _cache_and_updates()
    out = jax.jit(functools.partial(cache_lib.write, layout=CacheLayout()))(
        cache, updates, positions
    )
    keys = _written(cache.keys[0], updates.keys[0], positions)
    values = _written(cache.values[0].swapaxes(2, 3), updates.values[0].swapaxes(2, 3), positions)
    for i in range(2):
        np.testing.assert_array_equal(out.keys[i], keys)
        np.testing.assert_array_equal(out.values[i], values.swapaxes(2, 3))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma4", "t5_v1_1", "qwen3_5"])
def test_a_nan_in_the_padding_does_not_change_the_prompt(name):
    t = tiny(name)
    inputs = np.array([[5, 6, 7, 3, 3], [5, 6, 7, 8, 9]], np.int32)
    lengths = np.array([3, 5], np.int32)
    table = t.params["token_embedder"]["embedding"].at[3].set(jnp.nan)
    params = {**t.params, "token_embedder": {**t.params["token_embedder"], "embedding": table}}
    out = []
    for given in (t.params, params):
        cache, tokens, positions = t.prefill(given, Prompts(inputs, lengths), 8)
        logits = t.extend(t.params, cache, tokens[:, None], positions).logits
        out.append(np.asarray(logits))
    assert np.isfinite(out[0]).all()
    np.testing.assert_array_equal(*out)


def test_the_cache_names_its_axes():
    t = tiny("t5_v1_1")
    cache = t.prefill(
        t.params, Prompts(np.ones((1, 2), np.int32), np.full(1, 2, np.int32)), 32
    ).cache
    axes = cache_lib.logical_axes(cache, CacheLayout())
    assert axes.keys[0] == ("batch", "kv_heads", "length", "kv")
    assert axes.values[1] == axes.cross.values[0] == ("batch", "kv_heads", "kv", "length")
    jax.tree.map(
        lambda leaf, names: None if leaf.ndim == len(names) else pytest.fail(), cache, axes
    )
    assert all(leaf.shape[0] == 1 for leaf in jax.tree.leaves(cache))
    assert cache.max_length(CacheLayout()) == 32


@pytest.mark.parametrize(
    ("sizes", "ways", "layout"),
    [
        ((12, 12, 64), 1, (12, True)),  # T5 base: few heads, all in one vector
        ((12, 12, 64), 4, (3, True)),
        ((6, 6, 64), 4, (6, True)),  # not split
        ((64, 64, 64), 1, (2, True)),  # T5 XXL: as many as fill the lanes
        ((32, 8, 64), 1, (2, True)),  # Llama 3.2 1B
        ((32, 8, 128), 1, (1, True)),  # Llama 3 8B
        ((16, 8, 256), 2, (1, True)),  # Gemma 2 9B
    ],
)
def test_layouts_for_tpus(sizes, ways, layout):
    assert cache_lib.layout_for("tpu", *sizes, ways) == (*layout, False)
    assert cache_lib.layout_for("cpu", *sizes, ways) == CacheLayout()


@pytest.mark.parametrize(
    ("ways", "length", "shape"),
    [(None, 2047, (4, 128)), (None, 2048, (1, 512)), (1, 2048, (4, 128)), (2, 2048, (2, 256))],
)
def test_all_heads_share_a_vector_of_a_long_cache_on_one_device(ways, length, shape):
    layout = cache_lib.layout_for("tpu", 32, 8, 64, ways)
    sizes = CONFIGS["llama"].replace(num_heads=32, num_kv_heads=8, head_dim=64)
    made = jax.eval_shape(lambda: cache_lib.allocate([sizes], 2, length, layout))
    assert made.keys[0].shape == made.values[0].shape == (2, length, *shape)
