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


def test_a_lossless_text_is_its_own(laws, texts):
    found = positions(rules.Lossless(), *flat(laws), texts.ravel(), jax.random.key(0), samples=2)
    at = texts.reshape(-1, 1)
    q, p = (np.take_along_axis(np.asarray(x.probs), at, 1)[:, 0] for x in flat(laws))
    np.testing.assert_allclose(found.ratios, (p / q)[None], rtol=1e-6)


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


def lengths_by_hand(stops, longest):
    """Of drafts that begin at each position; past the end the last position goes on."""
    rows, width = stops.shape
    found = np.zeros((rows, width), int)
    for b in range(rows):
        for t in range(width):
            length = 0
            while length < longest:
                length += 1
                if stops[b, min(t + length - 1, width - 1)]:
                    break
            found[b, t] = length
    return found


@pytest.mark.parametrize("threshold", [0.0, 0.4, 0.6, 1.0])
def test_drafts_end_by_confidence(laws, texts, threshold):
    policy, params = drafting.Confidence(threshold).bind()
    found = draft_lengths(policy, params, laws[0], jnp.asarray(texts), longest=4)
    stops = np.asarray(laws[0].confidences).max(-1) < threshold
    np.testing.assert_array_equal(found, lengths_by_hand(stops, 4))


def test_no_policy_ends_a_draft_before_the_fewest_tokens(laws, texts):
    policy, params = drafting.Confidence(0.4).bind()
    found = draft_lengths(policy, params, laws[0], jnp.asarray(texts), longest=4, least=2)
    free = draft_lengths(policy, params, laws[0], jnp.asarray(texts), longest=4)
    assert found.min() == 2 and free.min() == 1
    stops = np.asarray(laws[0].confidences).max(-1) < 0.4
    for b, t in zip(*np.nonzero(np.asarray(free) == 1), strict=True):
        own = [stops[b, min(t + i, WIDTH - 1)] for i in range(1, 4)]
        assert found[b, t] == (2 + own.index(True) if True in own else 4)


def test_drafts_end_by_a_product_of_chances(laws, texts):
    policy, params = drafting.Survival(drafting.ConfidenceEstimate(), 0.5).bind()
    found = draft_lengths(policy, params, laws[0], jnp.asarray(texts), longest=4)
    sure = np.asarray(laws[0].confidences).max(-1)
    for b in range(2):
        for t in range(WIDTH - 4):
            alive, length = 1.0, 0
            while length < 4 and 1 - alive <= 0.5:
                alive *= sure[b, t + length]
                length += 1
            assert found[b, t] == length
    assert len(np.unique(found)) > 2


def test_a_head_judges_the_token_before(laws, texts):
    """The first token of a draft is judged by the hidden state of its second step."""
    hidden = laws[0].hidden

    class Head(drafting.Estimate):
        lag = 1

        def feature(self, params, carry, drawn):
            return drawn.hidden[:, 0] * 3.0, carry

    policy, params = drafting.Survival(Head(), 0.6).bind()
    found = draft_lengths(policy, params, laws[0], jnp.asarray(texts), longest=4)
    chance = 1.0 / (1.0 + np.exp(-3.0 * np.asarray(hidden)[..., 0]))
    for b in range(2):
        for t in range(WIDTH - 4):
            alive, length = 1.0, 1
            while length < 4 and 1 - alive <= 0.6:
                alive *= chance[b, t + length]
                length += 1
                if 1 - alive > 0.6:
                    break
            assert found[b, t] == length
