"""Rules: valid distributions, their lemmas, their limits, and their shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import rules, sampling
from specjax.rules.lossy import inverse_beta
from specjax.types import Sampling, ScoredBlock
from tests.rules.exact import apply, exact_tuned, pairs
from tests.tables import RULES, random_distributions
from tests.variants import variants

INF = float("inf")
# Their pi has no token that p cannot draw.
NEVER_IMPOSSIBLE = [
    *("Lossy", "LossyTuned", "Mentored", "KLBall", "KLPrice"),
    *("AcceptThreshold", "Cactus"),
    *("Typical", "TypicalArgmax"),
]


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
@pytest.mark.parametrize("vocab", variants([1, 2, 3, 40], 1, 40))
def test_target_is_a_distribution_on_the_support(rule, vocab):
    q, p = pairs(vocab)
    pi = apply(rule, q, p)
    assert pi.dtype == np.float32 and np.isfinite(pi).all() and (pi >= 0).all()
    np.testing.assert_allclose(pi.sum(axis=1), 1.0, atol=2e-6)
    assert (pi[(q == 0) & (p == 0)] == 0).all()


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_rejection_probability_is_total_variation(rule):
    # Through token verification's own acceptance probabilities, averaged over the draft token.
    from specjax.verification import token_acceptance_probs

    q, p = pairs(6)
    pi = apply(rule, q, p)
    tokens = jnp.arange(6)

    def accepted(q, pi):
        def one(token):
            two_q, two_pi = jnp.stack([q, q]), jnp.stack([pi, pi])
            block = ScoredBlock(token[None], two_q, two_pi, jnp.int32(1))
            return token_acceptance_probs(*block[:4])[0]

        return jnp.sum(q * jax.vmap(one)(tokens))

    got = 1.0 - np.asarray(jax.vmap(accepted)(q, jnp.asarray(pi)))
    np.testing.assert_allclose(got, np.maximum(pi - q, 0).sum(axis=1), atol=1e-5)
    want = 1.0 - np.asarray(jax.vmap(rules.accept_probability)(q, pi))
    np.testing.assert_allclose(got, want, atol=1e-5)


def np_entropy(x):
    return -np.sum(np.where(x > 0, x * np.log(np.where(x > 0, x, 1)), 0), axis=1)


def test_deferral_decisions_follow_their_equations():
    q, p = pairs(8)
    q_conf, p_conf = random_distributions(2, 60, 8), random_distributions(3, 60, 8)
    mq, mp = q_conf.max(1), p_conf.max(1)
    hq, hp = np_entropy(q_conf), np_entropy(p_conf)
    tv = np.maximum(p - q, 0).sum(1)
    cross = -np.sum(q * np.log(p_conf), axis=1)
    cases = {
        rules.Lossless(): np.ones(60, bool),
        rules.Chow(0.4): mq < 0.6,
        rules.ChowLog(1.0): hq > 1.0,
        rules.Diff(0.1): mq < mp - 0.1,
        rules.Diff(-0.1): mq < mp + 0.1,
        rules.DiffLog(0.1): hp < hq - 0.1,
        rules.OPT(0.5): mq < mp - 0.5 * tv,
        rules.OPTLog(0.5): hp < hq - 0.5 * tv,
        rules.BiLD(2.0): cross > 2.0,
    }
    for rule, defers in cases.items():
        got = apply(rule, q, p, q_conf, p_conf)
        np.testing.assert_array_equal(got, np.where(defers[:, None], p, q), err_msg=repr(rule))
    assert all(d.sum() > 0 for d in cases.values())


def test_token_rules_follow_their_equations():
    q, p = pairs(8)
    q_conf, p_conf = random_distributions(2, 60, 8), random_distributions(3, 60, 8)
    top = p_conf.max(1, keepdims=True)
    cases = {
        rules.TokenV1(0.3): q_conf < top - 0.3,
        rules.TokenV2(0.3): p_conf < top - 0.3,
        rules.TokenV3(0.6): p_conf < 0.4 * top,
    }
    for rule, r in cases.items():
        want = q * ~r + p * (r * q).sum(1, keepdims=True)
        np.testing.assert_allclose(apply(rule, q, p, q_conf, p_conf), want, atol=1e-6)


def test_ties_keep_the_drafter():
    half = np.full((1, 2), 0.5, np.float32)
    p = np.array([[0.75, 0.25]], np.float32)
    np.testing.assert_array_equal(apply(rules.Chow(0.5), half, p), half)
    np.testing.assert_array_equal(apply(rules.Diff(0.25), half, p), half)
    np.testing.assert_array_equal(apply(rules.TokenV2(0.5), half, p), half)
    np.testing.assert_array_equal(apply(rules.TokenV2(0.0), half, half), half)


def test_opt_is_diff_at_temperature_zero():
    # Lemma 8: with one-hot q, p the penalty is strength where the argmaxes differ, and 0 where they
    # agree, when both choices draw the same token.
    logits = np.random.default_rng(0).standard_normal((2, 500, 9)).astype(np.float32)
    greedy, plain = Sampling(0.0), Sampling()
    q, p = (jax.vmap(lambda x: sampling.distributions.distribution(x, greedy))(x) for x in logits)
    q_conf, p_conf = (
        jax.vmap(lambda x: sampling.distributions.distribution(x, plain))(x) for x in logits
    )
    for strength in (0.0, 0.05, 0.3):
        for opt, diff in ((rules.OPT, rules.Diff), (rules.OPTLog, rules.DiffLog)):
            got = apply(opt(strength), q, p, q_conf, p_conf)
            np.testing.assert_array_equal(got, apply(diff(strength), q, p, q_conf, p_conf))
    # If the confidences came from the one-hot q, p, neither rule would ever defer.
    assert (apply(rules.Diff(0.05), q, p) == np.asarray(q)).all()
    assert (apply(rules.Diff(0.05), q, p, q_conf, p_conf) != np.asarray(q)).any()


@pytest.mark.parametrize("name", NEVER_IMPOSSIBLE)
def test_lossy_rules_are_lossless_at_temperature_zero(name):
    q = np.eye(5, dtype=np.float32)[[0, 1, 2, 2]]
    p = np.eye(5, dtype=np.float32)[[0, 3, 2, 4]]
    np.testing.assert_array_equal(apply(RULES[name], q, p), p)


@pytest.mark.parametrize("name", NEVER_IMPOSSIBLE)
def test_these_rules_emit_nothing_that_the_verifier_cannot(name):
    q, p = pairs(6)
    assert (apply(RULES[name], q, p)[p == 0.0] == 0.0).all()
    # The control: a mixture does, whatever its weight, with the drafter's share of it.
    impossible = apply(rules.Mixture(0.7), q, p)[p == 0.0]
    assert impossible.max() > 0.0
    np.testing.assert_allclose(impossible, 0.3 * q[p == 0.0], atol=1e-7)


@pytest.mark.parametrize(
    ("rule", "which"),
    [
        (rules.Diff(INF), "q"),
        (rules.OPT(INF), "q"),
        (rules.TokenV1(INF), "q"),
        (rules.TokenV2(INF), "q"),
        (rules.TokenV3(INF), "q"),
        (rules.TokenV3(1.0), "q"),
        (rules.Diff(1.0), "q"),
        (rules.Chow(1.0), "q"),
        (rules.ChowLog(INF), "q"),
        (rules.BiLD(INF), "q"),
        (rules.Mentored(INF), "q"),
        (rules.KLBall(INF), "q"),
        (rules.Mixture(0.0), "q"),
        (rules.AcceptThreshold(0.0), "q"),
        (rules.TokenV2(INF, top_k=8), "q"),
        (rules.Diff(-INF), "p"),
        (rules.OPT(-INF), "p"),
        (rules.TokenV1(-INF), "p"),
        (rules.TokenV2(-INF), "p"),
        (rules.TokenV3(-INF), "p"),
        (rules.Lossless(), "p"),
        (rules.Lossy(0.0), "p"),
        (rules.LossyTuned(0.0), "p"),
        (rules.Mentored(0.0), "p"),
        (rules.KLBall(0.0), "p"),
        (rules.KLPrice(0.0), "p"),
        (rules.Mixture(1.0), "p"),
        (rules.AcceptThreshold(), "p"),
        (rules.Cactus(0.0), "p"),
    ],
    ids=repr,
)
def test_strengths_at_the_ends_of_their_ranges(rule, which):
    q, p = pairs(8)
    want = {"q": q, "p": p}[which]
    np.testing.assert_allclose(apply(rule, q, p), want, atol=3e-6)


@pytest.mark.parametrize("strength", [0.0, 0.01, 0.3, 0.9, 0.9999])
@pytest.mark.parametrize("vocab", [2, 5, 300])
def test_lossy_tuned_solves_for_beta(strength, vocab):
    q, p = pairs(vocab)
    keep = np.float32(1.0) - np.float32(strength)
    np.testing.assert_allclose(
        apply(rules.LossyTuned(strength), q, p), exact_tuned(q, p, np.float64(keep)), atol=1e-6
    )
    b = np.asarray(jax.vmap(lambda q, p: inverse_beta(q, p, jnp.float32(keep)))(q, p))
    with np.errstate(divide="ignore", invalid="ignore"):
        largest = np.nanmax(np.where(p > 0, p / q, -np.inf), axis=1)
    solved = b > 0
    assert (1 / b[solved] >= 1 - 1e-6).all() and (
        1 / b[solved] <= largest[solved] * (1 + 1e-5)
    ).all()


def test_a_rule_takes_one_position():
    q, p = jnp.ones((4,)) / 4, jnp.ones((5,)) / 5
    wrong = [
        (rules.OPT(0.1), (q, p, q, q)),
        (rules.Chow(0.1), (q, q)),
        (rules.Lossless(), (q, q.astype(jnp.bfloat16))),
        (rules.Lossless(), (jnp.ones((2, 4)), jnp.ones((2, 4)))),
        *((kind([0.1] * 4), (q, q, q, q)) for kind in (rules.Chow, rules.TokenV3, rules.Mentored)),
    ]
    for rule, given in wrong:
        with pytest.raises((AssertionError, TypeError)):  # the latter from the annotations
            rule(*given)


@pytest.mark.parametrize("strength", np.arange(0, 100) / 100)
def test_the_smallest_beta_is_allowed(strength):
    assert rules.Lossy(strength, 1 - strength).beta >= np.float32(1) - np.float32(strength)


def test_strengths_of_different_rows_are_refused():
    with pytest.raises(ValueError, match="strength .* and beta .* the same number of rows"):
        rules.Lossy([0.1, 0.2], [1.0, 1.0, 1.0])


class Unsaid:
    def __call__(self, q, p, q_conf=None, p_conf=None):
        return p


class HalfSaid(Unsaid):
    reads_draft = True
    reads_draft_confidence = False


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Unsaid(), "Unsaid has no reads_draft, reads_draft_confidence, reads_verifier_confidence"),
        (HalfSaid(), "HalfSaid has no reads_verifier_confidence: set"),
        (3, r"rule must be like rules.OPT\(strength=0.2\), got 3"),
        (rules.OPT, "rule must be an instance, got the class OPT"),
    ],
)
def test_what_a_rule_lacks_is_named(rule, message):
    with pytest.raises(ValueError, match=message):
        rules.check_rule(rule)
    with pytest.raises(ValueError, match=message):
        rules.Budgeted(rule, 0.1)
