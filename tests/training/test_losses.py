import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.training import (
    Objective,
    cross_entropy,
    distillation_loss,
    masked_total,
    token_totals,
)

LOGITS = jax.random.normal(jax.random.key(0), (3, 5, 7)) * 3.0
TEACHER = jax.random.normal(jax.random.key(1), (3, 5, 7)) * 3.0
TARGETS = jax.random.randint(jax.random.key(2), (3, 5), 0, 7)


def softmax(x):
    x = np.exp(np.asarray(x, np.float64) - np.max(x, -1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_cross_entropy_is_that_of_the_smoothed_distribution(smoothing):
    target = np.eye(7)[np.asarray(TARGETS)] * (1 - smoothing) + smoothing / 7
    expected = -(target * np.log(softmax(LOGITS))).sum(-1)
    np.testing.assert_allclose(cross_entropy(LOGITS, TARGETS, smoothing), expected, rtol=2e-5)


def test_distillation_loss_is_the_kl_divergence():
    p, q = softmax(TEACHER), softmax(LOGITS)
    expected = (p * (np.log(p) - np.log(q))).sum(-1)
    np.testing.assert_allclose(distillation_loss(LOGITS, TEACHER), expected, rtol=1e-4, atol=1e-6)
    assert float(jnp.max(jnp.abs(distillation_loss(LOGITS, LOGITS)))) < 1e-5


def test_no_gradient_flows_into_the_teacher():
    grad = jax.grad(lambda t: jnp.sum(distillation_loss(LOGITS, t)))(TEACHER)
    assert not np.any(grad)


def test_masked_entries_count_for_nothing():
    values = jnp.asarray([[1.0, 2.0, jnp.inf], [3.0, jnp.nan, jnp.nan]])
    mask = jnp.asarray([[True, True, False], [True, False, False]])
    assert [float(x) for x in masked_total(values, mask)] == [6.0, 3.0]
    assert [float(x) for x in masked_total(values, jnp.zeros_like(mask))] == [0.0, 0.0]


def test_validation_totals_are_plain_cross_entropy_and_greedy_hits():
    mask = np.zeros((3, 5), bool)
    mask[:2, :3] = True
    totals = token_totals(LOGITS, TARGETS, mask)
    each = -np.log(np.take_along_axis(softmax(LOGITS), np.asarray(TARGETS)[..., None], -1)[..., 0])
    hits = np.argmax(np.asarray(LOGITS), -1) == np.asarray(TARGETS)
    assert float(totals["loss"].sum) == pytest.approx(each[mask].sum(), rel=1e-5)
    assert float(totals["accuracy"].sum) == float(hits[mask].sum())
    assert {int(total.items) for total in totals.values()} == {6}


@pytest.mark.parametrize(("name", "end"), [("label_smoothing", ")"), ("distillation_weight", "]")])
def test_objectives_outside_their_range_are_refused(name, end):
    with pytest.raises(ValueError, match=rf"Objective: {name} must lie in \[0, 1\{end}, got 1.5"):
        Objective(**{name: 1.5})
    with pytest.raises(TypeError, match=f"Objective: {name} must be a number, got 'x'"):
        Objective(**{name: "x"})
