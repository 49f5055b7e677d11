"""Drafters that lag are caught up."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decoding, drafting
from specjax.types import DraftInputs, PromptBatch, Prompts, Sampling
from tests import laws
from tests.decoding import test_loop as whole
from tests.decoding.helpers import pair
from tests.models.tiny import quick_jit, tiny
from tests.tables import RULES, VERIFICATIONS
from tests.variants import variants


@pytest.mark.parametrize(
    "family", variants(["llama", "t5_v1_1", "gemma4", "qwen3_5"], "llama", "qwen3_5")
)
def test_a_drafter_that_lagged_drafts_as_if_it_had_not(family):
    """Greedy, the drafter being the verifier: every draft token must be accepted."""
    model, params = tiny(family)[:2]
    model = dataclasses.replace(model, rollback=4)  # the least that serves
    method = decoding.Speculative(model, drafting.Chain(model, 3))
    given = pair(params, params)
    rng = np.random.default_rng(0)
    prompts = PromptBatch(
        inputs=rng.integers(3, 40, (3, 5)).astype(np.int32),
        input_lengths=np.array([5, 2, 4], np.int32),
        ids=np.arange(3),
        limits=np.full(3, 24),
        sampling=Sampling(0.0),
        draft_limits=np.array([0, 0, 3]),
    )
    state = method.init(given, prompts, max_new=24)
    # Rows 0 and 1 lag by seven tokens, more than one pass of the drafter reads; by then row 2 ends.
    state = method.run(given, state, 7)
    np.testing.assert_array_equal(state.lengths[:2], [7, 7])
    # Row 1 goes on lagging.
    state = state._replace(draft_limits=jnp.array([3, 0, 3]))
    state = method.run(given, state, 2)
    np.testing.assert_array_equal(state.lengths[:2], [15, 9])
    state = state._replace(draft_limits=jnp.array([3, 3, 3]))
    state = method.run(given, state, 100)
    lengths = np.arange(4)
    counts = (state.info.drafted_lengths, state.info.accepted_lengths)
    drafted, accepted = (np.asarray(x) @ lengths for x in counts)
    np.testing.assert_array_equal(drafted, accepted)
    assert drafted.min() > 0
    plain = method.init(given, prompts._replace(draft_limits=None), max_new=24)
    plain = method.run(given, plain, 100)
    np.testing.assert_array_equal(plain.tokens, state.tokens)


def test_the_cache_must_hold_the_prompt_of_every_model():
    """A T5 takes one position of its decoder's cache, a Llama one for each token."""
    drafter = drafting.Chain(tiny("llama").model, 2)
    method = decoding.Speculative(tiny("t5_v1_1").model, drafter)
    assert method.cache_length(9, 0, 4) == 9 + 4 + 3


@pytest.mark.parametrize(
    ("counted", "passes"),
    # Three tokens more are read together with the draft.
    [([0, 1, 5], 2), pytest.param([0, 1, 3], 1, marks=pytest.mark.exhaustive)],
)
def test_a_nested_round_catches_up_on_what_others_add(counted, passes):
    """More is committed than it emitted: its next distributions are those after all of that."""
    model = whole.MODEL
    drafter = drafting.Chain(model, 2)
    one = decoding.Round(model, drafter, VERIFICATIONS["Token"], nested=True)
    params = pair(*whole.PARAMS)
    inputs, lengths = jnp.asarray(whole.PROMPTS), jnp.asarray(whole.LENGTHS)
    settings, everyone = Sampling(jnp.ones(3)), jnp.ones(3, bool)
    uniforms = jax.random.uniform(jax.random.key(3), (3, one.num_uniforms))
    added = jnp.array([[1, 0, 1, 1, 0], [0, 1, 0, 0, 1], [1, 1, 0, 1, 0]])

    def next_target(one):
        state = one.prefill(params, Prompts(inputs, lengths), 24)
        step = one(params, settings, state, uniforms, everyone, jnp.full(3, 2)).step
        # All that it emitted, and some tokens of somebody else's.
        width = step.tokens.shape[1]
        tokens = jnp.pad(step.tokens, ((0, 0), (0, 5)))
        place = step.counts[:, None] + jnp.arange(5)[None]
        tokens = jax.vmap(lambda row, at, new: row.at[at].set(new))(tokens, place, added)
        counts = step.counts + jnp.array(counted)
        assert tokens.shape[1] == width + 5
        state = one.commit(state, step.inner, tokens, counts)
        return tokens, counts, one(params, settings, state, uniforms, everyone, jnp.full(3, 2))

    tokens, counts, outcome = quick_jit(functools.partial(next_target, one))()
    assert int(outcome.calls["verifier"]) == passes
    for row in range(3):
        prompt = whole.PROMPTS[row, : whole.LENGTHS[row]]
        *_, before, last = [*prompt, *np.asarray(tokens)[row, : counts[row]]]
        want = laws.probabilities(whole.PARAMS[0][before * (whole.V + 1) + last], 1.0)
        np.testing.assert_allclose(outcome.probs[row, 0], want, rtol=1e-6)
    # The control: a round that is not nested has not read them.
    other = decoding.Round(model, drafter, VERIFICATIONS["Token"])
    wrong = quick_jit(lambda: next_target(other)[2].probs)()
    assert np.abs(np.asarray(wrong[2, 0]) - np.asarray(outcome.probs[2, 0])).max() > 1e-3


@pytest.mark.parametrize("rule_name", variants(["Lossless", "OPT"], "OPT"))
def test_who_catches_up_writes_the_same_in_fewer_passes(rule_name):
    rounds = {}
    for catches_up in (False, True):
        drafter = drafting.Chain(whole.MODEL, 3, catches_up=catches_up)
        method = decoding.Speculative(whole.MODEL, drafter)
        params = pair(whole.PARAMS[0], whole.PARAMS[0], RULES[rule_name])
        prompts = PromptBatch(whole.PROMPTS, whole.LENGTHS, ids=np.arange(3), limits=np.full(3, 14))
        state = method.init(params, prompts, max_new=14)
        rounds[catches_up] = method.run(params, state, 100)
    first, second = rounds[False], rounds[True]
    np.testing.assert_array_equal(first.tokens, second.tokens)
    passes = [int(x.info.calls["drafter"].sum()) for x in (first, second)]
    # The same model drafts and verifies: every block stands, and owes a pass.
    saved = int(second.info.deferrals.sum()) if rule_name == "Lossless" else 0
    assert passes[0] - passes[1] == saved


@pytest.mark.parametrize("catches_up", [False, True])
def test_the_bonus_of_a_row_that_lags_and_drafts_nothing(catches_up):
    t, one = tiny("llama"), jnp.ones((1,), jnp.int32)
    drafter = drafting.Chain(t.model, 3, catches_up=catches_up)
    params = drafting.chain.ChainParams(t.params)

    @quick_jit
    def bonus_after(params):
        state = drafter.prefill(params, Prompts(jnp.array([[3, 4, 5]]), jnp.array([3])), 20)
        for token in (7, 8, 9):  # another part drafted them
            state = drafter.commit(state, jnp.array([[token]], jnp.int32), one)
        last, settings = jnp.array([9], jnp.int32), Sampling(jnp.ones(1))
        uniforms, active = jnp.zeros((1, drafter.num_uniforms)), jnp.array([True])
        inputs = DraftInputs(last, 0 * one, uniforms, settings, active)
        block, state = drafter.propose(params, state, inputs)
        return drafter.bonus(params, state, inputs, block)[0].probs[0]

    logits = t.apply(t.params, np.array([[3, 4, 5, 7, 8, 9]], np.int32))[0, -1]
    np.testing.assert_allclose(bonus_after(params), jax.nn.softmax(logits), atol=1e-5)


@pytest.mark.parametrize("family", variants(["llama", "gemma4", "qwen3_5"], "qwen3_5"))
def test_what_is_read_of_a_row_that_lags_does_not_count(family):
    """Another part drafts for the second row, until the model drafts for both rows."""
    t, drafted, rounds = tiny(family), 2, 6
    # Rows that lag, beside others that draft, are read in the same passes.
    model = dataclasses.replace(t.model, rollback=drafted + 1)
    drafter = drafting.Chain(model, drafted)
    params = drafting.chain.ChainParams(t.params)
    rng, counts = np.random.default_rng(0), np.array([drafted, drafted + 1], np.int32)
    text = rng.integers(3, 48, 3 + rounds * counts[1]).astype(np.int32)
    uniforms = jnp.full((2, drafter.num_uniforms), 0.5, jnp.float32)
    settings = Sampling(jnp.ones(2))

    @quick_jit
    def propose(params, state, last, active):
        inputs = DraftInputs(last, jnp.where(active, drafted, 0), uniforms, settings, active)
        return drafter.propose(params, state, inputs)

    def prefilled(tokens):
        prompts = Prompts(np.tile(tokens, (2, 1)), np.full(2, len(tokens), np.int32))
        return quick_jit(drafter.prefill, static_argnums=2)(params, prompts, len(text) + 3)

    state, last, both = prefilled(text[:3]), np.repeat(text[2], 2), jnp.array([True, True])
    for at in range(3, len(text), counts[1]):
        block, state = propose(params, state, last, jnp.array([True, False]))
        tokens = np.stack([np.pad(block.tokens[0], (0, 1)), text[at : at + counts[1]]])
        state = drafter.commit(state, tokens, counts)
        last = tokens[[0, 1], counts - 1]
    assert int(state.history.read[1]) < int(state.positions[1]) - 2 * drafted
    block, _ = propose(params, state, last, both)
    fresh, _ = propose(params, prefilled(text), np.repeat(text[-1], 2), both)
    np.testing.assert_allclose(block.probs[1], fresh.probs[1], atol=1e-5)
