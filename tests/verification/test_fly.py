"""FLy, which is not exact: its law, its refusals, and what results say of it."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import decoding, drafting, rules, testing, verification
from specjax.decoding import guards
from tests.tables import RULES, p_value, prefix_tables, random_distributions, targets

GIVEN = {"allow_inexact": True}


def by_hand(tokens, q, p, threshold, window):
    """The law of the number of accepted tokens, pattern by pattern."""
    size = len(tokens)
    own = [min(1.0, p[i, x] / q[i, x]) for i, x in enumerate(tokens)]
    law = np.zeros(size + 1)
    for passes in itertools.product((False, True), repeat=size):
        chance = np.prod([a if ok else 1 - a for a, ok in zip(own, passes, strict=True)])
        accepted = 0
        for i, x in enumerate(tokens):
            top = np.sort(p[i])[-3:] / np.sort(p[i])[-3:].sum()
            unsure = -(top[top > 0] * np.log(top[top > 0])).sum() >= threshold
            fits = i + window < size and all(passes[i + 1 : i + 1 + window])
            if not (passes[i] or (unsure and fits and p[i, x] > 0)):
                break
            accepted += 1
        law[accepted] += chance
    return law


@pytest.mark.parametrize(("threshold", "window"), [(0.3, 1), (0.7, 2), (0.0, 3)])
def test_the_number_of_accepted_tokens(threshold, window):
    fly = verification.FLy(threshold, window, **GIVEN)
    for seed in range(5):
        q, p = (random_distributions(2 * seed + k, 5, 5, zeros=0.2) for k in (0, 1))
        tokens = np.array([np.argmax(row) for row in q[:4]], np.int32)
        found = fly.acceptance(tokens, q, p, jnp.int32(4))
        got = verification.num_accepted_probs(fly, found.thresholds, found.detail)
        np.testing.assert_allclose(got, by_hand(tokens, q, p, threshold, window), atol=1e-6)


def test_draws_follow_this_law():
    fly, draws = verification.FLy(0.3, 1, **GIVEN), 20_000
    q, p = (np.tile(np.array(x, np.float32), (4, 1)) for x in ([0.5, 0.3, 0.2], [0.3, 0.3, 0.4]))
    tokens = np.zeros(3, np.int32)

    def one(key):
        return verification.verify(fly, key, tokens, q, p, jnp.int32(3)).num_accepted

    counts = np.asarray(jax.jit(jax.vmap(one))(jax.random.split(jax.random.key(0), draws)))
    seen = {n: int(count) for n, count in enumerate(np.bincount(counts)) if count}
    for threshold, holds in ((0.3, True), (9.0, False)):  # the control is token verification
        law = dict(enumerate(by_hand(tokens, q, p, threshold, 1)))
        assert (p_value(seen, law, draws) > 1e-5) == holds


def distance(algorithm, zeros=0.0):
    tables = prefix_tables(3, 6, zeros=zeros)
    pi = targets(RULES["Lossless"], tables)
    law = testing.emitted_law(algorithm, tables[0], pi, 3, 3)
    target = testing.target_law(pi, 3)
    assert law.sum() == pytest.approx(1.0, abs=1e-5)
    # It emits nothing that the verifier cannot.
    assert law[target == 0.0].sum() < 1e-7
    return testing.total_variation(law, target)


def test_its_law_is_not_the_verifiers():
    assert distance(verification.FLy(0.3, 1, **GIVEN)) > 0.05
    assert distance(verification.FLy(0.3, 1, **GIVEN), zeros=0.3) > 0.01
    # Where the verifier is never unsure enough, it is token verification.
    assert distance(verification.FLy(2.0, 1, **GIVEN)) < 1e-6


def test_it_must_be_allowed():
    with pytest.raises(ValueError, match="FLy does not emit the target .* allow_inexact=True"):
        verification.FLy(0.3, 1)
    with pytest.raises(ValueError, match="window must be a whole number of at least 1, got 0"):
        verification.FLy(0.3, 0, **GIVEN)
    with pytest.raises(ValueError, match="threshold must be at least 0"):
        verification.FLy(-0.3, 1, **GIVEN)
    with pytest.raises(ValueError, match="verification must be one of Token"):
        specjax.Setting(verification="FLy(0.3, 1, allow_inexact=True)")
    fly = verification.FLy(0.3, 1, **GIVEN)
    with pytest.raises(ValueError, match="needs `detail` from its acceptance"):
        verification.num_accepted_probs(fly, jnp.ones((2,)))
    model = testing.TabularModel(3, 2)
    with pytest.raises(ValueError, match="FLy is not exact in an inner round of a cascade"):
        guards.check_parts(model, drafting.NeuralDrafter(model, 2), fly, nested=True)


def test_the_distance_of_its_texts_is_unknown():
    from tests.decoding.helpers import begin, pair

    model = testing.TabularModel(3, 2)
    params = [jnp.asarray(testing.random_table(seed, 3, 2)) for seed in (1, 2)]
    seen = {}
    for name, algorithm in (
        ("fly", verification.FLy(0.3, 1, **GIVEN)),
        ("token", verification.Token()),
    ):
        loop = decoding.Speculative(model, drafting.NeuralDrafter(model, 3), algorithm)
        state = begin(
            loop,
            pair(*params),
            jnp.zeros((4, 2), jnp.int32),
            jnp.full((4,), 2, jnp.int32),
            seeds=0,
            ids=jnp.arange(4, dtype=jnp.int32),
            limits=jnp.full((4,), 6, jnp.int32),
            max_new=6,
            max_length=16,
        )
        state = loop.run(pair(*params, rules.Lossless()), state, 10)
        assert np.isfinite(state.info.log_p).all()
        seen[name] = np.asarray(state.info.log_target)
    assert np.isnan(seen["fly"]).all() and np.isfinite(seen["token"]).all()
