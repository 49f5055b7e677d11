"""What rules and policies make of single positions, against numbers counted one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drafting, rules, sampling
from specjax.study.expect import Laws, draft_lengths, positions
from tests.tables import RULES, random_distributions

VOCAB, WIDTH = 7, 6


@pytest.fixture(scope="module")
def laws():
    def made(seed):
        probs = random_distributions(seed, 2 * WIDTH, VOCAB).reshape(2, WIDTH, VOCAB)
        plain = random_distributions(seed + 7, 2 * WIDTH, VOCAB).reshape(2, WIDTH, VOCAB)
        hidden = np.random.default_rng(seed).standard_normal((2, WIDTH, 4)).astype(np.float32)
        return Laws(*map(jnp.asarray, (probs, plain, hidden)))

    return made(1), made(2)


@pytest.fixture(scope="module")
def texts():
    return np.random.default_rng(0).integers(VOCAB, size=(2, WIDTH)).astype(np.int32)


def flat(laws):
    """At all positions, row by row."""
    return [Laws(*(x.reshape(-1, x.shape[-1]) for x in one)) for one in laws]


@pytest.mark.parametrize("name", RULES)
def test_figures_are_those_of_the_target(laws, texts, name):
    rule = RULES[name]
    drafter, verifier = flat(laws)
    found = positions(rule, drafter, verifier, texts.ravel(), jax.random.key(0), samples=3)
    q, p = np.asarray(drafter.probs), np.asarray(verifier.probs)
    q_conf, p_conf = drafter.confidences, verifier.confidences
    pi = np.asarray(jax.vmap(rule)(q, p, q_conf, p_conf), np.float64)

    np.testing.assert_allclose(found.acceptance, np.minimum(q, pi).sum(-1), atol=1e-6)
    logs = np.log(np.where(pi > 0, pi, 1.0) / p)
    np.testing.assert_allclose(found.nats, (pi * logs).sum(-1), atol=2e-6)
    assert not np.any(found.impossible)
    # Each ratio is that of some token that the rule may emit.
    for row, drawn in enumerate(np.asarray(found.ratios).T):
        known = (pi[row] / q[row])[pi[row] > 0]
        assert all(np.isclose(known, ratio, rtol=1e-5).any() for ratio in drawn)


@pytest.mark.parametrize("name", ["TokenV1", "TokenV3", "Lossy", "Mentored"])
def test_coupled_tokens_follow_the_target(laws, name):
    """Texts drawn from p: the tokens that are coupled to them have the law pi."""
    rule, count = RULES[name], 40_000
    every = [x for one in flat(laws) for x in one[:2]]
    pi = np.asarray(jax.vmap(rule)(every[0], every[2], every[1], every[3]))
    stands = np.minimum(1.0, every[0] / np.maximum(pi, 1e-20))
    want, plain = (pi * stands).sum(-1), (every[2] * stands).sum(-1)
    at = int(np.argmax(np.abs(want - plain)))
    assert abs(want[at] - plain[at]) > 0.03  # of tokens that would follow p
    here = [
        Laws(*(jnp.broadcast_to(x[at], (count, VOCAB)) for x in every[i : i + 2]), jnp.zeros(()))
        for i in (0, 2)
    ]
    keys = jax.random.split(jax.random.key(3))
    uniforms = jax.random.uniform(keys[0], (count, sampling.draws.num_uniforms(VOCAB)))
    drawn = jax.vmap(sampling.draws.draw, in_axes=(None, 0))(every[2][at], uniforms)
    seen = jnp.minimum(1.0, 1.0 / positions(rule, *here, drawn, keys[1], samples=1).ratios)
    assert abs(float(seen.mean()) - want[at]) < 4.5 * max(float(seen.std()), 1e-4) / count**0.5


def test_what_the_verifier_cannot_draw_is_told_apart(laws, texts):
    drafter, verifier = flat(laws)
    p = verifier.probs.at[:, 2].set(0.0)
    verifier = verifier._replace(probs=p / p.sum(-1, keepdims=True))
    key = jax.random.key(0)
    lenient = positions(rules.OPT(np.inf), drafter, verifier, texts.ravel(), key, samples=1)
    np.testing.assert_allclose(lenient.impossible, drafter.probs[:, 2], rtol=1e-6)
    assert np.isfinite(lenient.nats).all()


def lengths_by_hand(texts, going, longest, least=0):
    """Of drafts that begin at each position; past the end the last position goes on.

    `going` tells from the row and the positions drafted so far whether a draft goes on.
    """
    rows, width = texts.shape
    found = np.zeros((rows, width), int)
    for b in range(rows):
        for t in range(width):
            places = []
            while len(places) < longest and (len(places) < max(least, 1) or going(b, places)):
                places.append(min(t + len(places), width - 1))
            found[b, t] = len(places)
    return found


class Head(drafting.Estimate):
    """Judges the token before: the first token of a draft by the state of its second step."""

    lag = 1

    def feature(self, params, carry, drawn):
        return drawn.hidden[:, 0] * 3.0, carry


def by_confidence(threshold):
    return lambda sure, _: lambda b, places: sure[b, places[-1]] >= threshold


def by_survival(sure, _):
    return lambda b, places: 1 - np.prod(sure[b, places]) <= 0.5


def by_head(_, hidden):
    chances = 1.0 / (1.0 + np.exp(-3.0 * hidden[..., 0]))
    return lambda b, places: 1 - np.prod(chances[b, places[1:]]) <= 0.6


@pytest.mark.parametrize("least", [0, 2])
@pytest.mark.parametrize(
    ("policy", "going"),
    [
        *((drafting.Confidence(x), by_confidence(x)) for x in (0.0, 0.4, 0.6, 1.0)),
        (drafting.Survival(drafting.ConfidenceEstimate(), 0.5), by_survival),
        (drafting.Survival(Head(), 0.6), by_head),
    ],
)
def test_drafts_end_as_the_policy_says(laws, texts, policy, going, least):
    static, params = policy.bind()
    found = draft_lengths(static, params, laws[0], jnp.asarray(texts), longest=4, least=least)
    sure, hidden = np.asarray(laws[0].confidences).max(-1), np.asarray(laws[0].hidden)
    np.testing.assert_array_equal(found, lengths_by_hand(texts, going(sure, hidden), 4, least))
