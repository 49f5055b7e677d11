"""Logits processors follow the tokens: exactly, in the middle of blocks, row by row."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decoding, drafting, rules, sampling, testing, types, verification
from specjax.decoding.state import insert_rows
from tests.decoding.helpers import begin
from tests.drafting.choices import Law
from tests.tables import targets
from tests.variants import variants

V, N = 3, 3
MODEL = testing.TabularModel(V, 2)
P, Q, R = (jnp.asarray(testing.random_table(s, V, 2, scale=1.5)) for s in (1, 2, 3))
STRENGTH = np.float32(1.8)


@dataclasses.dataclass(frozen=True)
class Penalty(types.Processor):
    """Weakens each token of the text so far by its number of occurrences, up to two."""

    def init(self, inputs, input_lengths):
        real = jnp.arange(inputs.shape[1])[None] < input_lengths[:, None]
        each = jax.nn.one_hot(inputs, V, dtype=jnp.int32)
        return jnp.sum(jnp.where(real[..., None], each, 0), axis=1)

    def process(self, params, state, logits):
        factor = params ** jnp.minimum(state, 2).astype(jnp.float32)
        return jnp.where(logits > 0, logits / factor, logits * factor)

    def advance(self, state, tokens):
        return state + jax.nn.one_hot(tokens, V, dtype=jnp.int32)


@dataclasses.dataclass(frozen=True)
class Unheeding(drafting.NeuralDrafter):
    """Draws from its model as if there were no processor."""

    def propose(self, params, state, tokens, limits, uniforms, sampling, active, **options):
        plain = dataclasses.replace(sampling, processing=None)
        given = tokens, limits, uniforms, plain, active
        return super().propose(params, state, *given, **options)

    def bonus(self, params, state, tokens, block, sampling, **options):
        plain = dataclasses.replace(sampling, processing=None)
        return super().bonus(params, state, tokens, block, plain, **options)


def after(table, text, strength=STRENGTH):
    """The distribution after a text, from the table and the counts of its tokens alone."""
    context = [V, V, *text][-2:]
    logits = np.asarray(table, np.float64)[context[0] * (V + 1) + context[1]]
    counts = np.minimum(np.bincount(text, minlength=V), 2)
    factor = float(strength) ** counts
    logits = np.where(logits > 0, logits / factor, logits * factor)
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def laws(table, prompt, strength=STRENGTH):
    """`after` every continuation, in the order of `testing.prefix_distributions`."""
    texts = itertools.chain(*(itertools.product(range(V), repeat=n) for n in range(N + 1)))
    return np.array([after(table, [*prompt, *text], strength) for text in texts], np.float32)


def neural(kind=drafting.NeuralDrafter, name="drafter", longest=2):
    return kind(MODEL, longest, name=name)


def own(table):
    return drafting.NeuralDrafterParams(table)


# A drafter, its parameters, and the strength at which the distributions that it says are processed.
DRAFTERS = {
    "heeding": (neural(), own(Q), STRENGTH),
    "unheeding": (neural(Unheeding), own(Q), 1.0),
    "vertical": (
        drafting.VerticalCascade(neural(name="small", longest=1), MODEL, 2),
        drafting.VerticalCascadeParams(Q, own(R)),
        STRENGTH,
    ),
    "horizontal": (
        drafting.HorizontalCascade((neural(name="a", longest=1), neural(name="b", longest=1))),
        (own(Q), own(Q)),
        STRENGTH,
    ),
}


@pytest.mark.parametrize("name", variants(DRAFTERS, "heeding", "unheeding"))
def test_the_law_in_the_middle_of_blocks(name):
    drafter, params, said = DRAFTERS[name]
    one_round = decoding.Round(MODEL, drafter, verification.Block())
    law, prompt = Law(one_round, Penalty()), (0, 1)
    p, q = laws(P, prompt), laws(Q, prompt, said)
    sure = laws(Q, prompt, 1.0), laws(P, prompt, 1.0)  # confidences are the models' own
    for rule in (rules.Lossless(), rules.TokenV3(0.5)):
        given = decoding.MethodParams(P, params, rule, STRENGTH)
        target = testing.target_law(targets(rule, (q, p, *sure)), N)
        assert testing.total_variation(law(given, prompt, N), target) < 1e-5
    # The control: without the counts of what is drafted in the block, the law is another one.
    other = testing.target_law(targets(rule, (q, sure[1], *sure)), N)
    assert testing.total_variation(target, other) > 0.02


INPUTS = np.array([[0, 1, 2], [2, 0, 0], [1, 1, 0]], np.int32)
LENGTHS = np.array([3, 1, 2], np.int32)
PAIR = {"verifier": MODEL, "drafter": MODEL, "processor": Penalty()}
METHODS = {
    "alone": (decoding.Autoregressive(MODEL, processor=Penalty()), Q, rules.Lossless()),
    "speculative": (
        decoding.Speculative(MODEL, neural(longest=3), processor=Penalty()),
        own(Q),
        rules.OPT(0.2),
    ),
    "token cascade": (decoding.TokenCascade(**PAIR, limit=2), Q, rules.Chow(0.4)),
    "bild": (
        decoding.BiLDCascade(**PAIR, limit=2),
        Q,
        rules.FallbackRollback(rules.Chow(0.4), rules.BiLD(1.0)),
    ),
    "oracle": (decoding.OracleCascade(**PAIR), Q, rules.Diff(0.1)),
    "sequence": (decoding.SequenceCascade(**PAIR), Q, rules.SequenceChow(0.9)),
}


@pytest.mark.parametrize(
    "name", variants(METHODS, "alone", "speculative", "token cascade", "sequence")
)
def test_every_token_of_ragged_rows_has_its_own_processed_chance(name):
    """Token by token, over rows that are refilled in the middle of others' texts."""
    method, small, rule = METHODS[name]
    params = decoding.MethodParams(P, small, rule, STRENGTH)

    def start(ids):
        kinds = np.array(ids) % 3
        batch = types.PromptBatch(
            INPUTS[kinds], LENGTHS[kinds], np.array(ids), np.array([7, 2, 7])[kinds], seeds=5
        )
        return method.init(params, batch, max_new=7, token_log_probs=True)

    state = method.run(params, start(range(12)), 100, 2)
    slots = np.flatnonzero(np.asarray(state.finished))[:2].astype(np.int32)
    assert slots.size == 2
    fresh = [12 + int(slot) % 3 for slot in slots]
    state = method.run(params, insert_rows(state, jnp.asarray(slots), start(fresh)), 100)
    seen = 0
    for row in range(12):
        prompt = INPUTS[row % 3, : LENGTHS[row % 3]].tolist()
        if row in slots:
            at = fresh[slots.tolist().index(row)] % 3
            prompt = INPUTS[at, : LENGTHS[at]].tolist()
        count = int(state.lengths[row])
        text = np.asarray(state.tokens[row])[:count].tolist()
        for i, found in enumerate(np.asarray(state.info.token_log_p[row])[:count]):
            if not np.isnan(found):  # the verifier has read it
                want = np.log(after(P, [*prompt, *text[:i]])[text[i]])
                np.testing.assert_allclose(found, want, atol=1e-4)
                seen += i > 1
    assert seen > 12


def test_a_processor_is_told_by_its_name_if_it_is_wrong():
    @dataclasses.dataclass(frozen=True)
    class Wide(Penalty):
        def process(self, params, state, logits):
            return jnp.concatenate([logits, logits], axis=1)

    @dataclasses.dataclass(frozen=True)
    class Other(Penalty):
        def advance(self, state, tokens):
            return state.astype(jnp.float32)

    params = decoding.MethodParams(P, processor=STRENGTH)
    given = {"ids": np.arange(3), "limits": np.full(3, 2), "max_new": 2}
    for kind, message in ((Wide, "Wide.process: logits must be"), (Other, "Other.advance: state")):
        method = decoding.Autoregressive(MODEL, processor=kind())
        with pytest.raises(TypeError, match=message):
            method.run(params, begin(method, params, INPUTS, LENGTHS, **given), 5)
    with pytest.raises(TypeError, match="processor must be .*, got 3"):
        decoding.Autoregressive(MODEL, processor=3)
    with pytest.raises(ValueError, match=r"sampling has a processor: .* specjax.processing"):
        on = types.Processing(Penalty(), STRENGTH, jnp.zeros((1, V), jnp.int32))
        sampling.distribution(jnp.zeros(V), sampling.Sampling(processing=on))


def test_one_strength_after_another_compiles_nothing():
    method = METHODS["alone"][0]
    given = {"ids": np.arange(3), "limits": np.full(3, 4), "max_new": 4}

    def texts(strength):
        params = decoding.MethodParams(P, processor=np.float32(strength))
        state = begin(method, params, INPUTS, LENGTHS, sampling=sampling.Sampling(0.0), **given)
        return np.asarray(method.run(params, state, 10).tokens)

    mild = texts(1.0)
    before = decoding.loop.jitted_run().num_programs()
    plain = decoding.Autoregressive(MODEL)
    alone = decoding.MethodParams(P)
    state = begin(plain, alone, INPUTS, LENGTHS, sampling=sampling.Sampling(0.0), **given)
    np.testing.assert_array_equal(mild, plain.run(alone, state, 10).tokens)
    assert (texts(9.0) != mild).any()
    assert decoding.loop.jitted_run().num_programs() == before + 1  # that of `plain`
