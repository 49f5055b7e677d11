"""Branches of several drafters, beside their laws in tests/drafting/test_laws.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decoding, drafting, rules, verification
from specjax.drafting.lookup import longest_matches
from specjax.drafting.trees import union_of
from specjax.types import ChildLaw, DraftBlock
from tests.decoding.helpers import begin
from tests.drafting.test_laws import BRANCHES, chain, side_by_side, wide
from tests.laws import MODEL, B, P, V
from tests.models.tiny import quick_jit

ONE, TWO = chain(1), chain(1, "b")


INPUTS = np.array([[0, 1, 2, 0, 1], [2, 0, 0, 0, 0], [1, 1, 0, 1, 0]], np.int32)
LENGTHS = np.array([5, 1, 4], np.int32)
ROWS = {"ids": np.arange(3), "limits": np.array([9, 7, 9]), "max_new": 9}


def block_of(tokens, parents=None, laws=None, certain=True):
    """A block of one row; `certain`: its tokens have all of their distributions."""
    tokens = jnp.asarray([tokens], jnp.int32)
    probs = jax.nn.one_hot(jnp.pad(tokens, ((0, 0), (0, 1))), 6)
    shared = {"parents": parents, "laws": laws}
    shared = {
        name: None if x is None else jnp.asarray([x], jnp.int32) for name, x in shared.items()
    }
    return DraftBlock(
        tokens, probs if certain else probs / 2, None, jnp.array([tokens.size]), {}, **shared
    )


def test_equal_certain_tokens_are_joined():
    union = quick_jit(union_of)([block_of([1, 2, 3]), block_of([1, 2, 0, 1]), block_of([2])])
    assert union.num_drafted == 6 and union.tokens.shape == (1, 8)
    np.testing.assert_array_equal(union.tokens[0, :6], [1, 2, 3, 0, 1, 2])
    np.testing.assert_array_equal(union.parents[0, :6], [0, 1, 2, 2, 4, 0])
    np.testing.assert_array_equal(union.laws[0, :6], [ChildLaw.TOP] * 6)
    # Each token's own row, whatever was joined.
    rows = union.drawn_from[0, :6]
    np.testing.assert_array_equal(union.probs[0, rows].argmax(axis=-1), union.tokens[0, :6])


def test_drawn_tokens_are_not_joined():
    union = quick_jit(union_of)([block_of([1, 2], certain=False), block_of([1, 2], certain=False)])
    np.testing.assert_array_equal(union.parents[0], [0, 1, 0, 3])
    # A fixed token beside one that was drawn without it: it stays, for the law of the other.
    pair = block_of([3, 1, 4], [0, 0, 2], [ChildLaw.OFF, ChildLaw.TOP, ChildLaw.OFF], False)
    union = quick_jit(union_of)([block_of([1], certain=False), pair])
    np.testing.assert_array_equal(union.tokens[0], [1, 3, 1, 4])
    np.testing.assert_array_equal(union.parents[0], [0, 0, 0, 1])
    np.testing.assert_array_equal(union.drawn_from[0], [0, 1, 1, 3])


@pytest.mark.parametrize("latest", [False, True])
def test_the_longest_matches(latest):
    rng, ahead = np.random.default_rng(0), 2
    find = quick_jit(lambda *given: longest_matches(*given, 3, ahead, latest=latest))
    for _ in range(20):
        length = int(rng.integers(2, 14))
        text = rng.integers(0, 3, 16)
        context, lengths = jnp.asarray(text[None], jnp.int32), jnp.array([length], jnp.int32)
        found = find(context, lengths)
        own, left = list(text[:length]), list(range(1, length))
        for number in range(3):
            agree = {at: agreement(own, at) for at in left}
            best = max(agree.values(), default=0)
            assert found.lengths[0, number] == best
            if not left or not best:
                break
            at = [x for x in left if agree[x] == best][-1 if latest else 0]
            assert found.places[0, number] == at
            copied = own[at : at + ahead]
            left = [x for x in left if copied[: length - x] != own[x : x + ahead]]


def agreement(text, at):
    """The number of tokens before a place that equal the ending."""
    n = 0
    while n < at and text[at - 1 - n] == text[-1 - n]:
        n += 1
    return n


WRONG = [
    (lambda: drafting.Branches((ONE,)), ValueError, "parts must be a tuple of at least two"),
    (lambda: drafting.Branches((ONE, 3)), ValueError, "parts must be a tuple of at least two"),
    (
        lambda: side_by_side(ONE, drafting.Lookup(max_copy=2, vocab_size=V + 1)),
        ValueError,
        r"must have the same vocabulary, got sizes \[3, 4\]",
    ),
    (lambda: wide(ONE, 4), ValueError, "width must be at most the number of tokens, 3, got 4"),
    (
        lambda: decoding.Round(MODEL, side_by_side(ONE, TWO), verification.Walk()).check_rule(
            rules.OPT(0.2)
        ),
        ValueError,
        "OPT reads the drafter's distribution after each token, but the branches of Branches",
    ),
]


@pytest.mark.parametrize(("make", "kind", "message"), WRONG)
def test_wrong_branches_are_refused(make, kind, message):
    with pytest.raises(kind, match=message):
        make()


def test_nan_of_any_drafter_ends_its_rows():
    drafter, params = BRANCHES["chain and chain"][:2]
    broken = params[1]._replace(model=B.at[:, 1].set(jnp.nan))
    method = decoding.Speculative(MODEL, drafter, verification.Traversal())
    params = decoding.MethodParams(P, (params[0], broken), rules.Lossless())
    state = method.run(params, begin(method, params, INPUTS, LENGTHS, **ROWS), 100)
    assert [method.nan_sources[i] for i in state.info.nan_in] == ["drafter"] * 3
    np.testing.assert_array_equal(state.lengths, 0)
