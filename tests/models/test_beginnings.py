"""A cache that continues a beginning has the entries of a whole prompt."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.beginnings import Beginning, continuing, noting
from specjax.models.cache import CacheLayout
from specjax.types import Prompts
from tests.models.tiny import quick_jit, tiny

LENGTHS = np.array([150, 90, 41, 1])
# Rows that take all, some or none of 40 tokens.
TAKEN = np.array([40, 17, 40, 0])
SIZE = 160


@pytest.mark.parametrize("layout", [CacheLayout(), CacheLayout(2, by_position=True)])
@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma4"])
def test_ragged_prompts_continue_a_beginning(name, layout):
    model = dataclasses.replace(tiny(name).model, layout=layout)
    params = tiny(name).params
    tokens = np.random.default_rng(0).integers(1, 48, (4, 150)).astype(np.int32)
    first = tokens[0, :40]
    for row, taken in enumerate(TAKEN):
        tokens[row, :taken] = first[:taken]
    begun = tokens[:1, :41]
    with noting() as caches:
        # Fewer positions than a prompt has; the last token is not read.
        model.prefill(params, Prompts(begun, np.array([41])), 44)

    @quick_jit
    def prefill(params, beginning):
        with continuing(beginning):
            return model.prefill(params, Prompts(jnp.asarray(tokens), jnp.asarray(LENGTHS)), SIZE)

    found = prefill(params, Beginning(tuple(caches), jnp.asarray(TAKEN)))
    whole = prefill(params, None)
    np.testing.assert_array_equal(found.tokens, whole.tokens)
    np.testing.assert_array_equal(found.positions, LENGTHS - 1)
    axes = layout.key_axis, layout.value_axis

    def live(cache, row):
        parts = zip((cache.keys, cache.values), axes, strict=True)
        return [
            np.take(np.asarray(layer[row]), range(LENGTHS[row] - 1), axis)
            for layers, axis in parts
            for layer in layers
        ]

    for row in range(4):
        for own, one in zip(live(found.cache, row), live(whole.cache, row), strict=True):
            np.testing.assert_allclose(own, one, atol=2e-5)
    # The negative control: entries of the beginning are taken, not read again.
    zeros = jax.tree.map(jnp.zeros_like, tuple(caches))
    wrong = prefill(params, Beginning(zeros, jnp.asarray(TAKEN)))
    assert np.abs(live(wrong.cache, 0)[0] - live(whole.cache, 0)[0]).max() > 1e-2
