import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.training import AdamW


def test_inverse_sqrt_warms_up_and_decays():
    schedule = AdamW(learning_rate=0.5, warmup_steps=100).rate
    assert float(schedule(0)) == pytest.approx(0.005)
    assert float(schedule(49)) == pytest.approx(0.25)
    assert float(schedule(99)) == pytest.approx(0.5)
    assert float(schedule(399)) == pytest.approx(0.25)


def test_cosine_ends_at_its_floor():
    options = {"decay": "cosine", "total_steps": 110, "floor": 0.2}
    schedule = AdamW(learning_rate=1.0, warmup_steps=10, **options).rate
    assert float(schedule(4)) == pytest.approx(0.5)
    assert float(schedule(9)) == pytest.approx(1.0)
    assert float(schedule(59)) == pytest.approx(0.6)
    assert float(schedule(109)) == pytest.approx(0.2)
    assert float(schedule(500)) == pytest.approx(0.2)


def one_update(optimizer, params, grads):
    transformation = optimizer.transformation()
    with jax.numpy_dtype_promotion("standard"):
        updates, _ = transformation.update(grads, transformation.init(params), params)
    return updates


def test_relative_rates_follow_each_arrays_scale():
    params = {
        "embedding": jnp.full((4, 4), 2.0),
        "kernel": jnp.full((4, 4), 0.1),
        "scale": jnp.zeros(4),
    }
    grads = jax.tree.map(jnp.ones_like, params)
    schedule = {"learning_rate": 0.01, "warmup_steps": 1}
    updates = one_update(AdamW(**schedule, relative=True), params, grads)
    # Adam's first update has entries of size one.
    np.testing.assert_allclose(updates["embedding"], -0.02, rtol=1e-5)
    np.testing.assert_allclose(updates["kernel"], -0.001, rtol=1e-5)
    np.testing.assert_allclose(updates["scale"], -1e-5, rtol=1e-5)
    absolute = one_update(AdamW(**schedule), params, grads)
    for update in absolute.values():
        np.testing.assert_allclose(update, -0.01, rtol=1e-5)


def test_weight_decay_spares_scales_and_position_biases():
    names = ("kernel", "embedding", "scale", "rel_embedding")
    params = {name: jnp.ones((3, 3)) for name in names}
    optimizer = AdamW(learning_rate=0.1, warmup_steps=1, weight_decay=0.5)
    updates = one_update(optimizer, params, jax.tree.map(jnp.zeros_like, params))
    decayed = {name for name in names if float(jnp.abs(updates[name]).max()) > 0}
    assert decayed == {"kernel", "embedding"}
    np.testing.assert_allclose(updates["kernel"], -0.05, rtol=1e-6)


def test_long_gradients_are_clipped():
    params = {"kernel": jnp.zeros((2, 2))}
    # A huge eps makes Adam's first update proportional to the gradient.
    optimizer = AdamW(learning_rate=1.0, warmup_steps=1, clip_norm=1.0, eps=1e3)
    short = one_update(optimizer, params, {"kernel": jnp.full((2, 2), 0.5)})["kernel"]
    long = one_update(optimizer, params, {"kernel": jnp.full((2, 2), 50.0)})["kernel"]
    np.testing.assert_allclose(short, long, rtol=1e-5)


def test_the_first_update_has_the_schedules_first_rate():
    params = {"kernel": jnp.ones((2, 2))}
    optimizer = AdamW(learning_rate=1.0, warmup_steps=4)
    transformation = optimizer.transformation()
    state = transformation.init(params)
    for step in range(6):
        with jax.numpy_dtype_promotion("standard"):
            updates, state = transformation.update(params, state, params)
        # Of a constant gradient, Adam's updates have entries of size one.
        rate = float(optimizer.rate(step))
        np.testing.assert_allclose(updates["kernel"], -rate, rtol=1e-5)
