"""Sequential cascades: their exact laws, through the compiled loop, and their counts by hand."""

import collections
import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decoding, drafting, rules, testing
from specjax.decoding import cascades
from specjax.types import ENDED_BY, PromptBatch, Sampling
from tests.decoding import cascade_laws as laws
from tests.decoding.helpers import begin
from tests.tables import p_value
from tests.variants import variants

V, EOS = laws.V, laws.EOS
MODEL = testing.TabularModel(V, 2)
BOTH = {"verifier": MODEL, "drafter": MODEL, "eos_ids": (EOS,)}
LARGE, SMALL = (laws.random_thirds(seed) for seed in (35, 36))
PROMPTS = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 1]], np.int32)
LENGTHS = np.array([1, 2, 3], np.int32)
Q, P = (
    [
        laws.reader(table, list(prompt[:n]))
        for prompt, n in zip(PROMPTS.tolist(), LENGTHS, strict=True)
    ]
    for table in (SMALL, LARGE)
)
MODULES = (cascades,)


def params_of(rule, large=LARGE, small=SMALL):
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


@functools.cache
def _with_uniforms_of(kind, steps, limits):
    """A class of its own, for which nothing is compiled yet with these uniforms."""
    return type("Enumerated", (kind,), {})


def enumerated(kind, rule, limits, steps, draws, monkeypatch, **fields):
    """The exact laws of the three prompts' texts, in fractions, out of the compiled loop.

    Every value of all uniforms that `steps` steps of `draws` draws take, once.
    """
    values = np.array([1, 3, 5]) / 6.0
    grid = np.array(list(itertools.product(values, repeat=steps * draws)), np.float32)
    copies = len(grid)
    grid = jnp.asarray(np.repeat(grid.reshape(copies, steps, draws), 3, axis=0))

    def uniforms(state, count):
        assert count == draws
        step = jnp.minimum(state.steps, steps - 1)
        return jnp.take_along_axis(grid, step[:, None, None], axis=1)[:, 0]

    for module in MODULES:
        monkeypatch.setattr(module, "step_uniforms", uniforms)
    method = _with_uniforms_of(kind, steps, tuple(limits))(**BOTH, **fields)
    params = params_of(rule)
    state = method.run(params, start(method, params, copies, limits), 10_000)
    assert int(np.max(state.steps)) <= steps
    texts = outputs(state)
    found = [collections.Counter(texts[row::3]) for row in range(3)]
    return [{k: laws.Fraction(n, copies) for k, n in counts.items()} for counts in found]


def chow(strength):
    return lambda q: max(q) < laws.Fraction(1) - laws.Fraction(strength)


def by_rule(rule):
    """The decision of a rule at one position; `specjax.rules` has its own tests."""

    def defers(q, p):
        q, p = laws.floats(q), laws.floats(p)
        return bool(rule.defers(q, p, q, p))

    return defers


LIMITS = [3, 2, 3]


ENTROPY = rules.ChowLog(0.8), lambda q: max(q) < laws.Fraction(1, 2)


@pytest.mark.parametrize(
    ("rule", "falls", "longest", "limits"),
    [
        (rules.Chow(0.4), chow("0.4"), 1, [4, 3, 4]),
        (*ENTROPY, 2, LIMITS),
        pytest.param(rules.Chow(0.4), chow("0.4"), 2, LIMITS, marks=pytest.mark.exhaustive),
        pytest.param(*ENTROPY, 1, [4, 3, 4], marks=pytest.mark.exhaustive),
    ],
)
def test_the_token_cascade_follows_its_law_exactly(rule, falls, longest, limits, monkeypatch):
    found = enumerated(
        decoding.TokenCascade, rule, limits, max(limits), longest + 1, monkeypatch, limit=longest
    )
    wrong = 0.0
    for q, p, limit, law in zip(Q, P, limits, found, strict=True):
        assert law == laws.token_cascade(q, p, limit, falls, longest)
        # The control: after the longest run the rule decides again, as in SpecCascade [Chow].
        wrong = max(wrong, laws.distance(law, laws.token_cascade(q, p, limit, falls, 99)))
    assert wrong > 0.01


@pytest.mark.parametrize("strength", [0.0, 1.0])
def test_the_ends_of_the_token_cascade_are_the_models(strength, monkeypatch):
    rule = rules.Chow(strength)
    found = enumerated(decoding.TokenCascade, rule, [2, 2, 2], 2, 3, monkeypatch, limit=2)
    for q, p, law in zip(Q, P, found, strict=True):
        ours, other = (q, p) if strength else (p, q)
        assert law == laws.alone(ours, 2)
        assert law != laws.alone(other, 2)


BILD = rules.FallbackRollback(rules.Chow(0.4), rules.BiLD(1.0))


@pytest.mark.parametrize(
    ("longest", "limits"),
    [(2, LIMITS), pytest.param(1, [4, 3, 4], marks=pytest.mark.exhaustive)],
)
def test_bild_follows_its_law_exactly(longest, limits, monkeypatch):
    found = enumerated(
        decoding.BiLDCascade, BILD, limits, max(limits), longest + 1, monkeypatch, limit=longest
    )
    falls, rolls = chow("0.4"), by_rule(BILD.rollback)
    wrong = np.zeros(2)
    for q, p, limit, law in zip(Q, P, limits, found, strict=True):
        assert law == laws.bild(q, p, limit, falls, rolls, longest)
        # The controls: nothing is cut back; what ends with a draft is read first.
        others = (
            laws.token_cascade(q, p, limit, falls, longest),
            laws.bild(q, p, limit, falls, rolls, longest, unread=False),
        )
        wrong = np.maximum(wrong, [laws.distance(law, other) for other in others])
    assert (wrong > 0.01).all()


ORACLES = [rules.Diff(0.1), rules.DiffLog(0.2)]


@pytest.mark.parametrize("rule", variants(ORACLES, ORACLES[0]), ids=str)
def test_the_oracle_cascade_follows_its_law_exactly(rule, monkeypatch):
    found = enumerated(decoding.OracleCascade, rule, LIMITS, 3, 1, monkeypatch)
    defers = by_rule(rule)
    wrong = np.zeros(2)
    for q, p, limit, law in zip(Q, P, LIMITS, found, strict=True):
        assert law == laws.oracle_cascade(q, p, limit, defers)
        others = (laws.alone(q, limit), laws.alone(p, limit))
        wrong = np.maximum(wrong, [laws.distance(law, other) for other in others])
    assert (wrong > 0.01).all()


def product(probs):
    return np.prod([float(x) for x in probs])


RESPONSES = {
    "sum": (rules.SequenceChow(0.8), lambda probs: product(probs) < 0.2),
    "log": (rules.SequenceChowLog(1.0), lambda probs: np.log(product(probs)) < -1.0),
    "mean": (
        rules.SequenceChow(0.5, rules.Mean()),
        lambda probs: product(probs) ** (1 / len(probs)) < 0.5,
    ),
    "quantile": (
        rules.SequenceChow(0.5, rules.Quantile(0.25)),
        lambda probs: np.quantile(np.log([float(x) for x in probs]), 0.25) < np.log(0.5),
    ),
}


@pytest.mark.parametrize("name", variants(RESPONSES, "sum", "quantile"))
def test_the_sequence_cascade_follows_its_law_exactly(name, monkeypatch):
    rule, defers = RESPONSES[name]
    found = enumerated(decoding.SequenceCascade, rule, LIMITS, 6, 1, monkeypatch)
    wrong = np.zeros(2)
    for q, p, limit, law in zip(Q, P, LIMITS, found, strict=True):
        assert law == laws.sequence_cascade(q, p, limit, defers)
        others = (laws.alone(q, limit), laws.alone(p, limit))
        wrong = np.maximum(wrong, [laws.distance(law, other) for other in others])
    assert (wrong > 0.01).all()


CASES = {
    "token": (
        decoding.TokenCascade(2, **BOTH),
        rules.Chow(0.4),
    ),
    "bild": (decoding.BiLDCascade(2, **BOTH), BILD),
    "oracle": (
        decoding.OracleCascade(**BOTH),
        rules.Diff(0.1),
    ),
    "sequence": (
        decoding.SequenceCascade(**BOTH),
        rules.SequenceChow(0.8),
    ),
}
# Any probabilities, and one shape: what follows shares its programs.
ANY = [testing.random_table(seed, V, 2, scale=1.2) for seed in (5, 6)]
LONG = [6, 4, 5]


def run(name, rule=None, tables=ANY, stop_after=1000):
    method, own = CASES[name]
    params = params_of(own if rule is None else rule, *tables)
    state = start(method, params, 5, LONG)
    while not bool(state.finished.all()):
        state = method.run(params, state, stop_after)
    return state


LAWS = {
    "token": lambda q, p, n: laws.token_cascade(q, p, n, chow("0.4"), 2),
    "bild": lambda q, p, n: laws.bild(q, p, n, chow("0.4"), by_rule(BILD.rollback), 2),
    "oracle": lambda q, p, n: laws.oracle_cascade(q, p, n, by_rule(rules.Diff(0.1))),
    "sequence": lambda q, p, n: laws.sequence_cascade(q, p, n, RESPONSES["sum"][1]),
}


# Two that differ most; all in `make test-all`.
SOME = variants(CASES, "token", "sequence")


@pytest.mark.parametrize("name", variants(CASES, "token"))
def test_the_laws_hold_with_keys_of_their_own(name):
    method, rule = CASES[name]
    copies, params = 5000, params_of(rule)
    texts = outputs(method.run(params, start(method, params, copies, LIMITS, seeds=11), 1000))
    for row, (q, p, limit) in enumerate(zip(Q, P, LIMITS, strict=True)):
        law = {k: float(x) for k, x in LAWS[name](q, p, limit).items()}
        assert p_value(collections.Counter(texts[row::3]), law, copies) > 1e-5


@pytest.mark.parametrize("name", SOME)
def test_a_row_is_the_same_in_any_company_and_in_any_slices(name):
    method, rule = CASES[name]
    params = params_of(rule, *ANY)
    whole, sliced = run(name), run(name, stop_after=1)
    jax.tree.map(np.testing.assert_array_equal, whole.info, sliced.info)
    np.testing.assert_array_equal(whole.tokens, sliced.tokens)
    for row in (0, 4, 14):
        kind = row % 3
        alone = begin(
            method,
            params,
            np.pad(PROMPTS[kind : kind + 1], ((0, 0), (0, 4))),
            LENGTHS[kind : kind + 1],
            ids=np.array([row]),
            limits=np.array([LONG[kind]]),
            sampling=Sampling(1.0),
            max_new=6,
            max_length=30,
        )
        alone = method.run(params, alone, 1000)
        assert outputs(alone)[0] == outputs(whole)[row]
        for name in ("calls", "deferrals", "rollbacks", "drafted_lengths"):
            ours, theirs = (getattr(x.info, name) for x in (alone, whole))
            for one, all_rows in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
                np.testing.assert_array_equal(one[0], all_rows[row])
    assert len(set(outputs(whole))) > 3


@pytest.mark.parametrize("name", CASES)
def test_a_sweep_compiles_once_and_rows_may_have_their_own_strengths(name):
    from specjax.decoding.method import jitted_run

    def texts(strengths):
        return outputs(run(name, jax.tree.map(lambda x: strengths, CASES[name][1])))

    each = [texts(np.float32(0.0))]
    before = jitted_run().num_programs()
    each += [texts(np.float32(share)) for share in (0.5, 1.0)]
    assert jitted_run().num_programs() == before
    shares = np.arange(15, dtype=np.float32) % 2
    found = texts(shares)
    assert found == [each[2 if i % 2 else 0][i] for i in range(15)]
    assert each[0] != each[2]


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
        model = (P if deferred[row] else Q)[row % 3]
        wanted = [np.log(float(model(text[:i])[token])) for i, token in enumerate(text)]
        np.testing.assert_allclose(by_token[row, : lengths[row]], wanted, rtol=1e-5)
        assert np.isnan(by_token[row, lengths[row] :]).all()
        np.testing.assert_allclose(state.info.log_prob.target[row], sum(wanted), rtol=1e-5)
        read = np.asarray(state.info.log_probs.processed)[row, : lengths[row]]
        assert np.isnan(read).all() != deferred[row] and np.isnan(read).any() != deferred[row]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("broken", ["verifier", "drafter"])
def test_a_model_that_gives_nan_ends_its_rows(name, broken):
    method, rule = CASES[name]
    nan = np.full_like(LARGE, np.nan)
    # All is deferred.
    low = {"token": rules.Chow(0.0), "sequence": rules.SequenceChow(0.0)}
    low["bild"] = rules.FallbackRollback(rules.Chow(0.0), rules.BiLD(0.0))
    tables = (nan, ANY[1]) if broken == "verifier" else (ANY[0], nan)
    state = run(name, low.get(name, rule), tables)
    assert {ENDED_BY[code] for code in np.asarray(state.ended_by)} == {"nan"}
    assert not np.any(state.lengths)
    assert {method.nan_sources[i] for i in np.asarray(state.info.nan_in)} == {broken}


def test_a_vocabulary_that_takes_several_uniforms_a_draw():
    size = 150
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
    token, bild, oracle, sequence = (CASES[n][0] for n in ("token", "bild", "oracle", "sequence"))
    with pytest.raises(ValueError, match="rule must read only the drafter, got Diff, which reads"):
        token.check_rule(rules.Diff(0.1))
    with pytest.raises(ValueError, match=r"rule must be like .*it has no defers"):
        token.check_rule(rules.TokenV3(0.1))
    with pytest.raises(ValueError, match=r"rule must be a rules.FallbackRollback, got Chow"):
        bild.check_rule(rules.Chow(0.1))
    with pytest.raises(ValueError, match=r"rule must be like rules.Diff"):
        oracle.check_rule(rules.Lossy(0.1))
    with pytest.raises(ValueError, match=r"rule must be like rules.SequenceChow"):
        sequence.check_rule(rules.Chow(0.1))
    with pytest.raises(AssertionError, match="params must be MethodParams, got .*tuple"):
        start(token, (), 1, LIMITS)
    with pytest.raises(ValueError, match=r"rule.strength must be scalar or \[B\] = \(3,\)"):
        start(token, params_of(rules.Chow([0.1, 0.2])), 1, LIMITS)
    assert dataclasses.replace(token, limit=3).max_draft == 3
