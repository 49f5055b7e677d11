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


@pytest.mark.parametrize("confidences", [False, True])
@pytest.mark.parametrize(("blocks", "shared"), [(0, False), (1, True), (4, False), (4, True)])
def test_it_is_what_the_formula_says(blocks, shared, confidences):
    config = HeadConfig(6, blocks, shared, confidences)
    params, rng = randomised(config), np.random.default_rng(1)
    assert len(params) == 1 + min(blocks, 1 if shared else blocks)
    hidden, features = (
        jnp.asarray(rng.normal(size=(2, 3, size)), jnp.float32) * 0.3 for size in (6, 3)
    )
    found = apply_head(config, params, hidden, features)
    assert found.shape == (2, 3) and found.dtype == jnp.float32
    read = jnp.concatenate([hidden, features], axis=-1) if confidences else hidden
    np.testing.assert_allclose(found, by_hand(config, params, read), rtol=2e-5, atol=1e-5)
    # Halves are computed in float32; an untrained head knows nothing.
    half = hidden.astype(jnp.bfloat16)
    both = (apply_head(config, params, x, features) for x in (half, half.astype(jnp.float32)))
    np.testing.assert_array_equal(*both)
    assert not np.any(apply_head(config, init_head(config, KEY), hidden, features))


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


def test_the_features_are_those_of_the_distribution():
    confidences = jnp.asarray([0.5, 0.3, 0.2, 0.0], jnp.float32)
    entropy = -sum(p * np.log(p) for p in (0.5, 0.3, 0.2))
    expected = [0.0, entropy - 1.0, np.log(0.2 / 0.8) / 3.0]
    np.testing.assert_allclose(drawn_features(confidences, jnp.int32(2)), expected, atol=1e-6)
    certain = drawn_features(jnp.asarray([1.0, 0.0], jnp.float32), jnp.int32(1))
    assert np.isfinite(certain).all() and certain[0] > 5.0 > -5.0 > certain[2]
