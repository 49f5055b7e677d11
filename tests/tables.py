"""One table of every rule and verification: the same tests run over all of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from specjax import rules, testing, verification
from specjax.sampling import distributions
from specjax.types import Sampling

RULES = {
    "Lossless": rules.Lossless(),
    "Chow": rules.Chow(0.4),
    "ChowLog": rules.ChowLog(0.6),
    "Diff": rules.Diff(0.05),
    "DiffLog": rules.DiffLog(0.05),
    "OPT": rules.OPT(0.2),
    "OPTLog": rules.OPTLog(0.2),
    "TokenV1": rules.TokenV1(0.3),
    "TokenV2": rules.TokenV2(0.3),
    "TokenV3": rules.TokenV3(0.5),
    "TokenV2TopK": rules.TokenV2(0.3, top_k=2),
    "TokenV3Residual": rules.TokenV3(0.5, replacement="residual"),
    "Typical": rules.Typical(0.3, 0.6),
    "TypicalArgmax": rules.Typical(0.3, 0.6, replacement="argmax"),
    "BiLD": rules.BiLD(1.0),
    "Lossy": rules.Lossy(0.4),
    "LossyBeta": rules.Lossy(0.5, 0.7),
    "LossyTuned": rules.LossyTuned(0.4),
    "Mentored": rules.Mentored(0.05),
    "KLBall": rules.KLBall(0.05),
    "KLPrice": rules.KLPrice(1.0),
    "Mixture": rules.Mixture(0.7),
    "AcceptThreshold": rules.AcceptThreshold(0.7, 0.8),
    "Cactus": rules.Cactus(0.1),
}
VERIFICATIONS = {
    "Token": verification.Token(),
    "Block": verification.Block(),
    "GreedyBlock": verification.GreedyBlock(),
}


@functools.cache
def prefix_tables(vocab, num_tokens, *, temperature=0.8, zeros=0.0, seed=0, prompt=(0, 1)):
    """q, p and their confidences after every prefix of a pair of context-dependent models."""
    model = testing.TabularModel(vocab, 2)
    plain = Sampling(temperature)
    out = []
    for which in (0, 1):
        table = testing.random_table(10 * seed + which, vocab, 2, scale=1.5, zeros=zeros)
        for to_probs in (
            lambda x: distributions.distribution(x, plain),
            distributions.confidence,
        ):
            out.append(
                testing.prefix_distributions(
                    model, jnp.asarray(table), prompt, num_tokens, to_probs
                )
            )
    q, q_conf, p, p_conf = out
    return q, p, q_conf, p_conf


@functools.cache
def _apply():
    return jax.jit(lambda rule, *args: jax.vmap(rule)(*args))


def targets(rule, tables):
    """pi after every prefix."""
    return np.asarray(_apply()(rule, *tables))


def p_value(seen, law, draws):
    """Of a chi-square test of counts against a law; outcomes that are rare are taken together."""
    assert all(law.get(outcome, 0.0) > 0.0 for outcome in seen)
    common = [outcome for outcome, chance in law.items() if chance * draws >= 5]
    observed = np.array([seen.get(outcome, 0) for outcome in common] + [0.0])
    expected = np.array([law[outcome] * draws for outcome in common] + [0.0])
    observed[-1], expected[-1] = draws - observed.sum(), draws - expected.sum()
    if expected[-1] >= 5:
        return stats.chisquare(observed, expected, sum_check=False).pvalue
    # Too rare for that test: how probable are so many?
    rare = stats.binom.sf(observed[-1] - 1, draws, max(expected[-1], 0.0) / draws)
    observed, expected = observed[:-1], expected[:-1]
    if len(expected) == 1:
        return rare  # the law is certain
    expected *= observed.sum() / expected.sum()
    both = rare, stats.chisquare(observed, expected, sum_check=False).pvalue
    return min(1.0, 2.0 * min(both))


def random_distributions(seed, count, vocab, zeros=0.0):
    """`[count, V]` float32, of varied sharpness, some entries zero."""
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((count, vocab)) * rng.choice([0.3, 1.5, 4.0], (count, 1))
    logits[rng.random((count, vocab)) < zeros] = -np.inf
    logits[np.arange(count), rng.integers(vocab, size=count)] = 1.0
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    return (weights / weights.sum(axis=1, keepdims=True)).astype(np.float32)
