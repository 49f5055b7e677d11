"""A drafter's state between rounds is that of a fresh one that reads the text."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decoding, drafting, verification
from specjax.decoding.method import beginning_of, insert_rows
from specjax.types import DraftInputs, PromptBatch, Prompts, Sampling
from tests.heads.tiny_heads import drafter_of, encoded_head, tiny_head
from tests.models.tiny import quick_jit
from tests.variants import variants

V, G, ROUNDS, ROOM = 12, 3, 10, 80
NAMES = variants(
    ["eagle3_window", "mtp", "dspark", ("eagle3", "t5gemma"), ("eagle3", "t5"), ("dspark", "umt5")],
    *("eagle3_window", "dspark", ("eagle3", "t5gemma"), ("dspark", "umt5")),
)
INPUTS = np.random.default_rng(0).integers(0, V, (4, 6)).astype(np.int32)
LENGTHS = np.array([6, 1, 4, 2], np.int32)
# Warm, so that some drafts are accepted and some are not.
WARM = 3.0


def method_of(name, longest=G, **options):
    """The method of a head: a name, or a pair of names with that of an encoder-decoder."""
    tiny = tiny_head(name, vocab=V) if isinstance(name, str) else encoded_head(*name, vocab=V)
    drafter, own = drafter_of(tiny, longest, **options)
    method = decoding.Speculative(tiny.verifier, drafter)
    return tiny, method, decoding.MethodParams(tiny.verifier_params, own)


def batch_of(inputs, lengths, rows, limit):
    rows = np.asarray(rows)
    settings = Sampling(np.full(rows.size, WARM, np.float32))
    limits, seeds = np.full(rows.size, limit), np.full(rows.size, 3)
    return PromptBatch(inputs, lengths, rows, limits, seeds=seeds, sampling=settings)


def begun(method, params, rows, limit=60):
    batch = batch_of(INPUTS[np.asarray(rows)], LENGTHS[np.asarray(rows)], rows, limit)
    return method.init(params, batch, max_new=60, max_length=ROOM)


def with_and_without(method, params, batch, beginning, rounds):
    """What is written after a beginning, and after the whole prompt."""
    for options in ({"beginning": beginning}, {}):
        state = method.init(params, batch, max_new=30, max_length=ROOM, **options)
        yield np.asarray(method.run(params, state, rounds).tokens)


def draft_inputs(drafter, tokens, limits=None, active=True):
    """With the same noise for all."""
    rows = tokens.size
    noise = np.random.default_rng(1).uniform(size=(rows, drafter.num_uniforms))
    limits = jnp.full(rows, drafter.max_draft, jnp.int32) if limits is None else limits
    given = limits, jnp.asarray(noise, jnp.float32), Sampling(jnp.full(rows, WARM))
    return DraftInputs(tokens, *given, jnp.full(rows, active), True)


def texts_of(verifier, state, rows):
    """The prompts with what was emitted."""
    rows = np.asarray(rows)
    emitted, counts = np.asarray(state.tokens), np.asarray(state.lengths)
    if verifier.config.encoder_style is not None:
        given = INPUTS[rows], LENGTHS[rows], emitted, counts
        return Prompts(*map(jnp.asarray, given))
    texts = np.zeros((len(rows), ROOM), np.int32)
    for i, row in enumerate(rows):
        text = [*INPUTS[row, : LENGTHS[row]], *emitted[i, : counts[i]]]
        texts[i, : len(text)] = text
    return Prompts(jnp.asarray(texts), jnp.asarray(LENGTHS[rows] + counts))


def check(tiny, method, params, state, rows):
    """The next drafts are those of a drafter that has just read the texts."""
    prompts = texts_of(tiny.verifier, state, rows)

    @quick_jit
    def both(params, prompts, kept):
        reader = tiny.verifier.reading(tiny.head.config.boundaries)
        filled = reader.prefill(params.verifier, prompts, ROOM + 8)
        fresh = method.drafter.prefill(params.drafter, prompts, ROOM + 8, verifier=filled)
        inputs = draft_inputs(method.drafter, filled.tokens)
        return [method.drafter.propose(params.drafter, x, inputs)[0] for x in (kept, fresh)]

    kept, fresh = both(params, prompts, state.inner.drafter)
    np.testing.assert_array_equal(kept.tokens, fresh.tokens)
    logs = [np.log(np.maximum(np.asarray(x.confidences), 1e-30)) for x in (kept, fresh)]
    np.testing.assert_allclose(logs[0], logs[1], atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_ten_rounds_with_rejections(name):
    tiny, method, params = method_of(name)
    state = method.run(params, begun(method, params, range(4)), ROUNDS)
    check(tiny, method, params, state, range(4))
    accepted = np.asarray(state.info.accepted_lengths).sum(axis=0)
    assert accepted[0] > 0 and accepted[1:].sum() > 0  # some whole rejections, some acceptances


@pytest.mark.parametrize("name", ["eagle3_window", ("dspark", "umt5")])
def test_ten_rounds_with_copies_before(name, monkeypatch):
    monkeypatch.setitem(globals(), "WARM", 0.5)  # so that texts repeat themselves
    tiny, method, params = method_of(name, longest=1, copies=4)
    state = method.run(params, begun(method, params, range(4)), ROUNDS)
    copied = np.asarray(state.info.accepted_lengths)[:, 2:].sum(axis=1)
    assert copied.any() and not copied.all(), "only a copy is longer than a draft of the head"
    of_head = decoding.Speculative(tiny.verifier, method.drafter.drafter)
    inner = state.inner._replace(drafter=state.inner.drafter.drafters[1])
    own = params._replace(drafter=params.drafter[1])
    check(tiny, of_head, own, state._replace(inner=inner), range(4))


@pytest.mark.parametrize("name", ["dspark", ("dspark", "umt5")])
def test_rows_that_do_not_draft_and_slots_that_are_refilled(name):
    tiny, method, params = method_of(name)
    state = begun(method, params, [0, 1, 2])
    state = state._replace(draft_limits=jnp.array([G, 0, 1]))
    state = method.run(params, state, 4)
    state = insert_rows(state, jnp.array([1]), begun(method, params, [3]))
    state = state._replace(draft_limits=jnp.array([G, G, G]))
    state = method.run(params, state, 4)
    check(tiny, method, params, state, [0, 3, 2])
    fresh = method.run(params, begun(method, params, [3, 0, 2]), 4)
    count = int(fresh.lengths[0])
    np.testing.assert_array_equal(state.tokens[1, :count], fresh.tokens[0, :count])


def test_trees_keep_the_states_of_their_path():
    # With some weights the noise of floats alone is 5e-5.
    tiny = tiny_head("eagle3", vocab=V, seed=7)
    drafter = drafting.heads.EagleTree(2, 2, model=tiny.head)
    method = decoding.Speculative(tiny.verifier, drafter, verification.Traversal())
    own = drafting.chain.ChainParams(tiny.params)
    params = decoding.MethodParams(tiny.verifier_params, own)
    state = method.run(params, begun(method, params, range(4)), ROUNDS)
    check(tiny, method, params, state, range(4))


@pytest.mark.parametrize("name", variants(["mtp", "dspark"], "mtp"))
def test_a_beginning_that_rows_share(name):
    _, method, params = method_of(name)
    shared = np.array([3, 5, 1], np.int32)
    beginning = method.begin(params, shared)
    inputs = np.concatenate([np.tile(shared, (4, 1)), INPUTS], axis=1)
    batch = batch_of(inputs, LENGTHS + 3, range(4), 30)
    np.testing.assert_array_equal(*with_and_without(method, params, batch, beginning, 6))


@pytest.mark.parametrize("name", variants(["mtp", "dspark"], "dspark"))
def test_the_next_turn_goes_on_from_a_finished_row(name):
    _, method, params = method_of(name)
    state = method.run(params, begun(method, params, [0], 9), 100)
    read = beginning_of(method, params, state, 0)
    count = int(read.lengths)
    assert LENGTHS[0] <= count < LENGTHS[0] + 9
    text = [*INPUTS[0, : LENGTHS[0]], *np.asarray(state.tokens[0, :9]), 4, 7, 1]
    batch = batch_of(np.array([text], np.int32), np.array([len(text)]), [0], 20)
    np.testing.assert_array_equal(*with_and_without(method, params, batch, read, 100))


def test_a_block_that_drafts_nothing_counts_the_pass_of_its_bonus():
    _, method, params = method_of("dspark")
    state, drafter = begun(method, params, [0, 2]).inner.drafter, method.drafter

    @quick_jit
    def calls(active):
        none = jnp.zeros(2, jnp.int32)
        inputs = draft_inputs(drafter, none, none, active)
        return drafter.propose(params.drafter, state, inputs)[0].calls[drafter.name]

    assert (calls(True), calls(False)) == (1, 0)


def test_a_window_that_moves_with_the_slot():
    """Slot k sees the states from anchor + k - (W - 1) on; one that does not, W states."""
    tiny = tiny_head("dflash", vocab=V)
    anchor, window, size = 8, 5, 4

    def first_seen(moves):
        config = dataclasses.replace(tiny.head.config, windows=(window,) * 2, windows_move=moves)
        head = dataclasses.replace(tiny.head, config=config)
        empty = head.empty(1, 16, G, G)
        token, at = jnp.zeros(1, jnp.int32), jnp.array([anchor])

        def states(scale):
            """With other keys in the last layer, where `scale [S]` is not 1."""
            entries = jax.tree.map(jnp.ones_like, empty.entries)
            values = entries.values[-1] * scale[None, None, None]
            entries = entries._replace(values=(*entries.values[:-1], values))
            cache = empty._replace(entries=entries)
            return head.block(tiny.params, cache, token, at, size - 1).states[0]

        changes = jnp.ones((anchor + 1, 16)) + jnp.eye(anchor + 1, 16)
        found = quick_jit(jax.vmap(states))(changes)
        seen = np.abs(np.asarray(found - found[anchor:])).max(axis=-1) > 1e-6
        return np.argmax(seen, axis=0)

    # Of the slots that predict: the first predicts nothing.
    np.testing.assert_array_equal(first_seen(False), [anchor - window] * 3)
    np.testing.assert_array_equal(first_seen(True), anchor + np.arange(1, 4) - window + 1)


def test_a_draft_that_ends_early_has_the_same_bonus_beside_longer_ones():
    _, method, params = method_of("dspark")
    state, drafter = begun(method, params, [0, 2]).inner, method.drafter

    @quick_jit
    def bonus(limits):
        inputs = draft_inputs(drafter, jnp.zeros(2, jnp.int32), limits)
        block, after = drafter.propose(params.drafter, state.drafter, inputs)
        return drafter.bonus(params.drafter, after, inputs, block)[0].probs[0]

    both = (bonus(np.array(limits, np.int32)) for limits in ([1, G], [1, 1]))
    np.testing.assert_allclose(*both, atol=1e-6)


def test_the_candidates_of_a_block_are_found_without_sorting_the_vocabulary():
    head = tiny_head("dflash2").head
    text = jax.jit(head._candidates).lower(jnp.zeros((4, 1, 512))).compile().as_text()
    assert "TopK" in text and " sort(" not in text
