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
    for row in range(4):
        parts = zip(*(live(x.cache, row, layout) for x in (found, whole)), strict=True)
        for own, one in parts:
            np.testing.assert_allclose(own, one, atol=2e-5)
    # The negative control: entries of the beginning are taken, not read again.
    zeros = jax.tree.map(jnp.zeros_like, tuple(caches))
    wrong = prefill(params, Beginning(zeros, jnp.asarray(TAKEN)))
    first, other = (live(x.cache, 0, layout)[0] for x in (wrong, whole))
    assert np.abs(first - other).max() > 1e-2


@pytest.mark.parametrize("name", ["llama", "gemma2", "gemma4"])
def test_prompts_in_passes_are_those_of_one_pass(name, patched):
    whole = tiny(name).model.reading((1, 2))
    passes = dataclasses.replace(whole, in_passes=True)
    tokens = np.random.default_rng(0).integers(1, 48, (4, 150)).astype(np.int32)

    def prefilled(model):
        run = quick_jit(lambda params: model.prefill(params, Prompts(tokens, LENGTHS), SIZE))
        return run(tiny(name).params)

    def difference(found, exact):
        errors = []
        for row, length in enumerate(LENGTHS - 1):
            parts = [live(x.cache, row, model.layout) for x in (found, exact)]
            parts = [
                [*part, x.states[row, :length]]
                for part, x in zip(parts, (found, exact), strict=True)
            ]
            errors += [np.abs(a - b).max(initial=0.0) for a, b in zip(*parts, strict=True)]
        return max(errors)

    model, exact = whole, prefilled(whole)
    found = prefilled(passes)
    np.testing.assert_array_equal(found.tokens, exact.tokens)
    np.testing.assert_array_equal(found.positions, LENGTHS - 1)
    assert difference(found, exact) < 2e-5
    # The negative control: a pass that begins a token too late.
    extend = type(whole).extend
    patched.setattr(
        type(whole),
        "extend",
        lambda self, params, cache, block, at: extend(self, params, cache, block, at + 1),
    )
    assert difference(prefilled(passes), exact) > 1e-2


def live(cache, row, layout):
    """The entries of a row's prompt, without its last token."""
    parts = zip((cache.keys, cache.values), (layout.key_axis, layout.value_axis), strict=True)
    return [
        np.take(np.asarray(layer[row]), range(LENGTHS[row] - 1), axis)
        for layers, axis in parts
        for layer in layers
    ]
