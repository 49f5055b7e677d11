"""Sequential cascades: their exact laws, through the compiled loop, and their counts by hand."""

import collections
import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decoding, drafting, rules, testing
from specjax.types import ENDED_BY, PromptBatch, Sampling
from tests import laws
from tests.decoding import cascade_laws
from tests.decoding.helpers import begin
from tests.laws import EOS, MODEL, V
from tests.tables import p_value
from tests.variants import variants

BOTH = {"verifier": MODEL, "drafter": MODEL, "eos_ids": (EOS,)}
PROMPTS = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 1]], np.int32)
LENGTHS = np.array([1, 2, 3], np.int32)
ROWS = [laws.Row((0,), 4), laws.Row((1, 0), 3, temperature=0.7), laws.Row((0, 1, 1), 4)]
BILD = rules.FallbackRollback(rules.Chow(0.4), rules.BiLD(1.0))
# Rule -> does it defer after a response whose tokens have these confidences?
RESPONSES = {
    rules.SequenceChow(0.8): lambda probs: probs.prod() < 0.2,
    rules.SequenceChowLog(1.0): lambda probs: np.log(probs).sum() < -1.0,
    rules.SequenceChow(0.5, rules.Mean()): lambda probs: np.log(probs).mean() < np.log(0.5),
    rules.SequenceChow(0.5, rules.Quantile(0.25)): lambda probs: (
        np.quantile(np.log(probs), 0.25) < np.log(0.5)
    ),
}
SURE, _, MEAN, _ = RESPONSES


class Case(NamedTuple):
    """A cascade.

    Attributes:
      law: `Models` -> the law of the texts.
      others: laws that it must be told from.
    """

    method: Any
    rule: Any
    law: Any
    others: tuple[Any, ...]


def token(longest, rule):
    # The control: after the longest run the rule decides again, as in SpecCascade [Chow].
    return Case(
        decoding.TokenCascade(longest, **BOTH),
        rule,
        lambda models: cascade_laws.token_cascade(models, rule, longest),
        (lambda models: cascade_laws.token_cascade(models, rule, 99),),
    )


def bild(longest):
    # The controls: nothing is cut back; what ends with a draft is read first.
    return Case(
        decoding.BiLDCascade(longest, **BOTH),
        BILD,
        lambda models: cascade_laws.bild(models, BILD, longest),
        (
            lambda models: cascade_laws.token_cascade(models, BILD.fallback, longest),
            lambda models: cascade_laws.bild(models, BILD, longest, unread=False),
        ),
    )


def alone(name):
    return lambda models: cascade_laws.alone(getattr(models, name), models.limit)


ENDS = alone("q"), alone("p")
CASES = {
    "token": token(2, rules.Chow(0.55)),
    "token, one": token(1, rules.Chow(0.4)),
    "token, entropy": token(1, rules.ChowLog(1.05)),
    "token, entropy, two": token(2, rules.ChowLog(1.05)),
    "always falls": token(4, rules.Chow(0.0))._replace(law=ENDS[1], others=ENDS[:1]),
    "never falls": token(4, rules.Chow(1.0))._replace(law=ENDS[0], others=ENDS[1:]),
    "bild": bild(2),
    "bild, one": bild(1),
    **{
        name: Case(
            decoding.OracleCascade(**BOTH),
            rule,
            functools.partial(cascade_laws.oracle_cascade, rule=rule),
            ENDS,
        )
        for name, rule in {"oracle": rules.Diff(0.1), "oracle, log": rules.DiffLog(0.2)}.items()
    },
    **{
        "sequence" if rule is SURE else f"sequence, {rule}": Case(
            decoding.SequenceCascade(**BOTH),
            rule,
            functools.partial(cascade_laws.sequence_cascade, defers=defers),
            ENDS,
        )
        for rule, defers in RESPONSES.items()
    },
}
QUICK = ("token", "never falls", "bild", "oracle", "sequence", f"sequence, {MEAN}")


@pytest.mark.parametrize("name", variants(CASES, *QUICK))
def test_the_law_of_texts(name):
    """Beside other prompts, limits and temperatures."""
    method, rule, law, others = CASES[name]
    found = laws.Texts(method)(decoding.MethodParams(laws.P, laws.A, rule), ROWS)
    each = [(texts, cascade_laws.Models(row)) for texts, row in zip(found, ROWS, strict=True)]
    for texts, models in each:
        assert laws.distance(texts, law(models)) < 1e-6
    for other in others:
        assert max(laws.distance(texts, other(models)) for texts, models in each) > 0.01


MAIN = ("token", "bild", "oracle", "sequence")
LIMITS, LONG = [4, 3, 4], [6, 4, 5]


def params_of(rule, large=laws.P, small=laws.A):
    return decoding.MethodParams(jnp.asarray(large), jnp.asarray(small), rule)


def start(method, params, copies, limits, temperature=1.0, **more):
    rows = 3 * copies
    return begin(
        method,
        params,
        np.tile(PROMPTS, (copies, 1)),
        np.tile(LENGTHS, copies),
        ids=np.arange(rows),
        limits=np.tile(np.asarray(limits), copies),
        sampling=Sampling(temperature),
        max_new=int(np.max(limits)),
        **more,
    )


def outputs(state):
    tokens, emitted = np.asarray(state.tokens), np.asarray(state.lengths)
    return [tuple(row[:n].tolist()) for row, n in zip(tokens, emitted, strict=True)]


def run(name, rule=None, tables=(laws.P, laws.A), stop_after=1000):
    case = CASES[name]
    params = params_of(case.rule if rule is None else rule, *tables)
    state = start(case.method, params, 5, LONG)
    while not bool(state.finished.all()):
        state = case.method.run(params, state, stop_after)
    return state


def test_greedy_ends_are_the_models_own_texts():
    rng = np.random.default_rng(5)
    tables = [rng.standard_normal(((V + 1) ** 2, V)).astype(np.float32) for _ in range(2)]
    limits = [9, 7, 8]
    own = []
    for table in tables:
        method = decoding.Autoregressive(MODEL, eos_ids=(EOS,))
        params = decoding.MethodParams(jnp.asarray(table))
        state = start(method, params, 1, limits, temperature=0.0)
        own.append(outputs(method.run(params, state, 100)))
    assert own[0] != own[1]
    for rule, wanted, other in (
        (rules.Chow(0.0), own[0], "drafter"),
        (rules.Chow(1.0), own[1], "verifier"),
    ):
        method = decoding.TokenCascade(9, **BOTH)
        params = params_of(rule, *tables)
        state = method.run(params, start(method, params, 1, limits, temperature=0.0), 100)
        assert outputs(state) == wanted
        # Nothing rejects what the drafter has written, so it counts as no draft.
        assert not (np.asarray(state.info.drafted_lengths) @ np.arange(10)).any()
        if other == "verifier":
            assert not np.any(state.info.calls["verifier"]) and not np.any(state.info.deferrals)
            np.testing.assert_array_equal(state.info.calls["drafter"], state.lengths)
        else:
            np.testing.assert_array_equal(state.info.calls["verifier"], state.lengths)
            np.testing.assert_array_equal(state.info.deferrals, state.lengths)


# Greedy chains for counting by hand: token k is followed by k + 1, and 7 ends the text.
CHAIN = testing.TabularModel(8, 1)
UNSURE, ASTRAY = 2, 4


def chains():
    """The verifier's table and the drafter's, which is unsure after 2, and sure of 6 after 4."""
    large = np.zeros((9, 8), np.float32)
    large[np.arange(8), np.minimum(np.arange(8) + 1, 7)] = 6.0
    small = large.copy()
    small[UNSURE] *= 0.1
    small[ASTRAY] = np.roll(small[ASTRAY], 1)
    return large, small


def traced(method, rule, prompts, limits, **more):
    """The rows' outputs and counts, in one batch of prompts of different lengths."""
    longest = max(map(len, prompts))
    params = params_of(rule, *chains())
    state = begin(
        method,
        params,
        np.array([prompt + [0] * (longest - len(prompt)) for prompt in prompts], np.int32),
        np.array([len(prompt) for prompt in prompts], np.int32),
        ids=np.arange(len(prompts)),
        limits=np.array(limits),
        sampling=Sampling(0.0),
        max_new=max(limits),
        **more,
    )
    state = method.run(params, state, 100)
    info = state.info
    names = ("drafter", "verifier")
    counts = [*(info.calls[name] for name in names), info.deferrals, info.rollbacks, state.steps]
    rows = zip(outputs(state), np.stack(counts, axis=1).tolist(), strict=True)
    ended = [ENDED_BY[code] for code in np.asarray(state.ended_by)]
    return [(list(text), *row) for text, row in rows], ended, info


def test_the_token_cascades_passes_are_those_of_a_trace_by_hand():
    method = decoding.TokenCascade(10, verifier=CHAIN, drafter=CHAIN, eos_ids=(7,))
    rows, ended, info = traced(method, rules.Chow(0.2), [[0], [5, 2], [0], [3]], [8, 8, 2, 8])
    # Text; drafter's passes, verifier's, deferrals, rollbacks, steps.
    assert rows == [
        # Reads 0, 1, 2 and is unsure: 3 of the verifier. Reads 3, 4 (6, astray), 6 (the end).
        ([1, 2, 3, 4, 6, 7], 6, 1, 1, 0, 2),
        # Reads 2: 3 of the verifier. Reads 3, 4, 6.
        ([3, 4, 6, 7], 4, 1, 1, 0, 2),
        # Ends by its limit with tokens of the drafter: the verifier reads nothing.
        ([1, 2], 2, 0, 0, 0, 1),
        ([4, 6, 7], 3, 0, 0, 0, 1),
    ]
    assert ended == ["eos", "eos", "length", "eos"]
    for counts in (info.drafted_lengths, info.accepted_lengths):
        assert np.asarray(counts)[:, 0].tolist() == [2, 2, 1, 1]  # no blocks in any step
    # What the verifier has not read has no probability of its own.
    assert np.isnan(np.asarray(info.log_prob.processed)).all() and np.all(
        np.asarray(info.log_prob.target) <= 0.0
    )


def test_the_limit_calls_the_verifier():
    method = decoding.TokenCascade(2, verifier=CHAIN, drafter=CHAIN, eos_ids=(7,))
    rows, _, info = traced(method, rules.Chow(1.0), [[0], [5]], [8, 8])
    # [0]: reads 0, 1 and, at its limit, 2; 3 of the verifier. Reads 3, 4 and, at its limit, 6; the
    # verifier's token after 6 ends the text.
    assert rows[0] == ([1, 2, 3, 4, 6, 7], 6, 2, 2, 0, 2)
    assert rows[1] == ([6, 7], 2, 0, 0, 0, 1)
    np.testing.assert_allclose(
        np.asarray(info.log_prob.processed)[0], -np.inf
    )  # 6 after 4, when greedy
    # With draft limits of its own a row keeps to these; the drafter still reads every token.
    rows, _, _ = traced(method, rules.Chow(1.0), [[3], [3]], [8, 8], draft_limits=np.array([0, 1]))
    assert rows == [([4, 5, 6, 7], 4, 4, 4, 0, 4), ([4, 5, 6, 7], 4, 2, 2, 0, 2)]


def test_bilds_passes_are_those_of_a_trace_by_hand():
    method = decoding.BiLDCascade(2, verifier=CHAIN, drafter=CHAIN, eos_ids=(7,))
    rule = rules.FallbackRollback(rules.Chow(0.2), rules.BiLD(3.0))
    rows, ended, info = traced(method, rule, [[3], [0, 1], [4]], [8, 8, 8])
    assert rows == [
        # Drafts 4, 6 in 3 passes; 6 is cut back: 5 of the verifier. Drafts 6, 7.
        ([4, 5, 6, 7], 5, 1, 1, 1, 2),
        # Drafts 2, unsure: 3 of the verifier. Drafts 4, 6, cut back: 5. Drafts 6, 7.
        ([2, 3, 4, 5, 6, 7], 7, 2, 2, 1, 3),
        # Drafts 6, 7, which ends the text unread.
        ([6, 7], 2, 0, 0, 0, 1),
    ]
    assert ended == ["eos"] * 3
    assert np.asarray(info.drafted_lengths).tolist() == [[0, 0, 2], [0, 1, 2], [0, 0, 1]]
    assert np.asarray(info.accepted_lengths).tolist() == [[0, 1, 1], [0, 2, 1], [0, 0, 1]]


def test_the_oracles_passes_are_those_of_a_trace_by_hand():
    method = decoding.OracleCascade(verifier=CHAIN, drafter=CHAIN, eos_ids=(7,))
    rows, _, info = traced(method, rules.Diff(0.1), [[0], [3, 4]], [8, 2])
    # Only after 2 is the verifier surer.
    assert rows == [([1, 2, 3, 4, 6, 7], 6, 6, 1, 0, 6), ([6, 7], 2, 2, 0, 0, 2)]
    np.testing.assert_allclose(info.log_prob.target, [0.0, 0.0])


def test_the_sequence_cascades_passes_are_those_of_a_trace_by_hand():
    method = decoding.SequenceCascade(verifier=CHAIN, drafter=CHAIN, eos_ids=(7,))
    rule = rules.SequenceChow(0.6, rules.Quantile(0.0))
    rows, ended, info = traced(method, rule, [[0], [3, 4], [1]], [8, 8, 2])
    assert rows == [
        # The drafter writes 1, 2, 3, 4, 6, 7 and is unsure after 2: 7 tokens of the verifier.
        ([1, 2, 3, 4, 5, 6, 7], 6, 7, 7, 0, 13),
        ([6, 7], 2, 0, 0, 0, 2),
        ([2, 3], 2, 2, 2, 0, 4),
    ]
    assert ended == ["eos", "eos", "length"]
    assert np.asarray(info.log_prob.processed).tolist()[::2] == [0.0, 0.0] and np.isnan(
        info.log_prob.processed[1]
    )


def test_log_probabilities_by_token_are_those_of_the_text_that_stands():
    method = decoding.SequenceCascade(**BOTH)
    params = params_of(rules.SequenceChow(0.95))
    batch = method.init(
        params,
        PromptBatch(np.tile(PROMPTS, (4, 1)), np.tile(LENGTHS, 4), np.arange(12), np.full(12, 4)),
        max_new=4,
        log_probs=True,
    )
    state = method.run(params, batch, 100)
    deferred = np.asarray(state.info.deferrals) == np.asarray(state.lengths)
    assert not np.asarray(state.info.deferrals)[~deferred].any()
    assert deferred.any() and not deferred.all()
    by_token, lengths = np.asarray(state.info.log_probs.target), np.asarray(state.lengths)
    for row, text in enumerate(outputs(state)):
        models = cascade_laws.Models(ROWS[row % 3]._replace(limit=4, temperature=1.0))
        model = models.p if deferred[row] else models.q
        wanted = [np.log(model(text[:i])[token]) for i, token in enumerate(text)]
        np.testing.assert_allclose(by_token[row, : lengths[row]], wanted, rtol=1e-5)
        assert np.isnan(by_token[row, lengths[row] :]).all()
        np.testing.assert_allclose(state.info.log_prob.target[row], sum(wanted), rtol=1e-5)
        read = np.asarray(state.info.log_probs.processed)[row, : lengths[row]]
        assert np.isnan(read).all() != deferred[row] and np.isnan(read).any() != deferred[row]


@pytest.mark.parametrize("name", MAIN)
@pytest.mark.parametrize("broken", ["verifier", "drafter"])
def test_a_model_that_gives_nan_ends_its_rows(name, broken):
    method, rule = CASES[name][:2]
    nan = np.full_like(laws.P, np.nan)
    # All is deferred.
    low = {"token": rules.Chow(0.0), "sequence": rules.SequenceChow(0.0)}
    low["bild"] = rules.FallbackRollback(rules.Chow(0.0), rules.BiLD(0.0))
    tables = (nan, laws.A) if broken == "verifier" else (laws.P, nan)
    state = run(name, low.get(name, rule), tables)
    assert {ENDED_BY[code] for code in np.asarray(state.ended_by)} == {"nan"}
    assert not np.any(state.lengths)
    assert {method.nan_sources[i] for i in np.asarray(state.info.nan_in)} == {broken}


def test_a_vocabulary_that_takes_several_uniforms_a_draw():
    size = 520
    model = testing.TabularModel(size)
    tables = [testing.random_table(s, size, 1, scale=2.0) for s in (7, 8)]
    step = np.asarray(jax.nn.softmax(jnp.asarray(tables[1]), axis=-1), np.float64)[0]
    method = decoding.TokenCascade(1, verifier=model, drafter=model)
    params = params_of(rules.Chow(1.0), *tables)
    state = begin(
        method, params, np.zeros((4000, 1), np.int32), np.ones(4000, np.int32),
        ids=np.arange(4000), limits=np.full(4000, 2), max_new=2,
    )  # fmt: skip
    first = np.asarray(method.run(params, state, 10).tokens)[:, 0] % 4
    law = {g: float(step[g::4].sum()) for g in range(4)}
    assert p_value(collections.Counter(first.tolist()), law, 4000) > 1e-5


def test_bad_parts_are_named():
    with pytest.raises(ValueError, match="limit must be a whole number of at least 1, got -1"):
        decoding.TokenCascade(-1, verifier=MODEL, drafter=MODEL)
    with pytest.raises(ValueError, match=r"limit must be .* got 2\.5: give how many tokens"):
        decoding.BiLDCascade(2.5, verifier=MODEL, drafter=MODEL)
    with pytest.raises(ValueError, match="drafter's vocabulary has 4 tokens, the verifier's 3"):
        decoding.OracleCascade(verifier=MODEL, drafter=testing.TabularModel(4))
    with pytest.raises(ValueError, match=r"drafter must be like models\..*, got 3"):
        decoding.SequenceCascade(verifier=MODEL, drafter=3)
    with pytest.raises(ValueError, match=r"verifier must be like models\..*, got 3"):
        decoding.Speculative(3, drafting.Chain(MODEL, 2))
    with pytest.raises(ValueError, match=r"model must be like models\..*, got 3"):
        drafting.Chain(3, 2)
    wrong = [
        ("token", rules.Diff(0.1), "rule must read only the drafter, got Diff, which reads"),
        ("token", rules.TokenV3(0.1), "rule must be like .*it has no defers"),
        ("bild", rules.Chow(0.1), "rule must be a rules.FallbackRollback, got Chow"),
        ("oracle", rules.Lossy(0.1), "rule must be like rules.Diff"),
        ("sequence", rules.Chow(0.1), "rule must be like rules.SequenceChow"),
    ]
    for name, rule, message in wrong:
        with pytest.raises(ValueError, match=message):
            CASES[name].method.check_rule(rule)
    token = CASES["token"].method
    with pytest.raises(AssertionError, match="params must be MethodParams, got .*tuple"):
        start(token, (), 1, LIMITS)
    with pytest.raises(ValueError, match=r"rule.strength must be scalar or \[B\] = \(3,\)"):
        start(token, params_of(rules.Chow([0.1, 0.2])), 1, LIMITS)
    assert dataclasses.replace(token, limit=3).max_draft == 3
