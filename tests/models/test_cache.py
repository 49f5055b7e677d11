"""Writes change only their own positions, and copy no cache."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import cache as cache_lib
from specjax.models.cache import CacheEntries, RaggedCache
from specjax.types import Prompts
from tests.models.tiny import CONFIGS, QUICK, error, tiny
from tests.variants import variants

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


def _is_right(write, positions):
    cache, updates = _cache_and_updates()
    out = write(cache, updates, positions)
    keys = _written(cache.keys[0], updates.keys[0], positions)
    values = _written(cache.values[0].swapaxes(2, 3), updates.values[0].swapaxes(2, 3), positions)
    return all(
        np.array_equal(out.keys[i], keys) and np.array_equal(out.values[i], values.swapaxes(2, 3))
        for i in range(2)
    )


@pytest.mark.parametrize("positions", [POSITIONS, -POSITIONS, POSITIONS * 300_000_000])
def test_write_drops_what_falls_outside(positions):
    assert _is_right(jax.jit(cache_lib.write), positions)


def test_the_comparison_sees_a_clamping_write():
    def place(axis, layers, blocks, positions):
        update = lambda *args: jax.lax.dynamic_update_slice_in_dim(*args, axis)  # noqa: E731
        return tuple(
            jax.vmap(update)(*pair, positions) for pair in zip(layers, blocks, strict=True)
        )

    def clamps(cache, updates, positions):
        return cache._replace(
            keys=place(1, cache.keys, updates.keys, positions),
            values=place(2, cache.values, updates.values, positions),
        )

    assert not _is_right(clamps, POSITIONS)
    assert _is_right(clamps, np.clip(POSITIONS, 0, 2))


def test_tokens_with_nan_states_are_not_written():
    cache, updates = _cache_and_updates()
    positions = np.array(POSITIONS) * 0 + 1
    before = cache_lib.write(cache, updates, positions)
    bad = np.ones(updates.computed.shape, bool)
    bad[1, 1] = False
    out = cache_lib.write(cache, updates._replace(computed=jnp.asarray(bad)), positions)
    for axis, (now, whole, old) in (
        (1, (out.keys[0], before.keys[0], cache.keys[0])),
        (2, (out.values[0], before.values[0], cache.values[0])),
    ):
        now, whole, old = (np.moveaxis(np.array(x), axis + 1, 1) for x in (now, whole, old))
        np.testing.assert_array_equal(now[1, 2], old[1, 2])  # the token at 1 + 1
        assert np.any(whole[1, 2] != old[1, 2])
        now[1, 2] = whole[1, 2]
        np.testing.assert_array_equal(now, whole)


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


@pytest.mark.parametrize("name", variants(CONFIGS, "t5_v1_1", "gemma2"))
def test_a_block_past_the_end_keeps_the_other_entries(name):
    """Rolled back after it, a row still gives the logits of its full forward pass."""
    t = tiny(name)
    rng = np.random.default_rng(5)
    inputs = rng.integers(0, 48, (2, 3)).astype(np.int32)
    lengths = np.array([3, 2], np.int32)
    size = 8
    cache, first, start = t.prefill(t.params, Prompts(inputs, lengths), size)
    tokens = rng.integers(0, 48, (2, size)).astype(np.int32)
    tokens[:, 0] = first
    full = t.full(inputs, lengths, np.pad(tokens, ((0, 0), (0, 40 - size))))
    room = size - np.asarray(start)  # how many of the tokens fit
    cache = t.extend(t.params, cache, tokens[:, :4], start).cache
    over = rng.integers(0, 48, (2, 4)).astype(np.int32)
    for position in (size - 1, size, size + 7):
        cache = t.extend(t.params, cache, over, np.full(2, position, np.int32)).cache
    out = t.extend(t.params, cache, tokens[:, 2:6], start + 2)
    for row in range(2):
        kept = min(4, room[row] - 2)
        assert error(out.logits[row, :kept], full[row, 2 : 2 + kept]) <= 1e-5


def _copies(function, cache, *args):
    """How many arrays as large as a layer of the cache the compiled function copies."""
    text = jax.jit(function, donate_argnums=0).lower(cache, *args).compile(QUICK).as_text()
    shapes = {leaf.shape for leaf in [*cache.keys, *cache.values]}
    names = "|".join(re.escape(",".join(map(str, shape))) for shape in shapes)
    return len(re.findall(rf"= f32\[(?:{names})\]\S* (?:copy|select)\(", text))


@pytest.mark.parametrize("shape", variants([(1, 1), (2, 3)], (2, 3)))
def test_a_loop_copies_no_cache(shape):
    rows, length = shape
    t = tiny("t5_v1_1")
    inputs = np.ones((rows, 2), np.int32)
    cache, _, positions = t.prefill(t.params, Prompts(inputs, np.full(rows, 2, np.int32)), 32)
    params = t.params

    def loop(cache, tokens, positions):
        def body(_, state):
            cache, tokens, positions = state
            out = t.model.extend(params, cache, tokens, positions)
            return out.cache, jnp.argmax(out.logits, -1).astype(jnp.int32), positions + 1

        return jax.lax.fori_loop(0, 5, body, (cache, tokens, positions))

    def switch_loop(cache, tokens, positions):
        widths = [1, length]

        def score(width, cache, tokens, positions):
            logits, _, updates = t.model.score(params, cache, tokens[:, :width], positions)
            room = length - width
            keys = tuple(jnp.pad(k, ((0, 0), (0, 0), (0, room), (0, 0))) for k in updates.keys)
            values = tuple(jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, room))) for v in updates.values)
            computed = jnp.pad(updates.computed, ((0, 0), (0, room)))
            return logits[:, 0], updates._replace(keys=keys, values=values, computed=computed)

        def body(i, state):
            cache, tokens, positions = state
            branches = [lambda *args, w=w: score(w, *args) for w in widths]
            logits, updates = jax.lax.switch(i % 2, branches, cache, tokens, positions)
            cache = t.model.write(cache, updates, positions)
            token = jnp.argmax(logits, -1).astype(jnp.int32)
            return cache, jnp.broadcast_to(token[:, None], tokens.shape), positions + 1

        return jax.lax.fori_loop(0, 5, body, (cache, tokens, positions))

    tokens = jnp.ones((rows, length), jnp.int32)
    assert _copies(loop, cache, tokens, positions) == 0
    assert _copies(switch_loop, cache, tokens, positions) == 0

    def unordered(cache, tokens, positions):
        """Without the dependence that `CacheEntries.computed` makes, the layers are copied."""

        def body(_, state):
            cache, tokens, positions = state
            _, _, updates = t.model.score(params, cache, tokens, positions)
            updates = updates._replace(computed=jnp.ones(tokens.shape, bool))
            return t.model.write(cache, updates, positions), tokens, positions + 1

        return jax.lax.fori_loop(0, 5, body, (cache, tokens, positions))

    if jax.default_backend() == "cpu":
        assert _copies(unordered, cache, tokens, positions) > 0


def test_the_cache_names_its_axes():
    t = tiny("t5_v1_1")
    cache = t.prefill(
        t.params, Prompts(np.ones((1, 2), np.int32), np.full(1, 2, np.int32)), 32
    ).cache
    axes = cache_lib.logical_axes(cache)
    assert axes.keys[0] == ("batch", "kv_heads", "length", "kv")
    assert axes.values[1] == axes.cross.values[0] == ("batch", "kv_heads", "kv", "length")
    jax.tree.map(
        lambda leaf, names: None if leaf.ndim == len(names) else pytest.fail(), cache, axes
    )
    assert all(leaf.shape[0] == 1 for leaf in jax.tree.leaves(cache))
    assert cache.max_length() == 32


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
    assert cache_lib.layout_for("cpu", *sizes, ways) == cache_lib.CacheLayout()


@pytest.mark.parametrize(
    ("ways", "length", "shape"),
    [(None, 2047, (4, 128)), (None, 2048, (1, 512)), (1, 2048, (4, 128)), (2, 2048, (2, 256))],
)
def test_all_heads_share_a_vector_of_a_long_cache_on_one_device(ways, length, shape):
    layout = cache_lib.layout_for("tpu", 32, 8, 64, ways)
    sizes = CONFIGS["llama"].replace(num_heads=32, num_kv_heads=8, head_dim=64)
    made = jax.eval_shape(lambda: cache_lib.allocate([sizes], 2, length, layout))
    assert made.keys[0].shape == made.values[0].shape == (2, length, *shape)
