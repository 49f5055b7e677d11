import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.training import AdamW

ROOT = {"learning_rate": 0.5, "warmup_steps": 100}
COSINE = {
    "learning_rate": 1.0, "warmup_steps": 10, "decay": "cosine", "total_steps": 110, "floor": 0.2
}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "rates"),
    [
        (ROOT, {0: 0.005, 49: 0.25, 99: 0.5, 399: 0.25}),
        (COSINE, {4: 0.5, 9: 1.0, 59: 0.6, 109: 0.2, 500: 0.2}),
    ],
)
def test_a_rate_warms_up_and_decays(options, rates):
    schedule = AdamW(**options).rate
    assert {step: float(schedule(step)) for step in rates} == pytest.approx(rates)


def updates_of(optimizer, params, *all_grads):
    transformation = optimizer.transformation()
    state, found = transformation.init(params), []
    for grads in all_grads:
        with jax.numpy_dtype_promotion("standard"):
            updates, state = transformation.update(grads, state, params)
        found.append(updates)
    return found


# Of a constant gradient, Adam's updates have entries of size one.
def test_each_update_has_the_rate_of_its_step():
    params = {"kernel": jnp.ones((2, 2))}
    optimizer = AdamW(learning_rate=1.0, warmup_steps=4)
    for step, updates in enumerate(updates_of(optimizer, params, *[params] * 6)):
        np.testing.assert_allclose(updates["kernel"], -float(optimizer.rate(step)), rtol=1e-5)


def test_relative_rates_follow_each_arrays_scale():
    sizes = {"embedding": 2.0, "kernel": 0.1, "scale": 0.0}
    params = {name: jnp.full((4, 4), size) for name, size in sizes.items()}
    grads = jax.tree.map(jnp.ones_like, params)
    options = {"learning_rate": 0.01, "warmup_steps": 1}
    relative, absolute = (
        updates_of(AdamW(**options, relative=x), params, grads)[0] for x in (True, False)
    )
    for name, size in sizes.items():
        np.testing.assert_allclose(relative[name], -0.01 * max(size, 1e-3), rtol=1e-5)
        np.testing.assert_allclose(absolute[name], -0.01, rtol=1e-5)


def test_weight_decay_spares_scales_and_position_biases():
    names = ("kernel", "embedding", "scale", "rel_embedding")
    params = {name: jnp.ones((3, 3)) for name in names}
    optimizer = AdamW(learning_rate=0.1, warmup_steps=1, weight_decay=0.5)
    (updates,) = updates_of(optimizer, params, jax.tree.map(jnp.zeros_like, params))
    for name in names:
        decayed = 0.05 if name in ("kernel", "embedding") else 0.0
        np.testing.assert_allclose(updates[name], -decayed, rtol=1e-6)


def test_long_gradients_are_clipped():
    params = {"kernel": jnp.zeros((2, 2))}
    # A huge eps makes Adam's first update proportional to the gradient.
    optimizer = AdamW(learning_rate=1.0, warmup_steps=1, clip_norm=1.0, eps=1e3)
    short, long = (
        updates_of(optimizer, params, {"kernel": jnp.full((2, 2), size)})[0]["kernel"]
        for size in (0.5, 50.0)
    )
    np.testing.assert_allclose(short, long, rtol=1e-5)
