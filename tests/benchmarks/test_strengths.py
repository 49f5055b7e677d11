"""The benchmark of strengths that are learnt from the context."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import strengths
from specjax import rules
from specjax.acceptance_head import NUM_FEATURES, HeadConfig
from specjax.rules.varying import scaled
from tests.tables import random_distributions

Q, P = (random_distributions(seed, 1100, 6) for seed in (0, 1))


RULE = strengths._RULES["LossyTuned"]


@pytest.fixture(scope="module")
def positions():
    # The hidden state tells all: the best strengths can be learnt.
    hidden = np.log(np.concatenate([Q, P], axis=1) + 1e-3)
    features = strengths._by_chunk(strengths._features, Q)
    return strengths.Positions(hidden, features, Q, P, *strengths._table(RULE, Q, P))


def test_the_table_is_that_of_the_rule(positions):
    np.testing.assert_allclose(positions.accepted[:, 0], np.minimum(Q, P).sum(1), atol=1e-4)
    np.testing.assert_allclose(positions.nats[:, 0], 0.0, atol=1e-5)
    assert (np.diff(positions.accepted) > -1e-5).all() and (np.diff(positions.nats) > -1e-5).all()
    strength = 0.9999 / (1 + np.exp(-strengths._LOGITS[30]))
    found = strengths._mean(rules.LossyTuned(float(strength)), positions)
    want = positions.accepted[:, 30].mean(), positions.nats[:, 30].mean()
    np.testing.assert_allclose(found, want, atol=1e-5)


def test_no_other_spread_of_the_nats_accepts_more_than_the_best(positions):
    found = {name: strengths._frontier(x, positions) for name, x in strengths._FRONTIERS.items()}
    grid = np.linspace(0.02, 0.3, 20)
    best, one, ball = (np.interp(grid, *found[name][::-1]) for name in ("best", "one", "ball"))
    # The curves are drawn through points.
    assert (best > one - 1e-3).all() and (best > ball - 1e-3).all()
    assert (best - one).max() > 5e-3 and (best - ball).max() > 5e-3


def worth(rule, positions):
    accepted, nats = strengths._mean(rule, positions)
    return accepted - nats / 0.5


def test_a_network_learns_strengths_that_are_worth_more_than_one(positions):
    task = strengths.StrengthTask(HeadConfig(12, confidences=True), 0.5)
    params = strengths._train(task, positions, types.SimpleNamespace(epochs=300, rate=3e-3))
    shares = jax.nn.sigmoid(task.logits(params, positions))
    learnt = worth(scaled(RULE, shares), positions)
    one = (positions.accepted - positions.nats / 0.5).mean(axis=0).max()
    assert one < learnt < worth(rules.KLPrice(0.5), positions) + 1e-3


def test_a_linear_head_is_the_rule_that_is_printed(positions):
    # Where the drafter is sure, the verifier is nearer to it.
    sure = Q.max(axis=1) > np.median(Q.max(axis=1))
    known = positions._replace(p=np.where(sure[:, None], 0.6 * Q + 0.4 * P, P))
    table = strengths._table(RULE, known.q, known.p)
    known = known._replace(accepted=table[0], nats=table[1])
    task = strengths.StrengthTask(HeadConfig(NUM_FEATURES, blocks=0), 0.5)
    params = strengths._train(task, known, types.SimpleNamespace(epochs=600, rate=3e-3))
    rule = strengths._learnt(RULE, params)
    shares = jax.nn.sigmoid(task.logits(params, known))
    np.testing.assert_allclose(jax.vmap(rule.share)(known.q), shares, atol=1e-3)
    one = (known.accepted - known.nats / 0.5).mean(axis=0).max()
    assert one < worth(rule, known) < worth(rules.KLPrice(0.5), known) + 1e-3


def test_its_loss_lies_between_the_strengths_of_the_table(positions):
    task = strengths.StrengthTask(HeadConfig(12, blocks=0, confidences=True), 0.5)
    zero = {"out": {"kernel": jnp.zeros((12 + NUM_FEATURES, 1)), "bias": jnp.full((1,), 0.1)}}
    found = task.loss(zero, None, positions, None)
    worth = (positions.accepted - positions.nats / 0.5).mean(axis=0)
    assert 0.1 not in strengths._LOGITS and 0.0 in strengths._LOGITS
    expected = 1 - np.interp(0.1, strengths._LOGITS, worth)
    assert float(found.sum) / int(found.items) == pytest.approx(expected, rel=1e-4)


def test_too_few_positions_are_refused(positions):
    few = strengths.Positions(*(x[:9] for x in positions))
    task = strengths.StrengthTask(HeadConfig(12, confidences=True), 0.5)
    with pytest.raises(ValueError, match="--training must give at least 1,024 positions, got 9"):
        strengths._train(task, few, types.SimpleNamespace(epochs=1, rate=1e-3))
