"""The tabular model does what its protocol says."""

import itertools

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import sampling, testing
from specjax.types import Prompts

V = 3


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_ragged_extends_and_rollbacks_read_the_right_context(order):
    model = testing.TabularModel(V, order)
    table = testing.random_table(0, V, order)
    rng = np.random.default_rng(order)
    inputs, lengths = rng.integers(V, size=(4, 5)).astype(np.int32), np.array([1, 3, 5, 2])
    cache, tokens, positions = model.prefill(
        jnp.asarray(table), Prompts(jnp.asarray(inputs), jnp.asarray(lengths)), 16
    )
    np.testing.assert_array_equal(positions, lengths - 1)
    texts = [list(inputs[b, : n - 1]) for b, n in enumerate(lengths)]
    tokens = np.asarray(tokens)[:, None]
    for width in (1, 3, 2, 4, 1):
        block = np.concatenate([tokens, rng.integers(V, size=(4, width - 1))], axis=1)
        out = model.extend(
            jnp.asarray(table), cache, jnp.asarray(block, jnp.int32), jnp.asarray(positions)
        )
        cache = out.cache
        for b, t in itertools.product(range(4), range(width)):
            context = texts[b] + list(block[b, : t + 1])
            padded = [V] * order + context
            index = 0
            for token in padded[len(padded) - order :]:
                index = index * (V + 1) + int(token)
            np.testing.assert_array_equal(out.logits[b, t], table[index])
        # Each row keeps a different part of the block and rolls back the rest.
        kept = rng.integers(1, width + 1, size=4)
        texts = [text + list(block[b, : kept[b]]) for b, text in enumerate(texts)]
        positions = positions + kept
        tokens = rng.integers(V, size=(4, 1))


def test_writes_past_the_end_are_dropped():
    model = testing.TabularModel(V, 1)
    table = jnp.asarray(testing.random_table(0, V, 1))
    cache = jnp.arange(6, dtype=jnp.int32)[None] % V
    new = model.write(cache, jnp.array([[2, 2, 2]]), jnp.array([5]))
    np.testing.assert_array_equal(new[0, :5], cache[0, :5])
    assert model.extend(table, cache, jnp.array([[0, 1, 2]]), jnp.array([5])).cache.shape == (1, 6)


def test_random_tables_leave_a_possible_token_everywhere():
    table = testing.random_table(1, 2, 3, zeros=0.9)
    assert np.isfinite(table).any(axis=1).all() and np.isinf(table).any()


def test_prefix_distributions_and_target_law_agree_with_a_direct_product():
    model, table = testing.TabularModel(2, 1), testing.random_table(3, 2, 1)
    probs = testing.prefix_distributions(
        model, jnp.asarray(table), [1], 2, sampling.distributions.confidence
    )
    assert probs.shape == (1 + 2 + 4, 2)
    law = testing.target_law(probs, 3)
    softmax = np.exp(table) / np.exp(table).sum(1, keepdims=True)
    for value, (a, b, c) in enumerate(itertools.product(range(2), repeat=3)):
        assert law[value] == pytest.approx(softmax[1, a] * softmax[a, b] * softmax[b, c], abs=1e-6)


def test_tables_that_are_too_short_are_refused():
    from specjax.verification import Token

    with pytest.raises(AssertionError, match="tables need"):
        testing.emitted_law(Token(), np.ones((3, 2)) / 2, np.ones((3, 2)) / 2, 4, 2)


def test_a_prompt_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match="is longer than max_length=2"):
        testing.TabularModel(V, 1).prefill(
            jnp.zeros((V + 1, V)), Prompts(jnp.zeros((1, 3), jnp.int32), jnp.array([3])), 2
        )
