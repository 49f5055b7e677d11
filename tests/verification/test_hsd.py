"""Hierarchical speculative decoding as published is biased; when it is mended, it is `Block`.

Source: HSD (arXiv 2601.05724) and its published code.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np

from specjax import verification
from specjax.types import ScoredBlock
from tests.models.tiny import quick_jit

V, L = 3, 3


def stops(ratios, q, p, *, capped):
    """The probability to keep i tokens of a drafted block, and the next token's law there.

    Args:
      ratios: `[L]` p(x_i) / q(x_i) of the drafted tokens.
      q: `[L, V]`, the drafter's distributions.
      p: `[L + 1, V]`, the verifier's.
      capped: whether the last test is capped like the others, by which HSD becomes exact.
    """
    joint = np.concatenate([[1.0], np.cumprod(ratios)])
    share = joint / np.maximum.accumulate(joint)
    left, kept = 1.0, np.zeros(L + 1)
    rest = np.maximum(share[:L, None] * p[:L] - q, 0.0)
    for i in range(L, -1, -1):
        if i == L:
            chance = share[L] if capped else min(1.0, joint[L])
        else:
            missing = np.maximum(q[i] - share[i] * p[i], 0.0).sum()
            chance = 1.0 if missing == 0.0 else min(1.0, rest[i].sum() / missing)
        kept[i] = left * chance
        left -= kept[i]
    weights = np.concatenate([rest, p[L:]])
    sums = weights.sum(axis=1, keepdims=True)
    return kept, np.where(sums > 0, weights / np.where(sums > 0, sums, 1.0), 0.0), share


def law(q, p, capped):
    """The law of the first L + 1 tokens, `[V] * (L + 1)`, and the mean number that is kept.

    Args:
      q: drafted tokens -> `[V]`, for all shorter than L.
      p: likewise the verifier's, for all of at most L.
      capped: see `stops`.
    """
    found, mean = np.zeros((V,) * (L + 1)), 0.0
    for block in itertools.product(range(V), repeat=L):
        before = [block[:i] for i in range(L + 1)]
        qs, ps = np.array([q[x] for x in before[:L]]), np.array([p[x] for x in before])
        each = np.arange(L), block
        kept, after, _ = stops(ps[each] / qs[each], qs, ps, capped=capped)
        weight = qs[each].prod()
        mean += weight * (kept * np.arange(L + 1)).sum()
        for i in range(L + 1):
            # The verifier draws the tokens after the residual's.
            for ending in itertools.product(range(V), repeat=L + 1 - i):
                text, chance = (*block[:i], *ending), weight * kept[i] * after[i][ending[0]]
                for j in range(i + 1, L + 1):
                    chance *= p[text[:j]][text[j]]
                found[text] += chance
    return found, mean


def pair(seed):
    rng = np.random.default_rng(seed)
    texts = [x for n in range(L + 1) for x in itertools.product(range(V), repeat=n)]
    return ({x: rng.dirichlet(np.ones(V)) for x in texts} for _ in range(2))


def target(p):
    found = np.ones((V,) * (L + 1))
    for text in np.ndindex(found.shape):
        found[text] = np.prod([p[text[:i]][text[i]] for i in range(L + 1)])
    return found


def test_as_published_it_has_another_law():
    far, leads = [], []
    for seed in range(10):
        q, p = pair(seed)
        published, accepted = law(q, p, capped=False)
        mended, fewer = law(q, p, capped=True)
        far.append(0.5 * np.abs(published - target(p)).sum())
        leads.append(accepted - fewer)
        np.testing.assert_allclose(mended, target(p), atol=1e-12)
    # So its lead in accepted tokens is its bias.
    assert np.mean(far) > 0.02 and max(far) > 0.05
    assert min(leads) >= 0.0 and np.mean(leads) > 0.02


def test_mended_it_is_block_verification():
    blocks = np.array(list(itertools.product(range(V), repeat=L)), np.int32)

    @quick_jit
    @functools.partial(jax.vmap, in_axes=(0, None, None))
    def judged(tokens, q, p):
        found = verification.Block().acceptance(ScoredBlock(tokens, q, p, jnp.int32(L)))
        return found.scales, verification.num_accepted_probs(verification.Block(), found.thresholds)

    for seed in range(5):
        rng = np.random.default_rng(seed)
        q, p = rng.dirichlet(np.ones(V), L), rng.dirichlet(np.ones(V), L + 1)
        drafted = np.concatenate([q, q[:1]]).astype(np.float32)
        scales, probs = judged(blocks, drafted, p.astype(np.float32))
        for i, block in enumerate(blocks):
            each = np.arange(L), block
            kept, _, share = stops(p[each] / q[each], q, p, capped=True)
            np.testing.assert_allclose(scales[i], share, atol=1e-6)
            np.testing.assert_allclose(probs[i], kept, atol=1e-6)
