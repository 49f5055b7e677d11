"""Accept functions of other systems, and the rules that give their laws.

The functions are written down here position by position in float64, apart from the rules.
"""

import jax
import numpy as np
import pytest

from specjax import rules
from tests.rules.exact import apply, divergence, pairs, tuned_at
from tests.tables import RULES
from tests.variants import variants


def norm(weights, fallback):
    return weights / weights.sum() if weights.sum() > 0 else fallback


def ratio(p, q):
    return np.divide(p, q, out=np.full_like(p, np.inf), where=q > 0)


def leftover(q, p):
    """After each rejected token: norm((p - q)_+)."""
    return [norm(np.maximum(p - q, 0), p)] * len(p)


def without(p):
    """After each rejected token: p without that token."""
    return [norm(p * (np.arange(len(p)) != x), p) for x in range(len(p))]


def modes(p):
    return [np.eye(len(p))[p.argmax()]] * len(p)


def exact_match(q, p):
    return p, without(p)


def standard(q, p):
    return np.minimum(1, ratio(p, q)), leftover(q, p)


def lenient(q, p, *, keep, beta=1.0):
    return np.minimum(1, ratio(p, keep * q)), leftover(q, p / beta)


def mixture(q, p, *, weight):
    return np.minimum(1, 1 - weight + weight * ratio(p, q)), leftover(q, p)


def typical(q, p, *, epsilon, alpha, after):
    entropy = -(p[p > 0] * np.log(p[p > 0])).sum()
    return (p > min(epsilon, alpha * np.exp(-entropy))).astype(float), after(p)


def relaxed(q, p, *, k, delta):
    rank = np.argsort(np.argsort(-p, kind="stable"), kind="stable")
    return ((rank < k) & ((rank == 0) | (p >= p.max() - delta))).astype(float), modes(p)


def threshold(q, p, *, single, acc):
    return np.where(p >= single, 1, np.minimum(1, p / acc)), without(p)


def cascade_keep(q, p, *, strength):
    kept = p >= (1 - strength) * p.max()
    return np.where(kept, 1, np.minimum(1, ratio(p, q))), leftover(q, p)


def cactus(q, p, *, delta):
    h = np.minimum(1, p + np.sqrt(2 * delta * p * (1 - p)))
    after = []
    for x in range(len(p)):
        raised = p * (1 - h[x]) / (1 - p[x]) if p[x] < 1 else np.zeros_like(p)
        raised[x] = h[x]
        after.append(norm(np.maximum(raised - q, 0), p))
    return np.minimum(1, ratio(h, q)), after


def repeated(p):
    return [p] * len(p)


# (rule, accept function, its numbers). The confidences of the rules are p and q themselves.
FUNCTIONS = [
    (rules.AcceptThreshold(), exact_match, {}),
    (rules.Lossless(), standard, {}),
    (rules.Lossy(0.3), lenient, {"keep": 0.7}),
    (rules.Lossy(0.4, 0.8), lenient, {"keep": 0.6, "beta": 0.8}),
    (rules.Mixture(0.7), mixture, {"weight": 0.7}),
    (rules.Mixture(0.2), mixture, {"weight": 0.2}),
    (rules.Typical(0.3, 0.6), typical, {"epsilon": 0.3, "alpha": 0.6, "after": repeated}),
    (
        rules.Typical(0.3, 0.09, replacement="argmax"),
        typical,
        {"epsilon": 0.3, "alpha": 0.09, "after": modes},
    ),
    (rules.TokenV2(0.5, top_k=3, replacement="argmax"), relaxed, {"k": 3, "delta": 0.5}),
    (rules.TokenV2(0.2, top_k=2, replacement="argmax"), relaxed, {"k": 2, "delta": 0.2}),
    (rules.AcceptThreshold(0.3, 1.0), threshold, {"single": 0.3, "acc": 1.0}),
    (rules.AcceptThreshold(1.0, 0.5), threshold, {"single": 1.0, "acc": 0.5}),
    (rules.TokenV3(0.7, replacement="residual"), cascade_keep, {"strength": 0.7}),
    (rules.TokenV3(0.2, replacement="residual"), cascade_keep, {"strength": 0.2}),
    (rules.Cactus(0.1), cactus, {"delta": 0.1}),
    (rules.Cactus(1.0), cactus, {"delta": 1.0}),
]
NAMED = [pytest.param(*one, id=f"{one[0]!r}") for one in FUNCTIONS]
VOCABULARIES = variants([2, 3, 4, 5, 6, 8, 12], 5)


def law_of(accept, q, p, numbers):
    """The law of the next token, and the acceptance, of an accept function; float64."""
    q, p = (x.astype(np.float64) / x.sum(dtype=np.float64) for x in (q, p))
    accepted, after = accept(q, p, **numbers)
    kept = np.where(q > 0, q * accepted, 0)
    return kept + ((q - kept)[:, None] * np.stack(after)).sum(0), kept.sum()


# 60 pairs each, so 420 in all.
@pytest.mark.parametrize("vocab", VOCABULARIES)
@pytest.mark.parametrize(("rule", "accept", "numbers"), NAMED)
def test_a_rule_is_the_law_of_its_accept_function(rule, accept, numbers, vocab):
    q, p = pairs(vocab)
    found = [law_of(accept, *pair, numbers) for pair in zip(q, p, strict=True)]
    want, own = (np.array(x) for x in zip(*found, strict=True))
    pi = apply(rule, q, p)
    np.testing.assert_allclose(pi, want, atol=3e-6)
    # Verified exactly, the rule accepts at least as much as its own function.
    assert (np.minimum(pi, q).sum(1) >= own - 2e-6).all()


def test_verifying_a_rule_accepts_more_than_its_own_function():
    q, p = pairs(5)
    found = [law_of(exact_match, *pair, {})[1] for pair in zip(q, p, strict=True)]
    assert (np.minimum(apply(rules.AcceptThreshold(), q, p), q).sum(1) - found).max() > 0.3


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_no_rule_has_fewer_nats_than_lossy_tuned_at_its_acceptance(vocab):
    q, p = pairs(vocab)
    above = 0
    for rule in {**RULES, **{repr(rule): rule for rule, *_ in FUNCTIONS}}.values():
        pi = apply(rule, q, p)
        nats = divergence(pi, p)
        tuned, accepted = tuned_at(np.minimum(pi, q).sum(1), q, p)
        # Where a rule accepts more than any tuned target can, it emits impossible tokens.
        beyond = np.minimum(pi, q).sum(1) > accepted + 1e-5
        assert np.isinf(nats[beyond]).all(), rule
        saved = (nats - divergence(tuned, p))[~beyond]
        assert (saved > -2e-5).all(), (rule, saved.min())
        above += (saved > 1e-2).sum()
    assert above > 100  # most rules are above it


def test_no_rule_has_a_smaller_mean_divergence_than_a_price_at_its_mean_acceptance():
    q, p = pairs(5)
    found = [apply(rules.KLPrice(float(price)), q, p) for price in np.geomspace(1e-3, 12, 60)]
    accepted = np.array([np.minimum(pi, q).sum(1).mean() for pi in found])
    nats = np.array([divergence(pi, p).mean() for pi in found])
    assert (np.diff(accepted) > -1e-6).all() and (np.diff(nats) > -1e-6).all()
    # The tangents of the frontier, by the price, bound every rule from below.
    prices, above = np.geomspace(1e-3, 12, 60), 0
    for rule in {**RULES, **{repr(rule): rule for rule, *_ in FUNCTIONS}}.values():
        pi = apply(rule, q, p)
        more = np.minimum(pi, q).sum(1).mean() - accepted
        bill = divergence(pi, p).mean() - nats - prices * more
        assert (bill > -1e-4).all(), rule
        above += (bill > 1e-3).all()
    assert above > 15
    # Equal strengths at all positions are not on it.
    tuned = apply(rules.LossyTuned(0.5), q, p)
    at = np.interp(np.minimum(tuned, q).sum(1).mean(), accepted, nats)
    assert divergence(tuned, p).mean() > at + 1e-3


# How the acceptance, and total variation, change as the strength grows: 1 up, -1 down, 0 either.
KNOBS = {
    "Mixture": (rules.Mixture, np.linspace(0, 1, 9), -1, -1),
    "Lossy": (rules.Lossy, np.linspace(0, 0.95, 9), 1, 1),
    "LossyTuned": (rules.LossyTuned, np.linspace(0, 0.95, 9), 1, 1),
    "KLBall": (rules.KLBall, np.geomspace(1e-3, 3, 9), 1, 1),
    "KLPrice": (rules.KLPrice, np.geomspace(1e-2, 5, 9), 1, 1),
    "Cactus": (rules.Cactus, np.geomspace(1e-3, 3, 9), 1, 1),
    "TokenV3Residual": (
        lambda strength: rules.TokenV3(strength, replacement="residual"),
        np.linspace(0, 0.95, 9),
        1,
        1,
    ),
    "Typical": (lambda alpha: rules.Typical(1.0, alpha), np.linspace(0.05, 1, 9), 0, 0),
    "TypicalArgmax": (
        lambda alpha: rules.Typical(1.0, alpha, replacement="argmax"),
        np.linspace(0.05, 1, 9),
        -1,
        0,
    ),
    "AcceptThreshold": (lambda acc: rules.AcceptThreshold(1.0, acc), np.linspace(0.1, 1, 9), 0, 0),
    "Relaxed": (
        lambda delta: rules.TokenV2(delta, top_k=3, replacement="argmax"),
        np.linspace(0.05, 0.9, 9),
        1,
        0,
    ),
    "TokenV3": (rules.TokenV3, np.linspace(0, 0.95, 9), 0, 0),
}


def test_all_accept_functions_are_monotone_in_their_own_acceptance():
    # So for these the rule's, the most that the same law allows, is what is not monotone.
    q, p = pairs(5)
    cases = [
        (typical, [{"epsilon": 1.0, "alpha": x, "after": repeated} for x in KNOBS["Typical"][1]]),
        (threshold, [{"single": 1.0, "acc": x} for x in KNOBS["AcceptThreshold"][1]]),
    ]
    for accept, numbers in cases:
        own = [
            [law_of(accept, *pair, each)[1] for pair in zip(q, p, strict=True)] for each in numbers
        ]
        assert (np.diff(own, axis=0) <= 1e-12).all()


@pytest.mark.parametrize("name", KNOBS)
def test_which_rules_are_monotone_in_their_strength(name):
    make, strengths, more, farther = KNOBS[name]
    q, p = pairs(5)
    found = [apply(make(float(strength)), q, p) for strength in strengths]
    accepted = np.stack([np.minimum(pi, q).sum(1) for pi in found])
    apart = np.stack([np.maximum(pi - p, 0).sum(1) for pi in found])
    for values, sign in ((accepted, more), (apart, farther)):
        steps = np.diff(values, axis=0)
        if sign:
            assert (sign * steps > -3e-6).all() and (sign * steps > 1e-3).any()
        else:  # a smaller strength may change more, or less
            assert (steps > 1e-3).any() and (steps < -1e-3).any()


def test_overshoot_is_bounded_where_it_is_said_to_be():
    q, p = (np.concatenate(x) for x in zip(*(pairs(6, seed=s) for s in range(4)), strict=True))

    def overshoot(rule):
        pi = apply(rule, q, p)
        return np.divide(pi, p, out=np.zeros_like(p), where=p > 0).max(axis=1)

    for rule in (rules.Lossy(0.4), rules.LossyTuned(0.4)):
        assert overshoot(rule).max() <= 1 / 0.6 + 1e-4
    assert 0.9 * np.exp(0.7) < overshoot(rules.KLPrice(0.7)).max() <= np.exp(0.7) * (1 + 1e-5)
    assert (divergence(apply(rules.KLPrice(0.7), q, p), p) <= 0.7).all()
    entropies = np.array([-(x[x > 0] * np.log(x[x > 0])).sum() for x in p])
    bound = 1 + 1 / np.minimum(0.3, 0.6 * np.exp(-entropies))
    assert (overshoot(rules.Typical(0.3, 0.6)) <= bound + 1e-4).all()
    assert overshoot(rules.Mixture(0.7)).max() > 50 and overshoot(rules.Cactus(0.1)).max() > 5


def test_the_divergence_of_cactus_has_no_bound():
    # All tokens are accepted, so the drafter's law is emitted, at log(V h) nats.
    vocab, delta = 10_000, 0.1
    p = np.full((1, vocab), 1 / vocab, np.float32)
    h = 1 / vocab + np.sqrt(2 * delta / vocab * (1 - 1 / vocab))
    few = int(np.ceil(1 / h))
    q = (np.arange(vocab) < few).astype(np.float32)[None] / few
    pi = apply(rules.Cactus(delta), q, p)
    np.testing.assert_allclose(pi, q, atol=1e-6)
    assert divergence(pi, p)[0] == pytest.approx(3.82, abs=0.01)
    assert divergence(apply(rules.KLBall(delta), q, p), p)[0] <= delta


@pytest.mark.parametrize("vocab", variants([1000, 262_144], 1000))
def test_cactus_over_large_vocabularies(vocab):
    # Against the sum over rejected tokens one by one.
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((2, 4, vocab)) * np.array([0.5, 2.0, 4.0, 8.0])[:, None]
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    q, p = (weights / weights.sum(-1, keepdims=True)).astype(np.float32)
    pi = apply(rules.Cactus(0.1), q, p)
    np.testing.assert_allclose(pi.sum(1, dtype=np.float64), 1.0, atol=1e-5)
    for i in range(4):
        one, two = (x[i].astype(np.float64) for x in (q, p))
        h = np.minimum(1, two + np.sqrt(2 * 0.1 * two * (1 - two)))
        want = np.minimum(one, h)
        for x in np.flatnonzero(one > h)[:2000] if vocab > 1000 else np.flatnonzero(one > h):
            residual = np.maximum(two * (1 - h[x]) / (1 - two[x]) - one, 0)
            residual[x] = 0
            want = want + (one[x] - h[x]) * norm(residual, two)
        if (one > h).sum() <= 2000:
            np.testing.assert_allclose(pi[i], want, atol=1e-6)


def test_top_k_takes_the_first_of_equal_tokens():
    p = np.array([[0.2, 0.3, 0.3, 0.2]], np.float32)
    q = np.array([[0.4, 0.1, 0.4, 0.1]], np.float32)
    kept = {1: [1], 2: [1, 2], 3: [0, 1, 2], 9: [0, 1, 2, 3]}
    for k, tokens in kept.items():
        mask = np.isin(np.arange(4), tokens)
        want = q * mask + p * (q * ~mask).sum()
        np.testing.assert_allclose(apply(rules.TokenV2(0.5, top_k=k), q, p), want, atol=1e-7)


def test_an_unknown_replacement_is_named():
    with pytest.raises(ValueError, match="replacement must be one of verifier, residual, argmax"):
        rules.TokenV3(0.5, replacement="between")
    with pytest.raises(ValueError, match="top_k must be a whole number of at least 1, got 0"):
        rules.TokenV2(0.5, top_k=0)


def test_rules_with_fixed_parts_are_other_programs():
    trees = [rules.TokenV2(0.3), rules.TokenV2(0.3, top_k=2), rules.TokenV2(0.4)]
    shapes = [jax.tree.structure(tree) for tree in trees]
    assert shapes[0] == shapes[2] != shapes[1]
