"""Processors follow the tokens: exactly, in the middle of blocks, row by row."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import (
    decoding,
    drafting,
    processing,
    processors,
    rules,
    sampling,
    testing,
    types,
    verification,
)
from specjax.decoding.method import insert_rows
from tests import laws
from tests.decoding.helpers import begin, bound_to
from tests.laws import Law
from tests.models.tiny import quick_jit
from tests.tables import RULES, targets
from tests.variants import variants

V, N = 3, 3
MODEL = testing.TabularModel(V, 2)
P, Q, R = (jnp.asarray(testing.random_table(s, V, 2, scale=1.5)) for s in (1, 2, 3))
STRENGTH = 1.8


def softmax(logits):
    weights = np.exp(logits - logits.max())
    return weights / weights.sum()


def penalised(logits, prompt, output):
    seen = np.isin(np.arange(V), [*prompt, *output])
    weaker = np.where(logits > 0, logits / STRENGTH, logits * STRENGTH)
    return np.where(seen, weaker, logits)


def counted(logits, prompt, output):
    return logits - 0.7 * np.bincount(output, minlength=V)[:V]


def present(logits, prompt, output):
    return logits - 0.9 * np.isin(np.arange(V), output)


def none_twice(length, logits, prompt, output):
    """No run of so many tokens."""
    text = [*prompt, *output]
    runs = set(zip(*(text[i:] for i in range(length)), strict=False))
    banned = np.array([(*text[1 - length :], token) in runs for token in range(V)])
    return logits if banned.all() else np.where(banned, -np.inf, logits)


def ends_late(logits, prompt, output):
    return np.where((np.arange(V) == 2) & (len(output) < 2), -np.inf, logits)


def second_is_one(logits, prompt, output):
    return np.where(np.arange(V) == 1, 0.0, -np.inf) if len(output) == 1 else logits


def not_zero_first(logits, prompt, output):
    return np.where((np.arange(V) == 0) & (len(output) < 1), -np.inf, logits)


def cooled(logits, prompt, output):
    return logits / (1.5 + (0.5 - 1.5) * min(len(output) / 2, 1.0))


def at_least(part):
    """Keeps what has `part` of the largest probability."""
    return lambda p: p >= part * p.max()


def typical(p):
    far = np.abs(-np.log(p) - -(p * np.log(p)).sum())
    order = np.argsort(far)
    count = np.sum(np.cumsum(p[order]) < 0.6) + 1
    return np.isin(np.arange(V), order[:count])


def eta(p):
    edge = min(0.3, np.sqrt(0.3) * np.exp((p * np.log(p)).sum()))
    return (p >= edge) | (p == p.max())


def cut(keep):
    """Logits of what `keep` keeps."""

    def change(logits, prompt, output):
        logits = np.asarray(logits, np.float64)
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(keep(softmax(logits)), logits, -np.inf)

    return change


# Name -> a processor, and the same for one text in plain numbers.
PROCESSORS = {
    "LogitBias": (
        processors.LogitBias({0: 1.5, 2: -0.5}),
        lambda logits, prompt, output: logits + np.array([1.5, 0.0, -0.5]),
    ),
    "RepetitionPenalty": (processors.RepetitionPenalty(STRENGTH), penalised),
    "FrequencyPenalty": (processors.FrequencyPenalty(0.7), counted),
    "PresencePenalty": (processors.PresencePenalty(0.9), present),
    "NoRepeatNgram": (processors.NoRepeatNgram(2), functools.partial(none_twice, 2)),
    "MinNewTokens": (processors.MinNewTokens(2, eos_ids=(2,)), ends_late),
    "ForcedTokens": (processors.ForcedTokens({1: 1}), second_is_one),
    "SuppressTokens": (processors.SuppressTokens((0,), first=1), not_zero_first),
    "LinearTemperature": (processors.LinearTemperature(1.5, 0.5, 2), cooled),
    "MinP": (processors.MinP(0.5), cut(at_least(0.5))),
    "TypicalP": (processors.TypicalP(0.6), cut(typical)),
    "EpsilonCutoff": (
        processors.EpsilonCutoff(0.25),
        cut(lambda p: (p >= 0.25) | (p == p.max())),
    ),
    "EtaCutoff": (processors.EtaCutoff(0.3), cut(eta)),
}
# Several at once; those of the second kind come last, whatever the order they are given in.
STACKED = ("MinP", "NoRepeatNgram", "LinearTemperature", "RepetitionPenalty", "FrequencyPenalty")
ORDERED = ("RepetitionPenalty", "FrequencyPenalty", "NoRepeatNgram", "LinearTemperature", "MinP")


def after(table, prompt, output, changes):
    """The distribution after an output, from the table and the tokens alone."""
    context = [V, V, *prompt, *output][-2:]
    logits = np.asarray(table, np.float64)[context[0] * (V + 1) + context[1]]
    for change in changes:
        logits = change(logits, list(prompt), list(output))
    return softmax(logits)


def laws_after(table, prompt, changes):
    """`after` every continuation, in the order of `testing.prefix_distributions`."""
    texts = itertools.chain(*(itertools.product(range(V), repeat=n) for n in range(N + 1)))
    return np.array([after(table, prompt, text, changes) for text in texts], np.float32)


def neural(name="drafter", longest=2, stopping=None):
    return drafting.Chain(MODEL, longest, stopping or drafting.FixedLength(), name=name)


def own(table, stopping=()):
    return drafting.chain.ChainParams(table, stopping)


STOPS, THRESHOLD = drafting.Confidence(0.5).bind(None)
# A drafter and its parameters. Those of a cascade lag behind.
DRAFTERS = {
    "fixed": (neural(), own(Q)),
    "unprocessed": (neural(), own(Q)),
    "stopped": (neural(stopping=STOPS), own(Q, THRESHOLD)),
    "vertical": (
        drafting.cascades.VerticalCascade(neural("small", 1), MODEL, 2),
        decoding.MethodParams(Q, own(R)),
    ),
    "horizontal": (
        drafting.cascades.HorizontalCascade((neural("a", 1), neural("b", 1))),
        (own(Q), own(Q)),
    ),
}
CASES = [
    ((name,), drafter, verify)
    for name, drafter, verify in itertools.product(PROCESSORS, DRAFTERS, ("Block", "Token"))
] + [(STACKED, drafter, verify) for drafter in DRAFTERS for verify in ("Block", "Token")]
QUICK = [
    (("RepetitionPenalty",), "fixed", "Block"),
    (("NoRepeatNgram",), "stopped", "Token"),
    (STACKED, "fixed", "Block"),
    (STACKED, "unprocessed", "Token"),
    (STACKED, "vertical", "Block"),
    (STACKED, "horizontal", "Block"),
]


def begun_round(names, drafter, verify):
    """A round with processors, its parameters for a rule, and the changes in plain numbers."""
    proposer, params = DRAFTERS[drafter]
    judge = {"Block": verification.Block(), "Token": verification.Token()}[verify]
    processed = drafter != "unprocessed"
    method = decoding.Speculative(MODEL, proposer, judge, process_drafts=processed)
    given, shared = bound_to(V, *(PROCESSORS[x][0] for x in names))
    law = Law(method, processors=given)
    ordered = [name for name in (ORDERED if len(names) > 1 else names) if name in names]
    return (
        law,
        lambda rule: decoding.MethodParams(P, params, rule, shared),
        [PROCESSORS[name][1] for name in ordered],
    )


def wanted(rule, changes, drafter):
    """The law of the outputs, token by token."""
    prompt = (0, 1)
    of_q = () if drafter == "unprocessed" else changes
    p, q = laws_after(P, prompt, changes), laws_after(Q, prompt, of_q)
    sure = laws_after(Q, prompt, ()), laws_after(P, prompt, ())  # confidences are the models' own
    return testing.target_law(targets(rule, (q, p, *sure)), N)


@pytest.mark.parametrize("case", variants(CASES, *QUICK), ids=str)
def test_the_law_in_the_middle_of_blocks(case):
    names, drafter, verify = case
    law, params, changes = begun_round(names, drafter, verify)
    both = ("Lossless", "OPT")
    found = law.texts(params(laws.OneOf.by_row(both)), [laws.Row(limit=N)] * 2)
    for name, of_rule in zip(both, found, strict=True):
        target = wanted(RULES[name], changes, drafter)
        assert testing.total_variation(laws.array_of(of_rule, V, N), target) < 1e-5


def stale(following):
    """`processing._process_along` with the tokens that `following` leaves of a block's."""
    real = processing._process_along

    def along(drawn, logits, tokens, parents):
        states = [drawn]
        for i in range(tokens.shape[1]):
            states.append(
                processing.advance(states[-1], tokens[:, i : i + 1], jnp.ones(len(tokens)))
            )
        states = [states[i] for i in following(tokens.shape[1])]
        columns = [
            real(state, logits[:, i : i + 1], tokens[:, :0], None) for i, state in enumerate(states)
        ]
        return jnp.concatenate([x for x, _ in columns], axis=1), columns[0][1]

    return along


@pytest.mark.parametrize(
    ("what", "following", "least"),
    [
        ("right", lambda n: range(n + 1), None),
        ("once per step", lambda n: [0] * (n + 1), 0.02),
        ("the bonus one token late", lambda n: [*range(n), n - 1], 0.005),
    ],
)
def test_a_state_that_does_not_follow_gives_another_law(what, following, least, monkeypatch):
    monkeypatch.setattr(processing, "_process_along", stale(following))
    law, params, changes = begun_round(("FrequencyPenalty",), "fixed", "Block")
    target = wanted(RULES["Lossless"], changes, "fixed")
    found = testing.total_variation(law(params(RULES["Lossless"]), (0, 1), N), target)
    assert found < 1e-5 if least is None else found > least, what


def test_a_state_that_is_not_rolled_back_gives_another_law(monkeypatch):
    def forwards(drawn, tokens, counts):
        return processing.advance(drawn, tokens, jnp.full_like(counts, tokens.shape[1]))

    monkeypatch.setattr(decoding.method, "advance", forwards)
    law, params, changes = begun_round(("FrequencyPenalty",), "fixed", "Block")
    target = wanted(RULES["Lossless"], changes, "fixed")
    assert testing.total_variation(law(params(RULES["Lossless"]), (0, 1), N), target) > 0.02


INPUTS = np.array([[0, 1, 2], [2, 0, 0], [1, 1, 0]], np.int32)
LENGTHS = np.array([3, 1, 2], np.int32)
PAIR = {"verifier": MODEL, "drafter": MODEL}
METHODS = {
    "alone": (decoding.Autoregressive(MODEL), Q, rules.Lossless()),
    "speculative": (
        decoding.Speculative(MODEL, neural(longest=3)),
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


# Each row with its own strengths.
PENALTIES = np.array([1.8, 1.0, 3.0], np.float32)


@pytest.mark.parametrize(
    "name", variants(METHODS, "alone", "speculative", "token cascade", "sequence")
)
def test_every_token_of_ragged_rows_has_its_own_processed_chance(name):
    """Token by token, over rows that are refilled in the middle of others' texts."""
    method, small, rule = METHODS[name]
    params = decoding.MethodParams(P, small, rule, ((), ()))

    def start(ids):
        kinds = np.array(ids) % 3
        changes = processors.NoRepeatNgram(3), processors.FrequencyPenalty(PENALTIES[kinds])
        batch = types.PromptBatch(
            INPUTS[kinds],
            LENGTHS[kinds],
            np.array(ids),
            np.array([7, 2, 7])[kinds],
            seeds=5,
            sampling=types.Sampling(processors=changes),
        )
        return method.init(params, batch, max_new=7, log_probs=True)

    state = method.run(params, start(range(12)), 100, 2)
    slots = np.flatnonzero(np.asarray(state.finished))[:2].astype(np.int32)
    assert slots.size == 2
    fresh = [12 + int(slot) % 3 for slot in slots]
    state = method.run(params, insert_rows(state, jnp.asarray(slots), start(fresh)), 100)
    seen = 0
    for row in range(12):
        at = fresh[slots.tolist().index(row)] % 3 if row in slots else row % 3
        prompt = INPUTS[at, : LENGTHS[at]].tolist()
        count = int(state.lengths[row])
        text = np.asarray(state.tokens[row])[:count].tolist()

        def weakened(logits, prompt, output, at=at):
            return logits - PENALTIES[at] * np.bincount(output, minlength=V)[:V]

        for i, found in enumerate(np.asarray(state.info.log_probs.processed[row])[:count]):
            if not np.isnan(found):  # the verifier has read it
                chances = after(P, prompt, text[:i], (weakened, functools.partial(none_twice, 3)))
                np.testing.assert_allclose(found, np.log(chances[text[i]]), atol=1e-4)
                seen += i > 1
    assert seen > 12


@types.traced_dataclass
class Wide(types.Processor):
    def process(self, params, state, logits):
        return jnp.concatenate([logits, logits], axis=1)


@types.traced_dataclass
class Other(types.Processor):
    def init(self, params, prompts, vocab_size, room):
        return jnp.zeros(prompts.input_lengths.shape, jnp.int32)

    def process(self, params, state, logits):
        return logits

    def advance(self, params, state, tokens):
        return state.astype(jnp.float32)


GIVEN = {"ids": np.arange(3), "limits": np.full(3, 4), "max_new": 4}


@pytest.mark.parametrize(("kind", "message"), [(Wide, "Wide.process returns"), (Other, "dtypes")])
def test_a_wrong_processor_is_named(kind, message):
    params, method = decoding.MethodParams(P, processors=((),)), decoding.Autoregressive(MODEL)
    drawn = types.Sampling(processors=(kind(),))
    with pytest.raises((AssertionError, ValueError), match=message):
        method.run(params, begin(method, params, INPUTS, LENGTHS, sampling=drawn, **GIVEN), 5)


def test_wrong_values_are_refused():
    with pytest.raises(ValueError, match=r"processors must be a tuple .*, got 3"):
        types.Sampling(processors=3)
    with pytest.raises(
        ValueError, match=r"processors\[0\] must be an instance, got the class MinP"
    ):
        types.Sampling(processors=(processors.MinP,))
    drawn = types.Sampling(processors=(processors.MinP(0.1),))
    with pytest.raises(AssertionError, match=r"draw rows by the functions of specjax.processing"):
        sampling.distributions.distribution(jnp.zeros(V), drawn)
    method = decoding.Autoregressive(MODEL)
    with pytest.raises(AssertionError, match="one for each processor"):
        begin(method, decoding.MethodParams(P), INPUTS, LENGTHS, sampling=drawn, **GIVEN)


def test_no_processor_leaves_a_row_without_tokens():
    """Each alone would leave none at the second position: the one that comes last is left out."""
    forced, shared = bound_to(V, processors.ForcedTokens({1: 1}), processors.SuppressTokens((1,)))
    params = decoding.MethodParams(P, processors=shared)
    method = decoding.Autoregressive(MODEL)
    drawn = types.Sampling(processors=forced)
    state = begin(method, params, INPUTS, LENGTHS, sampling=drawn, **GIVEN)
    tokens = np.asarray(method.run(params, state, 10).tokens)
    assert (tokens[:, 1] == 1).all() and (tokens[:, [0, 2, 3]] != 1).all()


def test_no_processor_hides_a_nan():
    """Token 0 has it. Some processors forbid this token, or cut it off."""
    logits = jnp.array([[np.nan, 2.0, 1.0], [0.0, 2.0, 1.0]])
    batch = types.PromptBatch(INPUTS[:2], LENGTHS[:2], np.arange(2), np.full(2, 4))
    for name, (processor, _) in PROCESSORS.items():
        given, shared = bound_to(V, processor)
        drawn = types.Sampling(processors=given)

        @quick_jit
        def hidden(drawn, shared, logits):
            state = processing.initial_processing(batch._replace(sampling=drawn), V, 4, shared)
            drawn = jax.tree.map(lambda x: jnp.broadcast_to(x, 2), drawn)
            drawn = processing.with_params(processing.with_processing(drawn, state), shared)
            return jnp.isnan(processing.distributions(logits, drawn)).any(axis=1)

        found = hidden(drawn, shared, logits)
        np.testing.assert_array_equal(found, [True, False], err_msg=name)


LARGEST = 3e38
LARGE = [
    processors.LogitBias({0: LARGEST, 1: -LARGEST}),
    processors.RepetitionPenalty(LARGEST),
    processors.RepetitionPenalty(1e-37),
    processors.FrequencyPenalty(LARGEST),
    processors.FrequencyPenalty(-LARGEST),
    processors.PresencePenalty(LARGEST),
    processors.LinearTemperature(1e-37, 1e-37, 1),
]


@pytest.mark.parametrize("processor", LARGE, ids=repr)
def test_no_strength_is_too_large(processor):
    """The text is still one that another processor allows."""
    given, shared = bound_to(V, processors.SuppressTokens((2,)), processor, processor)
    params = decoding.MethodParams(P, processors=shared)
    for temperature in (0.0, 1e-6, 1.0):
        method, drawn = decoding.Autoregressive(MODEL), types.Sampling(temperature)
        drawn = dataclasses.replace(drawn, processors=given)
        state = begin(method, params, INPUTS, LENGTHS, sampling=drawn, **GIVEN)
        state = method.run(params, state, 10)
        assert (np.asarray(state.lengths) == 4).all()
        assert (np.asarray(state.tokens) != 2).all()


def test_one_strength_after_another_compiles_nothing():
    method = METHODS["alone"][0]

    def texts(strength):
        params = decoding.MethodParams(P, processors=((),))
        changes = (processors.RepetitionPenalty(strength),)
        drawn = types.Sampling(0.0, processors=changes)
        state = begin(method, params, INPUTS, LENGTHS, sampling=drawn, **GIVEN)
        return np.asarray(method.run(params, state, 10).tokens)

    run = decoding.method.jitted_run()
    # Other tests may have compiled the same program.
    run._alone(jax.default_backend()).clear_cache()
    mild = texts(1.0)
    assert run.num_programs() == 1
    alone = decoding.MethodParams(P)
    state = begin(method, alone, INPUTS, LENGTHS, sampling=types.Sampling(0.0), **GIVEN)
    np.testing.assert_array_equal(mild, method.run(alone, state, 10).tokens)
    assert run.num_programs() == 2  # without a processor
    assert (texts(9.0) != mild).any()
    assert run.num_programs() == 2
