"""Rules on pairs of distributions, and the tuned lossy target in float64."""

import jax
import numpy as np

from tests.tables import random_distributions

_apply = jax.jit(lambda rule, *laws: jax.vmap(rule)(*laws))


def apply(rule, q, p, q_conf=None, p_conf=None):
    q_conf, p_conf = (q if q_conf is None else q_conf), (p if p_conf is None else p_conf)
    return np.asarray(_apply(rule, q, p, q_conf, p_conf))


def pairs(vocab, count=60, seed=0):
    q, p = (random_distributions(s, count, vocab, zeros=0.3) for s in (2 * seed, 2 * seed + 1))
    q[:5] = p[:5]  # identical
    q[5:9] = np.eye(vocab, dtype=np.float32)[0]  # one-hot
    p[7:11] = np.eye(vocab, dtype=np.float32)[-1]
    return q, p


def exact_inverse_beta(q, p, keep):
    """Bisection in float64."""
    q, p = q.astype(np.float64), p.astype(np.float64)
    excess = np.maximum(q - p / keep, 0).sum(1, keepdims=True)
    low, high = np.zeros_like(excess), np.ones_like(excess)
    for _ in range(60):
        middle = (low + high) / 2
        enough = np.maximum(middle * p - q, 0).sum(1, keepdims=True) >= excess
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    return high


def exact_tuned(q, p, keep):
    b = exact_inverse_beta(q, p, keep)
    raised = np.maximum(np.minimum(q.astype(np.float64), p / keep), p * b)
    return raised / raised.sum(1, keepdims=True)


def divergence(x, y):
    """KL(x || y) in float64, of the distributions that the weights stand for."""
    x, y = (one.astype(np.float64) / one.sum(1, keepdims=True, dtype=np.float64) for one in (x, y))
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(x > 0, x * (np.log(x) - np.log(y)), 0.0).sum(1)


def tuned_at(accepted, q, p):
    """LossyTuned's target with a given acceptance, in float64; and the acceptance it has."""
    low, high = np.full((len(q), 1), -60.0), np.zeros((len(q), 1))
    for _ in range(70):
        middle = (low + high) / 2
        more = np.minimum(exact_tuned(q, p, np.exp(middle)), q).sum(1) >= accepted
        low, high = np.where(more[:, None], middle, low), np.where(more[:, None], high, middle)
    pi = exact_tuned(q, p, np.exp(low))
    return pi, np.minimum(pi, q).sum(1)
