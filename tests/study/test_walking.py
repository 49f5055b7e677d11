"""Rounds along texts against the exact number, by enumeration of all drafts and outcomes."""

import jax
import numpy as np
import pytest

from specjax import rules, verification
from specjax.study.expect import walk
from tests.study.chains import all_texts, expected_rounds
from tests.tables import random_distributions

VOCAB, TOKENS, FIRST = 3, 5, 1
RULES = {
    "Lossless": rules.Lossless(),
    "OPT": rules.OPT(0.3),
    "TokenV3": rules.TokenV3(0.6),
    "Lossy": rules.Lossy(0.4),
}


@pytest.fixture(scope="module")
def pair():
    return random_distributions(3, VOCAB, VOCAB), random_distributions(4, VOCAB, VOCAB)


def along_texts(q, pi, longest, *, block, stop=None):
    texts, before, weights = all_texts(np.asarray(pi, np.float64), FIRST, TOKENS)
    ratios = (pi[before, texts] / q[before, texts])[None]
    lengths = np.full(texts.shape, longest)
    if stop is not None:
        for row, text in enumerate(texts):
            for t in range(TOKENS):
                ends = [i + 1 for i, token in enumerate(text[t : t + longest]) if token == stop]
                lengths[row, t] = min([*ends, longest])
    found = walk(ratios, np.full(len(texts), TOKENS), lengths, block=block)
    return float(weights @ found.rounds), found


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize(("longest", "stop"), [(1, None), (3, None), (3, 0)])
def test_rounds_are_exact_for_texts_that_follow_the_rule(pair, name, block, longest, stop):
    q, p = pair
    pi = np.asarray(jax.vmap(RULES[name])(q, p, q, p))
    algorithm = verification.Block() if block else verification.Token()
    want = expected_rounds(q, pi, FIRST, TOKENS, longest, algorithm, stop)
    assert along_texts(q, pi, longest, block=block, stop=stop)[0] == pytest.approx(want, abs=2e-5)


def test_the_two_algorithms_and_other_stops_are_told_apart(pair):
    q, p = pair
    token, block = (along_texts(q, p, 3, block=x)[0] for x in (False, True))
    stopped = along_texts(q, p, 3, block=True, stop=0)[0]
    assert token > block + 1e-3 and abs(stopped - block) > 1e-3


def test_texts_of_another_law_give_other_rounds(pair):
    q, p = pair
    texts, before, weights = all_texts(np.asarray(q, np.float64), FIRST, TOKENS)
    ratios = (p[before, texts] / q[before, texts])[None]
    found = walk(ratios, np.full(len(texts), TOKENS), np.full(texts.shape, 3), block=False)
    exact = along_texts(q, p, 3, block=False)[0]
    assert abs(float(weights @ found.rounds) - exact) > 1e-2


def test_a_text_by_hand():
    # A token of ratio 2 stands half of the time; where q is 0 it never does.
    found = walk(np.asarray([[[2.0, 1.0, np.inf, 0.5]]]), np.asarray([4]),
                 np.full((1, 4), 2), block=False)  # fmt: skip
    # From 0: to 1 (1/2) or 3 (1/2, then the third token is the verifier's); from 1: to 3.
    assert found.rounds == pytest.approx([1 + 0.5 + 1.0])
    assert found.drafted == pytest.approx(2.0)


def test_what_lies_past_the_end_changes_nothing():
    ratios = np.asarray([[[1.5, 3.0, 1.0, 9.0, 9.0]]])
    lengths = np.asarray([[3, 2, 1, 3, 3]])
    whole = walk(ratios, np.asarray([3]), lengths, block=True)
    cut = walk(ratios[:, :, :3], np.asarray([3]), lengths[:, :3], block=True)
    np.testing.assert_allclose(whole.rounds, cut.rounds)
    other = walk(ratios, np.asarray([5]), lengths, block=True)
    assert other.rounds[0] > whole.rounds[0] + 0.1
