import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.training import Objective
from specjax.training.losses import (
    DIVERGENCES,
    cross_entropy,
    jensen_shannon,
    lk_hybrid,
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


def test_an_objective_mixes_cross_entropy_and_its_divergence():
    options = {"jsd": {"jsd_beta": 0.3}, "lk_hybrid": {"lk_eta": 1.0}}
    for name, divergence in DIVERGENCES.items():
        own = options.get(name, {})
        objective = Objective(label_smoothing=0.0, distillation_weight=0.25, divergence=name, **own)
        found = objective.per_token(LOGITS, TARGETS, TEACHER)
        expected = 0.75 * cross_entropy(LOGITS, TARGETS)
        expected += 0.25 * divergence(LOGITS, TEACHER, *own.values())
        np.testing.assert_allclose(found, expected, rtol=1e-6)


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


def kl(a, b):
    return (a * np.log(a / b)).sum(-1)


def jsd(p, q, beta=0.5):
    m = beta * p + (1 - beta) * q
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


def overlap(p, q):
    return np.minimum(p, q).sum(-1)


def hybrid(p, q, eta):
    weight = np.exp(-eta * overlap(p, q))
    return weight * kl(p, q) + (1 - weight) * (1 - overlap(p, q))


# In float64, from the definitions.
EXPECTED = {
    "forward_kl": kl,
    "reverse_kl": lambda p, q: kl(q, p),
    "jsd": jsd,
    "total_variation": lambda p, q: np.abs(p - q).sum(-1) / 2,
    "lk": lambda p, q: -np.log(overlap(p, q)),
    "lk_hybrid": lambda p, q: hybrid(p, q, 3.0),
}


def test_each_divergence_is_that_of_its_definition():
    p, q = softmax(TEACHER), softmax(LOGITS)
    close = {"rtol": 1e-4, "atol": 1e-6}
    for name, divergence in DIVERGENCES.items():
        np.testing.assert_allclose(divergence(LOGITS, TEACHER), EXPECTED[name](p, q), **close)
    for beta in (0.1, 0.9):
        np.testing.assert_allclose(jensen_shannon(LOGITS, TEACHER, beta), jsd(p, q, beta), **close)
    for eta in (0.0, 1.0, 30.0):
        np.testing.assert_allclose(lk_hybrid(LOGITS, TEACHER, eta), hybrid(p, q, eta), **close)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_gradients_are_those_of_finite_differences_and_the_teacher_has_none(name):
    p, logits = softmax(TEACHER[0]), np.asarray(LOGITS[0], np.float64)

    def total(logits, teacher):
        return jnp.sum(DIVERGENCES[name](logits, teacher))

    found, of_teacher = jax.grad(total, argnums=(0, 1))(LOGITS[0], TEACHER[0])
    assert not np.any(of_teacher)
    fixed = EXPECTED[name]
    if name == "lk_hybrid":  # its weight is a constant
        weight = np.exp(-3.0 * overlap(p, softmax(logits)))
        fixed = lambda p, q: weight * kl(p, q) + (1 - weight) * (1 - overlap(p, q))  # noqa: E731
    step = 1e-6
    for token in range(7):
        moved = [softmax(logits + sign * step * np.eye(7)[token]) for sign in (1, -1)]
        slope = (fixed(p, moved[0]) - fixed(p, moved[1])) / (2 * step)
        np.testing.assert_allclose(found[:, token], slope, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", ["lk", "total_variation"])
def test_only_lk_learns_where_almost_nothing_is_accepted(name):
    # The overlap is e^-40: no sum of probabilities in float32 would show what raises it.
    student, teacher = jnp.asarray([40.0, 0.0, 0.0]), jnp.asarray([-60.0, 0.0, -60.0])
    gradient = jax.grad(DIVERGENCES[name])(student, teacher)
    assert np.all(np.isfinite(gradient))
    assert (float(gradient[1]) < -0.99) == (name == "lk")


@pytest.mark.parametrize("name", DIVERGENCES)
def test_equal_distributions_have_no_divergence_and_no_gradient(name):
    divergence = DIVERGENCES[name]
    shifted = LOGITS + 2.0  # the same distribution
    np.testing.assert_allclose(divergence(shifted, LOGITS), 0.0, atol=2e-6)
    likely = softmax(LOGITS)[..., 2] > 0.05
    changed = np.asarray(divergence(LOGITS.at[..., 2].add(0.1), LOGITS))
    assert likely.any() and np.all(changed[likely] > 1e-4)
    gradient = jax.grad(lambda x: jnp.sum(divergence(x, LOGITS)))(LOGITS)
    np.testing.assert_allclose(gradient, 0.0, atol=1e-6)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_extreme_logits_have_finite_values_and_gradients(name):
    for size in (1e2, 1e4, 1e30):
        logits = jnp.asarray([[size, -size, 0.0], [size, -size, 0.0], [0.0, 0.0, 0.0]])
        teacher = jnp.asarray([[-size, size, 0.0], [size, -size, 0.0], [size, 0.0, -size]])
        of = lambda s, t=teacher: jnp.sum(DIVERGENCES[name](s, t))  # noqa: E731
        value, gradient = jax.value_and_grad(of)(logits)
        assert np.isfinite(value) and np.all(np.isfinite(gradient))


@pytest.mark.parametrize("name", DIVERGENCES)
def test_tokens_that_neither_model_can_draw_add_nothing(name):
    logits, teacher = jax.random.normal(jax.random.key(0), (2, 5))

    def of(logits, teacher):
        return jax.value_and_grad(lambda s: DIVERGENCES[name](s, teacher))(logits)

    value, gradient = of(logits, teacher)
    again, longer = of(*(jnp.append(x, -jnp.inf) for x in (logits, teacher)))
    np.testing.assert_allclose(again, value, rtol=1e-6)
    np.testing.assert_allclose(longer, [*gradient, 0.0], atol=1e-6)
