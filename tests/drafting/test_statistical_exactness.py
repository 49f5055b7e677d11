"""Whatever is copied, and whoever drafts where nothing is, the emitted law is the verifier's."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import drafting, sampling, testing, verification
from specjax.decoding.blocks import draft_probs
from specjax.types import DraftBlock
from tests.drafting.paths import law

V, N = 2, 4
MODEL = testing.TabularModel(V, 2)
SMALL, LARGE = (jnp.asarray(testing.random_table(s, V, 2, scale=1.3)) for s in (20, 8))
# It repeats itself, so that matches of all lengths occur.
PROMPT = np.array([1, 0, 0, 1, 0, 1, 1, 0])
TABLE = jnp.array([1, -1], jnp.int32)
# Two contexts of two tokens, the last one first, say what the last one alone does not.
NGRAMS = drafting.Bigram(
    np.array([1, -1], np.int32),
    "mark",
    {},
    np.array([[0, 1], [1, 0]], np.int32),
    np.array([0, 1], np.int32),
).table("it", "mark", V)
LOOKUP = drafting.LookupDrafter(V, 3)
NEURAL = drafting.NeuralDrafter(MODEL, 2)
SMALL_PARAMS = drafting.NeuralDrafterParams(SMALL)
DRAFTERS = {
    "lookup": (LOOKUP, ()),
    "bigram": (dataclasses.replace(LOOKUP, min_ngram=3), TABLE),
    "order 3": (dataclasses.replace(LOOKUP, min_ngram=3), jax.tree.map(jnp.asarray, NGRAMS)),
    "overlap": (
        dataclasses.replace(LOOKUP, min_ngram=3, max_ngram=3, latest=True, overlap=True),
        (),
    ),
    "lookup first": (
        drafting.LookupFirst(LOOKUP, NEURAL, min_match=4),
        ((), SMALL_PARAMS),
    ),
}
VERIFICATIONS = {"token": verification.Token(), "block": verification.Block()}


@functools.cache
def table(name, temperature):
    """The distributions after every continuation of the prompt, `[P, V]`."""
    settings = sampling.Sampling(np.float32(temperature))
    logits = {"q": SMALL, "p": LARGE}[name]
    by_context = np.asarray(jax.vmap(lambda x: sampling.distribution(x, settings))(logits))
    rows = []
    for length in range(N + 4):
        for tail in itertools.product(range(V), repeat=length):
            before, last = (*PROMPT, *tail)[-2:]
            rows.append(by_context[before * (V + 1) + last])
    return np.stack(rows)


def distance(drafter, params, verify, temperature):
    p = table("p", temperature)
    drawn_from = table("q", temperature) if drafter.num_uniforms else None
    found, lengths = law(drafter, params, verify, drawn_from, p, PROMPT, N, temperature=temperature)
    return testing.total_variation(found, testing.target_law(p, N)), lengths


QUICK = {("bigram", "token", 1.0), ("overlap", "block", 1.0), ("lookup first", "block", 1.0)}
QUICK |= {("lookup first", "token", 0.0), ("order 3", "block", 1.0)}


@pytest.mark.parametrize(
    ("name", "verify", "temperature"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.exhaustive)
        for case in ((n, v, t) for n in DRAFTERS for v in VERIFICATIONS for t in (0.0, 1.0))
    ],
)
def test_the_law_is_the_verifier_s(name, verify, temperature):
    found, lengths = distance(*DRAFTERS[name], VERIFICATIONS[verify], temperature)
    assert found < 1e-5
    # At temperature 0 there is one path.
    assert temperature == 0.0 or len(lengths) > 1, "all drafts are of one length"


class Softened(drafting.LookupDrafter):
    """The control: a copied token is said to be drawn."""

    def propose(self, *args, **options):
        block, state = super().propose(*args, **options)
        return block._replace(probs=0.6 * draft_probs(block, V) + 0.4 / V), state


class Afterwards(drafting.LookupFirst):
    """The control: the drafter's block stands where its first token is the copied one."""

    def propose(self, params, state, inputs, **options):
        copied, _ = self.lookup.propose(params[0], state.drafters[0], inputs, **options)
        drawn, _ = self.drafter.propose(params[1], state.drafters[1], inputs, **options)
        same = copied.tokens[:, 0] == drawn.tokens[:, 0]
        wide = jnp.pad(drawn.tokens, ((0, 0), (0, 1)))
        probs = jnp.pad(drawn.probs, ((0, 0), (0, 1), (0, 0)))
        count = jnp.where(same, drawn.num_drafted, copied.num_drafted)
        return (
            DraftBlock(
                jnp.where(same[:, None], wide, copied.tokens),
                jnp.where(same[:, None, None], probs, draft_probs(copied, V)),
                None,
                count,
                drawn.calls,
            ),
            state,
        )


@pytest.mark.parametrize(
    "control",
    [
        (Softened(V, 3), ()),
        (Softened(V, 3, min_ngram=3), DRAFTERS["order 3"][1]),
        (Afterwards(LOOKUP, NEURAL, min_match=4), DRAFTERS["lookup first"][1]),
    ],
    ids=["softened", "softened n-grams", "afterwards"],
)
def test_control_a_wrong_q_is_seen(control):
    assert distance(*control, VERIFICATIONS["token"], 1.0)[0] > 1e-3
