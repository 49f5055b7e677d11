"""Tables of longer n-grams against dictionaries of counters that leave nothing out."""

import collections
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.drafting import Bigram, Lookup
from specjax.drafting.ngrams import NGrams, follower, frequent_contexts, most_frequent_successors
from tests.drafting.test_lookup import begin, naive, one_round
from tests.variants import variants

ROWS, WIDTH, FORCED, MORE, G, START = 200, 10, 2, 9, 6, 0
# Nothing is copied, or what two tokens find.
DRAFTERS = {"alone": {"min_ngram": 50}, "after copies": {"min_ngram": 2, "max_ngram": 3}}


class Counters:
    """What follows every context that was seen often enough; the longest known one speaks."""

    def __init__(self, texts, order, min_count):
        self.longest, self.seen = order - 1, collections.defaultdict(collections.Counter)
        self.min_count = min_count
        for text in texts:
            for end in range(1, len(text)):
                for size in range(1, min(order - 1, end) + 1):
                    self.seen[tuple(text[end - size : end])][text[end]] += 1

    def after(self, text):
        for size in range(min(self.longest, len(text)), 0, -1):
            counts = self.seen.get(tuple(text[-size:]), {})
            if sum(counts.values()) >= (self.min_count if size > 1 else 1):
                return min(counts, key=lambda token: (-counts[token], token))
        return -1


def some_texts(rng, vocab, rows=60):
    """Repeating ones, of few tokens; some are empty."""
    words = rng.integers(1, vocab, size=(6, 3))
    return [
        [START, *words[rng.integers(6, size=n)].ravel()[: 3 * n - int(rng.integers(2))].tolist()]
        if n
        else []
        for n in rng.integers(0, 6, rows)
    ]


def make(rng, order, vocab, min_count=2, start=None):
    texts = some_texts(rng, vocab)
    successors = most_frequent_successors(texts, vocab)
    longer = frequent_contexts(texts, successors, order, min_count)
    table = Bigram(successors, "mark", {}, *longer)
    return table.table("it", "mark", vocab, start), Counters(texts, order, min_count)


@pytest.mark.parametrize("order", [3, 4, 5])
@pytest.mark.parametrize("min_count", [1, 2, 4])
def test_what_is_left_out_changes_nothing(order, min_count):
    rng = np.random.default_rng(order)
    table, counters = make(rng, order, 7, min_count)
    assert isinstance(table, NGrams) and table.contexts.shape[1] == order - 1
    endings = rng.integers(-1, 7, size=(3000, order - 1)).astype(np.int32)
    # Most of them known.
    known = list(counters.seen)
    for i in range(0, 3000, 2):
        ending = known[rng.integers(len(known))][::-1]
        endings[i, : len(ending)] = ending
    # Nothing comes before where the text begins.
    endings[np.cumsum(endings < 0, axis=1) > 0] = -1
    endings[:, 0] = np.maximum(endings[:, 0], 0)
    found = jax.jit(follower)(jax.tree.map(jnp.asarray, table), endings)
    expected = [counters.after([x for x in ending[::-1] if x >= 0]) for ending in endings]
    assert found.tolist() == expected
    kept = len(table.followers)
    frequent = [c for c in counters.seen if sum(counters.seen[c].values()) >= min_count]
    assert 0 < kept < sum(len(context) > 1 for context in frequent)
    # The control: without the longer contexts other tokens are told.
    assert table.successors[endings[:, 0]].tolist() != expected


def compare(options, order, apart, seed, vocab=7, looks_back=None):
    """Rows over three rounds; `apart` as for an encoder-decoder. Returns how many were drafted."""
    rng = np.random.default_rng(seed)
    table, counters = make(rng, order, 7, start=START if apart else None)
    counters.longest = looks_back or counters.longest
    drafter = Lookup(max_copy=G, vocab_size=vocab, **options)
    table = jax.tree.map(jnp.asarray, table)
    flat = np.array([x for text in some_texts(rng, 7, 400) for x in text[1:]])

    def draw(n):
        at = rng.integers(len(flat) - n, size=ROWS)
        return flat[at[:, None] + np.arange(n)].astype(np.int32)

    inputs, prefix = draw(WIDTH), draw(FORCED)
    lengths, forced = rng.integers(1, WIDTH + 1, ROWS), rng.integers(0, FORCED + 1, ROWS)
    prompts = [row[:n].tolist() for row, n in zip(inputs, lengths, strict=True)]
    outputs = [row[:n].tolist() for row, n in zip(prefix, forced, strict=True)]
    state = begin(drafter, table, inputs, lengths, prefix, forced)
    total = 0
    for _ in range(3):
        tokens, counts = draw(MORE // 3), rng.integers(0, MORE // 3 + 1, ROWS)
        read = [
            [START, *out] if apart else [*prompt, *out]
            for prompt, out in zip(prompts, outputs, strict=True)
        ]
        last = np.array([text[-1] for text in read], np.int32)
        limits, active = np.full(ROWS, G, np.int32), np.ones(ROWS, bool)
        block, _, state = one_round(drafter, table, state, last, limits, active, tokens, counts)
        drafted, count = np.asarray(block.tokens), np.asarray(block.num_drafted)
        for i in range(ROWS):
            block = naive(drafter, [*prompts[i], *outputs[i]], None)
            while len(block) < G and (after := counters.after([*read[i], *block])) >= 0:
                block.append(after)
            assert drafted[i, : count[i]].tolist() == block, (prompts[i], outputs[i])
            outputs[i] += tokens[i, : counts[i]].tolist()
            total += len(block)
    return total


CASES = [*itertools.product((3, 4, 5), DRAFTERS, (True, False))]
QUICK = [(3, "alone", True), (4, "after copies", False), (5, "alone", False)]
QUICK += [(5, "after copies", True)]


@pytest.mark.parametrize(("order", "name", "apart"), variants(CASES, *QUICK, several=True))
def test_the_longest_known_context_goes_on(order, name, apart):
    """600 contexts each, of lengths of their own."""
    for seed in (order, 100, 101):
        assert compare(DRAFTERS[name], order, apart, seed) > ROWS


def test_control_a_shorter_look_back_is_seen():
    with pytest.raises(AssertionError):
        compare(DRAFTERS["alone"], 4, False, seed=4, looks_back=2)


def test_a_large_vocabulary_overflows_nothing():
    """The ids of a vocabulary of 262,144: V ** 2 is far beyond int32."""
    rng, vocab = np.random.default_rng(1), 2**18
    ids = np.sort(rng.choice(np.arange(1, vocab), 5000, replace=False))
    ids[-1] = vocab - 1
    texts = [ids[rng.integers(0, 5000, 9) // 100 * 100].tolist() for _ in range(3000)]
    successors = most_frequent_successors(texts, vocab)
    contexts, followers = frequent_contexts(texts, successors, 5)
    table = Bigram(successors, "mark", {}, contexts, followers).table("it", "mark", vocab)
    counters = Counters(texts, 5, 2)
    assert len(contexts) > 1000 and table.probes.size < 9
    endings = [text[k : k + 4] for text in texts[:500] for k in range(6)]
    asked = jnp.asarray([ending[::-1] for ending in endings], jnp.int32)
    found = jax.jit(follower)(jax.tree.map(jnp.asarray, table), asked)
    assert found.tolist() == [counters.after(ending) for ending in endings]


def test_no_context_is_known_where_none_says_more():
    """Then the table is that of the successors, as ever; also without a text."""
    for texts in ([[1, 2, 3, 1, 2, 3]], [[], [4]], []):
        successors = most_frequent_successors(texts, 5)
        contexts, followers = frequent_contexts(texts, successors, 4)
        assert contexts.shape == (0, 3) and followers.shape == (0,)
        made = Bigram(successors, "mark", {}, contexts, followers)
        assert made.order == 4 and made.table("it", "mark", 6).tolist() == [*successors, -1]


@pytest.mark.parametrize(
    ("order", "min_count", "message"),
    [
        (2, 2, "order must lie in 3 .. 5, got 2: order 2 is the default"),
        (6, 2, "order must lie in 3 .. 5, got 6"),
        (3, 0, "min_count must be a whole number of at least 1, got 0"),
    ],
)
def test_bad_numbers_are_told(order, min_count, message):
    with pytest.raises(ValueError, match=message):
        frequent_contexts([[1, 2]], np.full(3, -1, np.int32), order, min_count)


PAIR = np.array([[1, 2], [2, 0]], np.int32)


@pytest.mark.parametrize(
    ("contexts", "followers"),
    [
        (PAIR, [1]),
        (PAIR.astype(np.int64), [1, 1]),
        (PAIR + 1, [1, 1]),
        (PAIR, [1, -1]),
        (PAIR - 1, [1, 1]),
        (PAIR[:, :1], [1, 1]),
        (PAIR[::-1], [1, 1]),
        (PAIR[[0, 0]], [1, 1]),
        (np.array([[1, 2, -1, 2]], np.int32), [1]),
        (np.ones((1, 5), np.int32), [1]),
    ],
)
def test_bad_contexts_are_told(contexts, followers):
    with pytest.raises(ValueError, match="contexts must be .* followers"):
        Bigram(np.zeros(3, np.int32), "m", {}, contexts, np.array(followers, np.int32))
