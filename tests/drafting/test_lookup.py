"""Max-Gram against a naive implementation, and against prompt lookup in transformers."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafting import Lookup
from specjax.types import DraftInputs, Prompts, Sampling
from tests.variants import variants

ROWS, WIDTH, FORCED, MORE, G = 50, 12, 3, 9, 6
DRAFTERS = {
    "plain": Lookup(max_copy=G, vocab_size=3),
    "prompt lookup": Lookup(max_copy=G, vocab_size=3, max_ngram=2),
    "latest": Lookup(max_copy=G, vocab_size=2, max_ngram=3, latest=True),
    "least": Lookup(max_copy=G, vocab_size=2, min_ngram=3),
    "long": Lookup(max_copy=G, vocab_size=2, max_ngram=9, min_ngram=2),
    "overlap": Lookup(max_copy=G, vocab_size=3, overlap=True),
    "one token": Lookup(max_copy=G, vocab_size=1, max_ngram=1),
    "as long as matches say": Lookup(max_copy=G, vocab_size=2, min_ngram=2, copy_factor=0.7),
}


def naive(drafter, context, table):
    """The tokens proposed after a context, by the definition."""
    found = []
    for size in range(len(context) - 1, 0, -1):
        ends = [e for e in range(size, len(context)) if context[e - size : e] == context[-size:]]
        counted = min(size, drafter.max_ngram or size)
        found += [(counted, e) for e in ends]
    most = max((size for size, _ in found), default=0)
    ends = [e for size, e in found if size == most]
    block = []
    if most >= drafter.min_ngram:
        end = max(ends) if drafter.latest else min(ends)
        text = list(context)
        longest = min(drafter.max_draft, math.ceil(most * (drafter.copy_factor or G)))
        while len(block) < longest and (drafter.overlap or end < len(context)):
            block.append(text[end])
            text.append(text[end])
            end += 1
    last = block[-1] if block else context[-1]
    while table is not None and len(block) < drafter.max_draft and table[last] >= 0:
        last = int(table[last])
        block.append(last)
    return block


def after_texts(prompt, texts):
    """The prompt after texts that its outputs may resemble.

    Each continues the prompt's ending, which is not copied there: -2 - token.
    """
    divided = ([-1, *(-2 - token for token in prompt[-16:]), *text] for text in texts)
    return [*itertools.chain(*divided), -1, *prompt]


def shares(drafter, context, drafted=()):
    """How often each token follows the longest ending and `drafted`; -1 divides the context."""
    found, plain = [], [max(token, -2 - token) for token in context]
    for place in range(1, len(context)):
        size, longest = 0, min(place, drafter.max_ngram or place)
        while size < longest and plain[place - 1 - size] == plain[-1 - size] >= 0:
            size += 1
        if context[place] >= 0:
            found.append((size, place))
    most = max((size for size, _ in found), default=0)
    places = [place for size, place in found if size == most][: 2 * drafter.earlier or 1]
    factor, count = drafter.copy_factor, len(drafted)
    if most < drafter.min_ngram or (factor is not None and count >= math.ceil(most * factor)):
        return {}
    after = [context[place : place + count + 1] for place in places]
    after = [text[-1] for text in after if text[:-1] == [*drafted] and text[-1] >= 0]
    return {token: after.count(token) / len(after) for token in after}


def sampling(rows):
    return Sampling(jnp.ones(rows, jnp.float32))


@jax.jit(static_argnums=0)
def begin(drafter, table, inputs, lengths, prefix, prefix_lengths):
    return drafter.prefill(table, Prompts(inputs, lengths, prefix, prefix_lengths), FORCED + MORE)


@jax.jit(static_argnums=0)
def one_round(drafter, table, state, last, limits, active, tokens, counts):
    """A block, and the state after `tokens` were committed."""
    rows = last.size
    inputs = DraftInputs(last, limits, jnp.zeros((rows, 0)), sampling(rows), active)
    block, state = drafter.propose(table, state, inputs)
    bonus, state = drafter.bonus(table, state, inputs, block)
    return block, bonus, drafter.commit(state, tokens, counts)


def compare(drafter, seed, with_table):
    """Fifty rows over three rounds, each with its own lengths; returns how many tokens matched."""
    rng = np.random.default_rng(seed)
    vocab = drafter.vocab_size
    inputs = rng.integers(vocab, size=(ROWS, WIDTH)).astype(np.int32)
    lengths = rng.integers(1, WIDTH + 1, ROWS).astype(np.int32)
    prefix = rng.integers(vocab, size=(ROWS, FORCED)).astype(np.int32)
    forced = rng.integers(0, FORCED + 1, ROWS).astype(np.int32)
    table = rng.integers(-1, vocab, vocab).astype(np.int32) if with_table else None
    texts = [
        [*row[:n].tolist(), *more[:k].tolist()]
        for row, n, more, k in zip(inputs, lengths, prefix, forced, strict=True)
    ]
    state = begin(drafter, (), inputs, lengths, prefix, forced)
    total = 0
    for _ in range(3):
        limits = rng.integers(0, G + 1, ROWS).astype(np.int32)
        active = rng.random(ROWS) < 0.8
        tokens = rng.integers(vocab, size=(ROWS, MORE // 3)).astype(np.int32)
        counts = rng.integers(0, MORE // 3 + 1, ROWS).astype(np.int32)
        last = np.array([text[-1] for text in texts], np.int32)
        block, bonus, state = one_round(
            drafter, () if table is None else table, state, last, limits, active, tokens, counts
        )
        for i, text in enumerate(texts):
            expected = naive(drafter, text, table)
            drafted = min(len(expected), int(limits[i])) if active[i] else 0
            assert int(block.num_drafted[i]) == drafted, (text, expected)
            assert block.tokens[i, :drafted].tolist() == expected[:drafted], text
            assert block.probs is None
            assert float(bonus.probs[i].max()) == float(bonus.probs[i].sum()) == 1.0
            if drafted < len(expected):
                assert int(bonus.probs[i].argmax()) == expected[drafted]
            text += tokens[i, : counts[i]].tolist()
            total += drafted
    return total


@pytest.mark.parametrize("seeds", variants([(7,), range(100, 105)], (7,)), ids=str)
@pytest.mark.parametrize("with_table", [False, True])
@pytest.mark.parametrize("name", DRAFTERS)
def test_it_is_the_naive_one(name, with_table, seeds):
    assert sum(compare(DRAFTERS[name], seed, with_table) for seed in seeds) > 0


@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("factor", [None, 0.7])
def test_what_follows_is_drawn_as_often_as_it_does(greedy, factor):
    drafter = Lookup(max_ngram=3, max_copy=4, vocab_size=3, earlier=3, copy_factor=factor)
    rng, rows, count = np.random.default_rng(5), 200, drafter.max_draft
    inputs = rng.integers(3, size=(rows, WIDTH)).astype(np.int32)
    lengths = rng.integers(1, WIDTH + 1, rows).astype(np.int32)
    texts = rng.integers(3, size=(rows, 3, 5)).astype(np.int32)
    texts[np.arange(5) >= rng.integers(6, size=(rows, 3, 1))] = -1
    state = drafter.prefill((), Prompts(inputs, lengths, predictions=texts), 1)
    last = jnp.asarray(inputs[np.arange(rows), lengths - 1])
    limits, active = jnp.full(rows, count), jnp.ones(rows, bool)
    drawn = Sampling(jnp.full(rows, 0.0 if greedy else 1.0, jnp.float32))
    uniforms = jnp.asarray(rng.random((rows, count)), jnp.float32)
    block, _ = drafter.propose((), state, DraftInputs(last, limits, uniforms, drawn, active))
    several = 0
    for row in range(rows):
        prompt = inputs[row, : lengths[row]].tolist()
        context, draft = after_texts(prompt, texts[row].tolist()), []
        for place in range(count):
            expected = shares(drafter, context, draft)
            several += len(expected) > 1
            if greedy and expected:
                most = max(expected.values())
                assert expected[int(block.tokens[row, place])] == most
                expected = {int(block.tokens[row, place]): 1.0}
            found = np.asarray(block.probs[row, place])
            known = expected or {int(draft[-1] if draft else prompt[-1]): 1.0}
            np.testing.assert_allclose(found, [known.get(v, 0.0) for v in range(3)], atol=1e-6)
            if not expected:
                assert int(block.num_drafted[row]) == place
                break
            draft.append(int(block.tokens[row, place]))
            assert expected[draft[-1]] > 0
        else:
            assert int(block.num_drafted[row]) == count
    assert several > 100


def test_control_another_occurrence_is_seen():
    """The comparison tells the first occurrence from the last."""
    other = dataclasses.replace(DRAFTERS["latest"], latest=False)
    with pytest.raises(AssertionError):
        for seed in range(3):
            _compare_as(other, DRAFTERS["latest"], seed)


def _compare_as(drafter, meant, seed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "naive", lambda _, *rest, plain=naive: plain(meant, *rest))
        compare(drafter, seed, False)


def test_it_is_prompt_lookup_of_transformers():
    torch = pytest.importorskip("torch")
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    drafter, rng = Lookup(max_copy=G, vocab_size=4, max_ngram=3), np.random.default_rng(3)
    theirs = PromptLookupCandidateGenerator(
        num_output_tokens=G, max_matching_ngram_size=3, max_length=1000
    )
    inputs = rng.integers(4, size=(ROWS, WIDTH)).astype(np.int32)
    lengths = rng.integers(2, WIDTH + 1, ROWS).astype(np.int32)
    nothing = np.zeros((ROWS, FORCED), np.int32), np.zeros(ROWS, np.int32)
    state = begin(drafter, (), inputs, lengths, *nothing)
    draft_inputs = DraftInputs(
        jnp.zeros(ROWS, jnp.int32),
        jnp.full(ROWS, G),
        jnp.zeros((ROWS, 0)),
        sampling(ROWS),
        jnp.ones(ROWS, bool),
    )
    block, _ = drafter.propose((), state, draft_inputs)
    for i, (row, n) in enumerate(zip(inputs, lengths, strict=True)):
        found, _ = theirs.get_candidates(torch.tensor(row[None, :n], dtype=torch.long))
        expected = found[0, n:].tolist()
        assert block.tokens[i, : block.num_drafted[i]].tolist() == expected


def test_what_was_committed_is_taken_back():
    """A mark has no context; after another commit all is as if it had been the only one."""
    rng = np.random.default_rng(3)
    drafter = DRAFTERS["plain"]
    inputs, lengths = rng.integers(3, size=(ROWS, WIDTH)), rng.integers(1, WIDTH + 1, size=ROWS)
    nothing = np.zeros((ROWS, FORCED), np.int32), np.zeros(ROWS, np.int32)
    before = begin(drafter, (), inputs.astype(np.int32), lengths, *nothing)
    wrong, right = jnp.asarray(rng.integers(3, size=(2, ROWS, 4)), jnp.int32)
    counts = jnp.asarray(rng.integers(1, 5, size=(2, ROWS)), jnp.int32)
    mark = drafter.mark(before)
    assert all(x.size == ROWS for x in jax.tree.leaves(mark))
    moved = drafter.commit(before, wrong, counts[0])
    found = drafter.commit(drafter.rewind(moved, mark), right, counts[1])
    expected = drafter.commit(before, right, counts[1])
    np.testing.assert_array_equal(found.lengths, expected.lengths)
    np.testing.assert_array_equal(found.match.lengths, expected.match.lengths)
    np.testing.assert_array_equal(found.match.places, expected.match.places)
    assert np.any(np.asarray(moved.match.places) != np.asarray(expected.match.places))


def test_an_encoder_decoder_s_input_is_looked_up():
    """Its last committed token, the start token, is not in the context."""
    drafter = Lookup(max_copy=3, vocab_size=9)
    nothing = np.zeros((1, FORCED), np.int32), np.zeros(1, np.int32)
    state = begin(drafter, (), np.array([[5, 6, 7, 8, 1, 0]], np.int32), np.array([5]), *nothing)
    start, none = jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32)
    tokens = jnp.array([[6, 7, 0]], jnp.int32)
    args = (start, jnp.full(1, 3), jnp.ones(1, bool), tokens)
    block, _, state = one_round(drafter, (), state, *args, none + 2)
    assert block.num_drafted.tolist() == [0]
    block, _, _ = one_round(drafter, (), state, *args, none)
    assert block.tokens[0].tolist() == [8, 1, 6]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_copy": 0}, "max_copy must be a whole number of at least 1, got 0"),
        ({"max_ngram": 0}, "max_ngram must be a whole number of at least 1, got 0: .* None"),
        ({"min_ngram": 1.5}, "min_ngram must be a whole number of at least 1, got 1.5"),
        ({"max_ngram": 2, "min_ngram": 3}, "min_ngram must be at most max_ngram = 2, got 3"),
        ({"earlier": -1}, "earlier must be a whole number of at least 0, got -1"),
        ({"earlier": 4, "latest": True}, "latest must be left out with earlier=4"),
        ({"earlier": 4, "bigram": "built-in"}, "bigram must be left out with earlier=4"),
    ],
)
def test_bad_settings_are_told(options, message):
    with pytest.raises(ValueError, match=message):
        Lookup(**options)


def test_a_table_of_another_size_is_told():
    drafter = DRAFTERS["plain"]
    state = begin(drafter, (), *(np.zeros((1, 1), np.int32), np.ones(1, np.int32)) * 2)
    one = jnp.ones(1, jnp.int32)
    with pytest.raises(AssertionError, match="the table must have 3 entries"):
        one_round(drafter, jnp.zeros(5, jnp.int32), state, one, one, one > 0, one[:, None], one)
