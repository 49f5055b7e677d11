import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.acceptance_head import Head, HeadConfig, apply_head, drawn_features, init_head

KEY = jax.random.key(0)


def randomised(config, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), init_head(config, KEY)
    )


def by_hand(config, params, hidden):
    x = np.asarray(hidden, np.float64)
    for i in range(config.blocks):
        layer = params["block" if config.shared else f"block_{i}"]
        y = x @ np.asarray(layer["kernel"], np.float64) + np.asarray(layer["bias"], np.float64)
        x = x + y / (1.0 + np.exp(-y))
    return (x @ np.asarray(params["out"]["kernel"]) + np.asarray(params["out"]["bias"]))[..., 0]


@pytest.mark.parametrize("blocks", [0, 1, 4])
@pytest.mark.parametrize("shared", [False, True])
def test_it_is_what_the_formula_says(blocks, shared):
    config = HeadConfig(6, blocks, shared)
    params = randomised(config)
    hidden = jnp.asarray(np.random.default_rng(1).normal(size=(2, 3, 6)), jnp.float32) * 0.3
    found = apply_head(config, params, hidden)
    assert found.shape == (2, 3) and found.dtype == jnp.float32
    np.testing.assert_allclose(found, by_hand(config, params, hidden), rtol=2e-5, atol=1e-5)
    np.testing.assert_allclose(apply_head(config, params, hidden[1, 2]), found[1, 2], rtol=1e-5)


def test_shared_blocks_have_one_matrix():
    sizes = {
        shared: sum(x.size for x in jax.tree.leaves(init_head(HeadConfig(8, 3, shared), KEY)))
        for shared in (False, True)
    }
    assert sizes == {False: 3 * (64 + 8) + 9, True: 64 + 8 + 9}


def test_halves_are_computed_in_float32():
    config = HeadConfig(6, 2)
    params = randomised(config)
    hidden = jnp.asarray(np.random.default_rng(1).normal(size=(5, 6)), jnp.bfloat16)
    np.testing.assert_array_equal(
        apply_head(config, params, hidden), apply_head(config, params, hidden.astype(jnp.float32))
    )


def test_an_untrained_head_knows_nothing():
    config = HeadConfig(4)
    np.testing.assert_array_equal(apply_head(config, init_head(config, KEY), jnp.ones((3, 4))), 0.0)


def test_a_head_holds_its_own_parameters():
    config = HeadConfig(4)
    params = init_head(config, KEY)
    Head(config, params, "mark")
    with pytest.raises(ValueError, match="params must be the float32 parameters of HeadConfig"):
        Head(HeadConfig(4, blocks=2), params, "mark")
    with pytest.raises(ValueError, match="params must be the float32 parameters"):
        Head(config, jax.tree.map(lambda x: x.astype(jnp.bfloat16), params), "mark")
    with pytest.raises(ValueError, match="drafter_fingerprint must be"):
        Head(config, params, "")


def test_confidences_are_read_beside_the_hidden_state():
    config = HeadConfig(6, 2, confidences=True)
    params, rng = randomised(config), np.random.default_rng(1)
    hidden = jnp.asarray(rng.normal(size=(4, 6)), jnp.float32) * 0.3
    features = jnp.asarray(rng.normal(size=(4, 3)), jnp.float32) * 0.3
    expected = by_hand(config, params, jnp.concatenate([hidden, features], axis=1))
    found = apply_head(config, params, hidden, features)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=1e-5)
    # Without them it reads the hidden state alone, whatever is given.
    alone = HeadConfig(6, 2)
    np.testing.assert_array_equal(
        apply_head(alone, randomised(alone), hidden, features),
        apply_head(alone, randomised(alone), hidden),
    )


def test_the_features_are_those_of_the_distribution():
    confidences = jnp.asarray([0.5, 0.3, 0.2, 0.0], jnp.float32)
    entropy = -sum(p * np.log(p) for p in (0.5, 0.3, 0.2))
    expected = [0.0, entropy - 1.0, np.log(0.2 / 0.8) / 3.0]
    np.testing.assert_allclose(drawn_features(confidences, jnp.int32(2)), expected, atol=1e-6)
    certain = drawn_features(jnp.asarray([1.0, 0.0], jnp.float32), jnp.int32(1))
    assert np.isfinite(certain).all() and certain[0] > 5.0 > -5.0 > certain[2]
