"""The benchmark of strengths that are learnt from the context."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import strengths
from specjax.acceptance_head.network import HeadConfig
from tests.tables import random_distributions

Q, P = (random_distributions(seed, 1100, 6) for seed in (0, 1))


@pytest.fixture(scope="module")
def positions():
    accepted, nats = strengths._by_chunk(strengths._tables, Q, P)
    # The hidden state tells all: the best strengths can be learnt.
    hidden = np.log(np.concatenate([Q, P], axis=1) + 1e-3)
    features = strengths._by_chunk(strengths._features, Q)
    return strengths.Positions(hidden, features, accepted, nats, Q, P)


def test_the_table_is_that_of_the_rule(positions):
    np.testing.assert_allclose(positions.accepted[:, 0], np.minimum(Q, P).sum(1), atol=1e-5)
    np.testing.assert_allclose(positions.nats[:, 0], 0.0, atol=1e-6)
    assert (np.diff(positions.accepted) > -1e-5).all() and (np.diff(positions.nats) > -1e-5).all()
    rows = np.full(len(Q), np.float32(-np.expm1(-strengths._LOG_RATIOS[20])))
    accepted, nats = strengths._by_chunk(strengths._each, rows, Q, P)
    np.testing.assert_allclose(positions.accepted[:, 20], accepted, atol=1e-6)
    np.testing.assert_allclose(positions.nats[:, 20], nats, atol=1e-6)


def test_no_other_spread_of_the_nats_accepts_more_than_the_best(positions):
    frontiers = strengths._frontiers(positions)
    grid = np.linspace(0.02, 0.3, 20)
    best, one, ball = (np.interp(grid, *frontiers[name]) for name in ("best", "one", "ball"))
    # The curves are drawn through points, of the table's strengths.
    assert (best > one - 1e-3).all() and (best > ball - 1e-3).all()
    assert (best - one).max() > 5e-3 and (best - ball).max() > 5e-3


def test_a_network_learns_strengths_that_are_worth_more_than_one(positions):
    task = strengths.Learnt(HeadConfig(12, confidences=True), 0.5)
    args = types.SimpleNamespace(epochs=300, rate=3e-3)
    params = strengths._train(task, positions, args)
    worth = lambda accepted, nats: accepted - nats / 0.5  # noqa: E731
    learnt = worth(*strengths._of_head(task, params, positions))
    best = worth(*strengths._best(0.5, positions))
    one = worth(positions.accepted, positions.nats).mean(axis=0).max()
    assert one < learnt < best + 1e-3


def test_its_loss_lies_between_the_strengths_of_the_table(positions):
    task = strengths.Learnt(HeadConfig(12, blocks=0), 0.5)
    zero = {"out": {"kernel": jnp.zeros((12, 1)), "bias": jnp.full((1,), 0.01)}}
    found = task.loss(zero, None, positions, None)
    worth = (positions.accepted - positions.nats / 0.5).mean(axis=0)
    place = 32 / (1 + np.exp(-0.01))
    assert int(place) == 16
    expected = 1 - np.interp(place, np.arange(33), worth)
    assert float(found.sum) / int(found.items) == pytest.approx(expected, rel=1e-4)
