"""A rule held to a divergence budget: one position. Its law is in tests/decoding/test_budget.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import rules
from specjax.rules.budgeted import divergence
from tests.tables import RULES, random_distributions

COUNT, VOCAB = 200, 7


@jax.jit
def spend(rule, q, p, credit):
    def one(q, p, credit):
        target = rule.rule(q, p, q, p)
        held, left = rule.spend(target, p, credit)
        return target, held, left, divergence(held, p)

    return jax.vmap(one)(q, p, credit)


def positions():
    q, p = (random_distributions(seed, COUNT, VOCAB, zeros=0.3) for seed in (0, 1))
    q[:5] = p[:5]
    q[5:9], p[7:11] = np.eye(VOCAB, dtype=np.float32)[[0, -1]][:, None]
    return q, p


@pytest.mark.parametrize("name", ["OPT", "TokenV1", "Lossy", "Mentored"])
def test_no_position_pays_more_than_it_has(name):
    q, p = positions()
    credit = np.geomspace(1e-4, 3.0, COUNT).astype(np.float32)
    target, held, left, cost = map(
        np.asarray, spend(rules.Budgeted(RULES[name], 0.01), q, p, credit)
    )
    assert np.isfinite(held).all() and (held >= 0.0).all() and (held[p == 0.0] == 0.0).all()
    np.testing.assert_allclose(held.sum(axis=1), 1.0, atol=2e-6)
    safe = np.where(held > 0.0, held, 1.0), np.where(held > 0.0, p, 1.0)
    exact = held * np.log(safe[0] / safe[1])
    np.testing.assert_allclose(cost, exact.sum(axis=1), atol=2e-6)
    np.testing.assert_allclose(left, credit + 0.01 - cost, atol=1e-6)
    assert (left >= -1e-6).all()
    # The control: the rule itself pays more than there is.
    with np.errstate(divide="ignore"):
        price = (target * np.log(np.where(target > 0.0, target / p, 1.0))).sum(axis=1)
    assert (price > credit + 0.01).sum() > 20
    # What it can pay in full, it leaves as it is.
    free = np.isclose(target, p, atol=0.0).all(axis=1)
    np.testing.assert_array_equal(held[free], target[free])


def test_the_ends_are_the_verifier_and_the_rule():
    q, p = positions()
    none = np.zeros(COUNT, np.float32)
    target, held, left, _ = spend(rules.Budgeted(rules.Diff(0.3), 0.0), q, p, none)
    assert not np.array_equal(target, p)
    np.testing.assert_array_equal(held, p)
    np.testing.assert_array_equal(left, none)
    target, held, left, _ = spend(rules.Budgeted(rules.Diff(0.3), np.inf), q, p, none)
    np.testing.assert_array_equal(held, target)
    assert np.isposinf(left).all()


def test_much_of_a_budget_is_spent_at_once():
    q, p = (random_distributions(seed, COUNT, VOCAB) for seed in (0, 1))
    none = np.zeros(COUNT, np.float32)
    target, _, _, cost = spend(rules.Budgeted(rules.Diff(np.inf), 0.05), q, p, none)
    whole = np.asarray(jax.vmap(divergence)(target, jnp.asarray(p)))
    cost = np.asarray(cost)
    np.testing.assert_allclose(cost[whole < 0.05], whole[whole < 0.05], rtol=1e-5)
    dear = whole > 0.05
    assert dear.sum() > 100 and np.mean(cost[dear]) > 0.5 * 0.05


def test_it_is_a_rule():
    held = rules.Budgeted(rules.OPT(0.5), nats_per_token=0.1)
    rules.check_rule(held)
    assert held.reads_draft and held.reads_draft_confidence and held.reads_verifier_confidence
    assert not rules.Budgeted(rules.Lossy(0.5), 0.1).reads_draft_confidence
    assert len(jax.tree.leaves(rules.Budgeted(rules.Lossy(0.5), 0.1))) == 3


@pytest.mark.parametrize(
    ("rule", "budget", "error", "message"),
    [
        (rules.Lossless(), 0.1, ValueError, r"must have a strength to lower, got Lossless\(\)"),
        (rules.Budgeted(rules.OPT(0.5), 0.1), 0.1, ValueError, "must have a strength to lower"),
        (rules.OPT, 0.1, TypeError, "rule must be an instance, got the class OPT"),
        (rules.SequenceChow(0.5), 0.1, TypeError, "rule must be one such as rules.OPT"),
        (rules.OPT(0.5), -0.1, ValueError, "nats_per_token must"),
        (rules.OPT(0.5), "x", TypeError, "nats_per_token must"),
    ],
)
def test_what_cannot_be_held_is_refused_in_one_line(rule, budget, error, message):
    with pytest.raises(error, match=message) as told:
        rules.Budgeted(rule, budget)
    assert "\n" not in str(told.value)
