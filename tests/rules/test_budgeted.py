"""A rule held to a divergence budget: one position. Its law is in tests/decoding/test_budget.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import rules
from specjax.rules.target import kl_divergence
from tests.rules.exact import pairs
from tests.tables import random_distributions

COUNT, VOCAB = 200, 7


@jax.jit
def spend(rule, q, p, credit):
    def one(q, p, credit):
        target = rule.rule(q, p, q, p)
        held, left = rule.spend(target, p, credit)
        return target, held, left, kl_divergence(held, p)

    return jax.vmap(one)(q, p, credit)


@pytest.mark.parametrize(
    "rule", [rules.Diff(0.5), rules.TokenV1(0.9), rules.Lossy(0.8), rules.Mentored(1.0)], ids=repr
)
def test_no_position_pays_more_than_it_has(rule):
    q, p = pairs(VOCAB, COUNT)
    credit = np.geomspace(1e-4, 3.0, COUNT).astype(np.float32)
    target, held, left, cost = map(np.asarray, spend(rules.Budgeted(rule, 0.01), q, p, credit))
    assert np.isfinite(held).all() and (held >= 0.0).all() and (held[p == 0.0] == 0.0).all()
    np.testing.assert_allclose(held.sum(axis=1), 1.0, atol=2e-6)
    safe = np.where(held > 0.0, held, 1.0), np.where(held > 0.0, p, 1.0)
    exact = held * np.log(safe[0] / safe[1])
    np.testing.assert_allclose(cost, exact.sum(axis=1), atol=2e-6)
    np.testing.assert_allclose(left, credit + 0.01 - cost, atol=1e-6)
    assert (left >= -1e-6).all()
    # The control: the rule itself pays more than there is.
    price = np.asarray(jax.vmap(kl_divergence)(target, jnp.asarray(p)))
    assert (price > credit + 0.01).sum() > 20
    # What it can pay in full, it leaves as it is.
    free = np.isclose(target, p, atol=0.0).all(axis=1)
    np.testing.assert_array_equal(held[free], target[free])


def test_the_ends_are_the_verifier_and_the_rule():
    q, p = pairs(VOCAB, COUNT)
    none = np.zeros(COUNT, np.float32)
    target, held, left, _ = spend(rules.Budgeted(rules.Diff(0.3), 0.0), q, p, none)
    assert not np.array_equal(target, p)
    np.testing.assert_allclose(held, p, atol=1e-7)
    np.testing.assert_allclose(left, none, atol=1e-7)
    target, held, left, _ = spend(rules.Budgeted(rules.Diff(0.3), np.inf), q, p, none)
    np.testing.assert_array_equal(held, target)
    assert np.isposinf(left).all()


def test_no_budget_is_lossless_where_differences_are_tiny():
    """At a low temperature a divergence may be above 0 whose chi-square underflows."""
    p, q = (
        jax.nn.softmax(jnp.asarray(logits, jnp.float32) / 0.08)[None]
        for logits in ([8.0, 3.0, 2.5, 2.0], [8.0, 3.1, 2.4, 2.2])
    )
    target, held, left, cost = spend(rules.Budgeted(rules.OPT(0.5), 0.0), q, p, jnp.zeros(1))
    assert float(kl_divergence(target[0], p[0])) > 0.0  # the control: not affordable
    squares = (target - p) ** 2
    assert float(jnp.sum(squares)) == 0.0
    np.testing.assert_array_equal(held, p)
    assert float(left[0]) == float(cost[0]) == 0.0


def test_most_of_a_budget_is_spent():
    q, p = (jnp.asarray(random_distributions(seed, COUNT, VOCAB)) for seed in (0, 1))
    rule = rules.Budgeted(rules.Diff(np.inf), 0.05)

    @jax.jit
    def follow(credit, at):
        # 20 texts of 10 tokens.
        return jax.lax.scan(lambda left, at: jax.vmap(rule.spend)(*at, left)[::-1], credit, at)[0]

    left = follow(jnp.zeros(20), (q.reshape(10, 20, VOCAB), p.reshape(10, 20, VOCAB)))
    wanted = jax.vmap(kl_divergence)(q, p).reshape(10, 20)
    assert float(wanted.mean()) > 0.1  # the control
    assert float(left.max()) < 4 * 0.05 and float(left.mean()) < 2 * 0.05


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
        (rules.OPT, 0.1, ValueError, "rule must be an instance, got the class OPT"),
        (rules.SequenceChow(0.5), 0.1, ValueError, "rule must be like rules.OPT"),
        (rules.OPT(0.5), -0.1, ValueError, "nats_per_token must"),
        (rules.OPT(0.5), "x", ValueError, "nats_per_token must"),
    ],
)
def test_what_cannot_be_held_is_refused_in_one_line(rule, budget, error, message):
    with pytest.raises(error, match=message) as told:
        rules.Budgeted(rule, budget)
    assert "\n" not in str(told.value)
