import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.training.divergences import DIVERGENCES, jensen_shannon

LOGITS = jax.random.normal(jax.random.key(0), (3, 5, 7)) * 3.0
TEACHER = jax.random.normal(jax.random.key(1), (3, 5, 7)) * 3.0


def softmax(x):
    x = np.asarray(x, np.float64)
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def kl(a, b):
    return (a * np.log(a / b)).sum(-1)


def jsd(p, q, beta=0.5):
    m = beta * p + (1 - beta) * q
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


# In float64, from the definitions.
EXPECTED = {
    "forward_kl": kl,
    "reverse_kl": lambda p, q: kl(q, p),
    "jsd": jsd,
    "total_variation": lambda p, q: np.abs(p - q).sum(-1) / 2,
}


@pytest.mark.parametrize("name", DIVERGENCES)
def test_each_divergence_is_that_of_its_definition(name):
    expected = EXPECTED[name](softmax(TEACHER), softmax(LOGITS))
    found = DIVERGENCES[name](LOGITS, TEACHER)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("beta", [0.1, 0.9])
def test_jensen_shannon_of_other_betas(beta):
    expected = jsd(softmax(TEACHER), softmax(LOGITS), beta)
    np.testing.assert_allclose(jensen_shannon(LOGITS, TEACHER, beta), expected, rtol=1e-4)


def test_the_ends_of_jensen_shannon_are_the_two_kls():
    logits, teacher = LOGITS / 3.0, TEACHER / 3.0
    p, q = softmax(teacher), softmax(logits)
    for beta, end in ((1e-3, kl(p, q)), (1.0 - 1e-3, kl(q, p))):
        found = np.asarray(jensen_shannon(logits, teacher, beta)) / 1e-3
        np.testing.assert_allclose(found, end, rtol=0.1, atol=0.01)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_each_divergence_is_0_only_where_the_distributions_are_equal(name):
    divergence = DIVERGENCES[name]
    shifted = LOGITS + 2.0  # the same distribution
    np.testing.assert_allclose(divergence(shifted, LOGITS), 0.0, atol=2e-6)
    changed = LOGITS.at[..., 2].add(0.1)
    assert float(jnp.min(divergence(changed, LOGITS))) > -2e-6
    likely = np.asarray(softmax(LOGITS)[..., 2] > 0.05)
    assert likely.any()
    assert np.all(np.asarray(divergence(changed, LOGITS))[likely] > 1e-4)


@pytest.mark.parametrize("name", DIVERGENCES)
def test_gradients_reach_the_student_alone(name):
    total = lambda s, t: jnp.sum(DIVERGENCES[name](s, t))  # noqa: E731
    student, teacher = jax.grad(total, argnums=(0, 1))(LOGITS, TEACHER)
    assert np.any(student)
    assert not np.any(teacher)


@pytest.mark.parametrize("name", DIVERGENCES)
@pytest.mark.parametrize("size", [1e2, 1e4, 1e30])
def test_extreme_logits_have_finite_values_and_gradients(name, size):
    logits = jnp.asarray([[size, -size, 0.0], [size, -size, 0.0], [0.0, 0.0, 0.0]])
    teacher = jnp.asarray([[-size, size, 0.0], [size, -size, 0.0], [size, 0.0, -size]])
    value, gradient = jax.value_and_grad(lambda s: jnp.sum(DIVERGENCES[name](s, teacher)))(logits)
    assert np.isfinite(value)
    assert np.all(np.isfinite(gradient))
