"""Lookup first through the real loop: rows that copy beside rows for which a model drafts."""

from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decoding, drafting, rules, testing, verification
from specjax.types import PromptBatch, Sampling, traced_dataclass
from tests.decoding import test_loop as whole

V = whole.V
NEURAL = drafting.Chain(whole.MODEL, 2)
FIRST = drafting.lookup.LookupFirst(drafting.Lookup(max_copy=4, vocab_size=V), NEURAL, min_match=1)
PARAMS = ((), drafting.chain.ChainParams(whole.PARAMS[1]))


def method(drafter, verify=None):
    return decoding.Speculative(
        whole.MODEL, drafter, verify or verification.Block(), eos_ids=(whole.EOS,)
    )


def test_a_row_that_copies_makes_no_pass():
    """Its neighbour's passes are counted, its own alone are none; the model then catches up."""
    table = np.full((V + 1, V), -20.0, np.float32)
    table[:, 0] = 0.0  # 0 for ever
    model, large = testing.TabularModel(V, 1), jnp.asarray(table)
    neural = drafting.Chain(model, 2)
    first = drafting.lookup.LookupFirst(
        drafting.Lookup(max_copy=2, vocab_size=V, overlap=True), neural, min_match=3
    )
    loop = decoding.Speculative(model, first)
    small = ((), drafting.chain.ChainParams(large))
    both = decoding.MethodParams(large, small, rules.Lossless())

    def passes(prompts):
        inputs = np.array(prompts, np.int32)
        batch = PromptBatch(
            inputs,
            np.full(len(inputs), inputs.shape[1], np.int32),
            ids=np.arange(len(inputs)),
            limits=np.full(len(inputs), 9, np.int32),
            sampling=Sampling(np.float32(0.0)),
        )
        state = loop.run(both, loop.init(both, batch, max_new=9), 100)
        assert not np.asarray(state.tokens).any()
        return np.asarray(state.info.calls["drafter"]), np.asarray(state.steps)

    # The first row has three zeros before its last one, the second needs a round to get there.
    calls, steps = passes([[0, 0, 0, 0]])
    assert (calls.tolist(), steps.tolist()) == ([0], [3])
    calls, steps = passes([[2, 1, 2, 1]])
    assert 0 < calls[0] < 3 * steps[0]
    assert passes([[0, 0, 0, 0], [2, 1, 2, 1]])[1].tolist() == [3, int(steps[0])]


@traced_dataclass
class Kept:
    """pi = q."""

    reads_draft: ClassVar[bool] = True
    reads_draft_confidence: ClassVar[bool] = False
    reads_verifier_confidence: ClassVar[bool] = False

    def __call__(self, q, p, q_conf=None, p_conf=None):
        return q


@pytest.mark.parametrize(("drafter", "own"), [(FIRST, PARAMS), (FIRST.lookup, ())])
def test_a_rule_that_reads_q_reads_the_copied_one(drafter, own):
    """With the rule that keeps all of q, all that is copied stands."""
    loop, given = method(drafter), decoding.MethodParams(whole.PARAMS[0], own, Kept())
    batch = PromptBatch(
        whole.PROMPTS,
        whole.LENGTHS,
        ids=np.arange(3),
        limits=whole.LIMITS,
        sampling=Sampling(whole.TEMPERATURES),
    )
    state = loop.run(given, loop.init(given, batch, max_new=4), 100)
    drafted, accepted = (
        np.asarray(x).sum(axis=0) for x in (state.info.drafted_lengths, state.info.accepted_lengths)
    )
    assert (drafted == accepted).all() and drafted[1:].sum() > 0


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (
            {"lookup": drafting.Lookup(max_copy=4, vocab_size=V, max_ngram=2)},
            ValueError,
            "max_ngram = 2, got 3",
        ),
        (
            {"lookup": drafting.Lookup(max_copy=4, vocab_size=V, min_ngram=4)},
            ValueError,
            "min_ngram = 4 .* got 3",
        ),
        (
            {"lookup": drafting.Lookup(max_copy=4, vocab_size=9)},
            ValueError,
            r"lookup, drafter .* sizes \[9, 3\]",
        ),
        ({"drafter": drafting.Chain}, ValueError, "drafter must be an instance"),
    ],
)
def test_bad_combinations_are_told(change, kind, message):
    good = {"lookup": drafting.Lookup(max_copy=4, vocab_size=V), "drafter": NEURAL, "min_match": 3}
    with pytest.raises(kind, match=message):
        drafting.lookup.LookupFirst(**(good | change))


@pytest.mark.parametrize("drafter", [FIRST, FIRST.lookup], ids=["first", "lookup"])
def test_what_it_does_not_have_is_refused(drafter):
    name = type(drafter).__name__
    with pytest.raises(ValueError, match=f"Chow reads the drafter's confidence, but {name} has"):
        method(drafter).check_rule(rules.Chow(0.3))
    with pytest.raises(ValueError, match="prefix"):
        method(drafter, verification.GreedyBlock())
