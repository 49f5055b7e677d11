"""Rules that accept the most within a bound on a divergence: Mentored and KLBall."""

import functools

import jax
import numpy as np
import pytest

from specjax import rules
from tests.rules.exact import apply, divergence, exact_tuned, pairs
from tests.tables import RULES

# Rule -> its divergence of pi from p.
BALLS = {
    rules.Mentored: lambda p, pi: divergence(p, pi),
    rules.KLBall: lambda p, pi: divergence(pi, p),
}
each = pytest.mark.parametrize("ball", BALLS, ids=lambda ball: ball.__name__)


def exact_ball(ball, q, p, bound):
    """Bisection in float64 for the smallest keep within the bound."""
    low, high = np.full((len(q), 1), -60.0), np.zeros((len(q), 1))
    for _ in range(60):
        middle = (low + high) / 2
        within = (BALLS[ball](p, exact_tuned(q, p, np.exp(middle))) <= bound)[:, None]
        low, high = np.where(within, low, middle), np.where(within, middle, high)
    within = (BALLS[ball](p, q) <= bound)[:, None]
    return np.where(within, q, exact_tuned(q, p, np.exp(high)))


@each
@pytest.mark.parametrize("bound", [0.0, 1e-3, 0.05, 3.0])
@pytest.mark.parametrize("vocab", [2, 5, 100])
def test_the_whole_bound_is_used(ball, bound, vocab):
    q, p = pairs(vocab)
    pi = apply(ball(bound), q, p)
    spent = BALLS[ball](p, pi)
    assert (spent <= bound + 1e-5).all()
    want = exact_ball(ball, q, p, bound) if bound else p
    np.testing.assert_allclose(pi, want, atol=4e-5)
    if bound == 0.05:
        assert (np.abs(spent - bound) < 2e-5).sum() > 10


@each
def test_without_a_bound_it_is_lossless_also_for_nearly_equal_models(ball):
    q, p = nearly_equal(1e-4)
    np.testing.assert_array_equal(apply(ball(0.0), q, p), p)


@functools.cache
def nearly_equal(by, vocab=8):
    q, _ = pairs(vocab)
    noise = np.random.default_rng(0).standard_normal(q.shape)
    p = (q * (1.0 + by * noise)).astype(np.float32)
    return q, p / p.sum(axis=1, keepdims=True)


def large(vocab):
    """Peaked and flat distributions over a whole vocabulary."""
    rng = np.random.default_rng(0)
    first = rng.standard_normal((6, vocab)) * np.array([0.1, 1.0, 2.0, 3.0, 5.0, 8.0])[:, None]
    logits = np.stack([first, first + rng.standard_normal(first.shape)])
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


@pytest.mark.parametrize("nats", [1e-8, 1e-6, 1e-4, 1e-2, 0.3, 5.0])
def test_kl_ball_is_within_its_bound_at_every_position(nats):
    ball = rules.KLBall(nats)
    cases = [pairs(vocab) for vocab in (2, 5, 100)]
    cases += [nearly_equal(by, 100) for by in (1e-4, 1e-2)] + [large(262_144)]
    for q, p in cases:
        pi = apply(ball, q, p)
        spent = divergence(pi, p)
        assert (spent <= np.float32(nats)).all(), spent.max() / nats
        # It is used, but for less than float32 could tell, where a lenient target would exceed it.
        left = 1e-3 * nats + 1e-4 * np.sqrt(nats)
        assert ((spent > nats - left) | (most(q, p) < nats + left)).all()


def most(q, p):
    """The divergence of the most lenient target without impossible tokens."""
    return divergence(exact_tuned(q, p, np.exp(-80.0)), p)


def test_nothing_within_the_bound_accepts_more():
    q, p = (np.concatenate(x) for x in zip(*(pairs(6, seed=s) for s in range(3)), strict=True))
    closer = 0
    for rule in RULES.values():
        pi = apply(rule, q, p)
        nats, accepted = divergence(pi, p), np.minimum(pi, q).sum(1)
        rows = np.isfinite(nats) & (nats > 1e-5)
        if not rows.any():
            continue
        # A little more than that, for what float32 leaves of a bound.
        nats = np.where(rows, nats, 1.0)
        bounds = nats * (1.0 + 2e-4) + 1e-4 * np.sqrt(nats)
        ball = np.asarray(_each_row(rules.KLBall(bounds), q, p))
        gain = (np.minimum(ball, q).sum(1) - accepted)[rows]
        assert (gain > -1e-5).all(), rule
        closer += (gain > 1e-3).sum()
    assert closer > 100


_each_row = jax.jit(jax.vmap(lambda rule, q, p: rule(q, p)))
