"""Rounds along texts against the exact number, by enumeration of all drafts and outcomes."""

import jax
import numpy as np
import pytest

from specjax import rules
from specjax.study.expect import walk
from tests.benchmarks.tree_rounds import rounds_of
from tests.study.chains import all_texts
from tests.tables import random_distributions

VOCAB, TOKENS, FIRST = 3, 5, 1
RULES = {"Lossless": rules.Lossless(), "TokenV3": rules.TokenV3(0.6), "Lossy": rules.Lossy(0.4)}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize(("longest", "stop"), [(1, None), (3, None), (3, 0)])
def test_rounds_are_exact_for_texts_that_follow_the_rule(name, block, longest, stop):
    q, p = (random_distributions(seed, VOCAB, VOCAB) for seed in (3, 4))
    pi = np.asarray(jax.vmap(RULES[name])(q, p, q, p))
    texts, before, weights = all_texts(np.asarray(pi, np.float64), FIRST, TOKENS)
    lengths = np.full(texts.shape, longest)
    for row, text in enumerate(texts):
        for t in range(TOKENS if stop is not None else 0):
            ends = [i + 1 for i, token in enumerate(text[t : t + longest]) if token == stop]
            lengths[row, t] = min([*ends, longest])
    ratios = (pi[before, texts] / q[before, texts])[None]
    rounds, _ = walk(ratios, np.full(len(texts), TOKENS), lengths, block=block)
    judge = "Traversal" if block else "TopDown"  # a chain is a tree
    laws = (x / x.sum(axis=1, keepdims=True) for x in np.asarray((q, pi), np.float64))
    want = rounds_of(tuple(range(longest)), "independent", judge, *laws, FIRST, TOKENS, stop)
    assert float(weights @ rounds) == pytest.approx(want, abs=2e-5)


def test_a_text_by_hand():
    # A token of ratio 2 stands half of the time; where q is 0 it never does.
    ratios = np.asarray([[[2.0, 1.0, np.inf, 0.5, 9.0]]])
    for width in (4, 5):  # what lies past the end changes nothing
        rounds, drafted = walk(
            ratios[..., :width], np.asarray([4]), np.full((1, width), 2), block=False
        )
        # From 0: to 1 (1/2) or 3 (1/2, then the third token is the verifier's); from 1: to 3.
        assert rounds == pytest.approx([1 + 0.5 + 1.0])
        assert drafted == pytest.approx(2.0)
