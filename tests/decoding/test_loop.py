"""The loop: draws with keys of its own, rows in any company, refilled slots, wrong inputs."""

import collections
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decoding, drafting, rules, sampling, testing, types, verification
from specjax.decoding.method import jitted_run
from specjax.types import Sampling
from tests import laws
from tests.decoding import cascade_laws
from tests.decoding.helpers import AfterTokenOne, Sharper, begin, pair
from tests.decoding.test_cascades import CASES, LENGTHS, MAIN, PROMPTS, outputs, params_of
from tests.tables import RULES, VERIFICATIONS, p_value
from tests.variants import variants

V, EOS, MODEL, PARAMS = laws.V, laws.EOS, laws.MODEL, (laws.P, laws.A)
LIMITS = np.array([4, 3, 2], np.int32)
TEMPERATURES = np.array([1.0, 0.7, 1.3], np.float32)
ROWS = [
    laws.Row(tuple(prompt[:length].tolist()), limit, temperature=temperature)
    for prompt, length, limit, temperature in zip(
        PROMPTS, LENGTHS, LIMITS.tolist(), TEMPERATURES, strict=True
    )
]


class Parts(NamedTuple):
    """A method with its rule.

    Attributes:
      params: a rule -> the parameters.
      law: a row -> the law of its texts.
    """

    method: Any
    params: Any
    rule: Any
    law: Any


def speculative(judge, max_draft=3, **options):
    chain = drafting.Chain(MODEL, max_draft)
    return decoding.Speculative(MODEL, chain, judge, eos_ids=(EOS,), **options)


def by_rule(rule):
    return lambda row: laws.law_of(laws.target(rule, row), row)


def by_models(law):
    return lambda row: law(cascade_laws.Models(row))


LENIENT, EXACT = RULES["TokenV3"], RULES["Lossless"]
CHAINS = {
    name: Parts(speculative(judge), functools.partial(pair, *PARAMS), LENIENT, by_rule(LENIENT))
    for name, judge in VERIFICATIONS.items()
}
ALONE = Parts(
    decoding.Autoregressive(MODEL, eos_ids=(EOS,)),
    lambda rule: decoding.MethodParams(laws.P, rule=rule),
    EXACT,
    by_rule(EXACT),
)
SEQUENTIAL = {
    name: Parts(case.method, params_of, case.rule, by_models(case.law))
    for name, case in CASES.items()
    if name in MAIN
}
METHODS = CHAINS | {"alone": ALONE} | SEQUENTIAL


def start(parts, ids, rule=None, *, wider=0, **options):
    """Rows of the three kinds in turn."""
    ids = np.asarray(ids, np.int32)
    kinds = ids % 3
    given = {"limits": LIMITS[kinds], "max_new": 4, "max_length": 16} | options
    return begin(
        parts.method,
        parts.params(parts.rule if rule is None else rule),
        np.pad(PROMPTS[kinds], ((0, 0), (0, wider))),
        LENGTHS[kinds],
        ids=ids,
        sampling=Sampling(TEMPERATURES[kinds]),
        **given,
    )


def finish(parts, state, rule=None, stop_after=100):
    while not bool(state.finished.all()):
        params = parts.params(parts.rule if rule is None else rule)
        state = parts.method.run(params, state, stop_after)
    return state


COPIES = 7000
SOME = variants(VERIFICATIONS, "Block")
DIFFERENT = ("Block", "alone", "token", "sequence")


@pytest.mark.parametrize("name", variants(METHODS, *DIFFERENT[:3]))
def test_the_law_with_keys_of_its_own(name):
    """Nothing is put in the place of the draws."""
    parts = METHODS[name]
    texts = outputs(finish(parts, start(parts, range(3 * COPIES), seeds=11)))
    for row in range(3):
        seen, law = collections.Counter(texts[row::3]), parts.law(ROWS[row])
        assert p_value(seen, law, COPIES) > 1e-5
        # The control: another law is told apart by as many draws.
        if row == 0:
            models = cascade_laws.Models(ROWS[row])
            other = cascade_laws.alone(models.q if name == "alone" else models.p, 4)
            assert p_value(seen, {k: other.get(k, 1e-9) for k in law}, COPIES) < 1e-5


@pytest.mark.parametrize("name", variants(METHODS, *DIFFERENT))
def test_a_row_is_the_same_in_any_company_and_in_any_slices(name):
    parts = METHODS[name]
    whole = finish(parts, start(parts, range(24)))
    sliced = finish(parts, start(parts, range(24)), stop_after=1)
    jax.tree.map(np.testing.assert_array_equal, whole.info, sliced.info)
    np.testing.assert_array_equal(whole.tokens, sliced.tokens)
    # Alone, in wider padding, with a longer cache.
    for row in (1, 5, 23):
        state = finish(parts, start(parts, [row], wider=4, max_length=21))
        np.testing.assert_array_equal(state.tokens[0], whole.tokens[row])
        if name in SEQUENTIAL:  # whose passes are a row's own
            one, every = (
                (x.calls, x.deferrals, x.rollbacks, x.drafted_lengths)
                for x in (state.info, whole.info)
            )
            jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[0], y[row]), one, every)  # noqa: B023
    assert len(set(outputs(whole)[::3])) > 1
    np.testing.assert_array_equal(finish(parts, start(parts, range(24))).tokens, whole.tokens)
    other = finish(parts, start(parts, range(24), seeds=1))
    assert (other.tokens != whole.tokens).any()


@pytest.mark.parametrize("name", variants(METHODS, *DIFFERENT))
def test_refilled_slots_decode_as_fresh_rows(name):
    parts = METHODS[name]
    want = [
        text
        for ids in ([0, 1, 2, 3], [4, 5, 6, 7])
        for text in outputs(finish(parts, start(parts, ids)))
    ]
    state = finish(parts, start(parts, [0, 1, 2, 3]))
    state = decoding.method.insert_rows(state, jnp.array([2, 0]), start(parts, [6, 5]))
    assert outputs(finish(parts, state)) == [want[5], want[1], want[6], want[3]]


@pytest.mark.parametrize("name", [name for name in METHODS if name != "alone"])
def test_a_sweep_compiles_once_and_rows_may_have_their_own_strengths(name):
    parts = METHODS[name]

    def texts(strengths):
        rule = jax.tree.map(lambda x: strengths, parts.rule)
        return outputs(finish(parts, start(parts, range(15), rule), rule))

    each = [texts(np.float32(0.0))]
    before = jitted_run().num_programs()
    each += [texts(np.float32(share)) for share in (0.5, 1.0)]
    assert jitted_run().num_programs() == before
    shares = np.arange(15, dtype=np.float32) % 2
    assert texts(shares) == [each[2 if i % 2 else 0][i] for i in range(15)]
    assert each[0] != each[2]


def test_a_rule_that_reads_the_verifier_alone_decodes_alone():
    loop = decoding.Autoregressive(MODEL)
    rule = Sharper(np.array([1.0, 2.0, 3.0], np.float32))
    params = decoding.MethodParams(PARAMS[0], rule=rule)
    batch = types.PromptBatch(PROMPTS, LENGTHS, np.arange(3), np.full(3, 5))
    state = loop.init(params, batch, max_new=5, log_probs=True)
    state = loop.run(params, state, 100)
    table = np.asarray(PARAMS[0])
    for row, power in enumerate(rule.strength):
        text = [V, V, *PROMPTS[row, : LENGTHS[row]].tolist()]
        for i, token in enumerate(np.asarray(state.tokens[row]).tolist()):
            logits = table[text[-2] * (V + 1) + text[-1]]
            for found, by in (
                (state.info.log_probs.processed, 1.0),
                (state.info.log_probs.target, power),
            ):
                want = jax.nn.log_softmax(logits * by)[token]
                np.testing.assert_allclose(found[row, i], want, atol=1e-4)
            text.append(token)


class HalfARule:
    reads_draft = False

    def __call__(self, q, p, q_conf=None, p_conf=None):
        return p


class NotAPytree(HalfARule):
    reads_draft_confidence = reads_verifier_confidence = False


@pytest.mark.parametrize("name", SOME)
def test_a_vocabulary_that_takes_several_uniforms_a_draw(name):
    size, copies, length = 520, 5000, 3
    assert sampling.draws.num_uniforms(size) == 2
    model = testing.TabularModel(size)
    tables = [jnp.asarray(testing.random_table(s, size, 1, scale=2.0)) for s in (7, 8)]
    # From one token to the next; tokens are pooled by their remainder.
    steps = [np.asarray(jax.nn.softmax(table, axis=-1), np.float64)[:size] for table in tables]
    groups = np.eye(4)[np.arange(size) % 4]

    def pooled(step):
        joint = {(): np.eye(size)[0]}  # by groups so far: the mass at each last token
        for _ in range(length):
            joint = {
                (*key, g): (mass @ step) * groups[:, g]
                for key, mass in joint.items()
                for g in range(4)
            }
        return {key: float(mass.sum()) for key, mass in joint.items()}

    loop = decoding.Speculative(model, drafting.Chain(model, 2), VERIFICATIONS[name])
    params = pair(*tables)
    state = begin(
        loop,
        params,
        jnp.zeros((copies, 1), jnp.int32),
        jnp.ones(copies, jnp.int32),
        seeds=5,
        ids=jnp.arange(copies, dtype=jnp.int32),
        limits=jnp.full(copies, length, jnp.int32),
        sampling=Sampling(),
        max_new=length,
        max_length=8,
    )
    tokens = np.asarray(loop.run(params, state, 100).tokens)
    seen = collections.Counter(map(tuple, (tokens % 4).tolist()))
    assert p_value(seen, pooled(steps[0]), copies) > 1e-5
    assert p_value(seen, pooled(steps[1]), copies) < 1e-5


def test_the_drafter_as_verifier_accepts_everything_and_totals_add_up():
    loop = decoding.Speculative(MODEL, drafting.Chain(MODEL, 3), verification.Block())
    params = pair(PARAMS[0], PARAMS[0])
    given = {"ids": np.arange(3), "limits": np.array([9, 4, 0]), "max_new": 9}
    state = begin(loop, params, PROMPTS, LENGTHS, **given)
    state = loop.run(params, state, 100)
    info = state.info
    np.testing.assert_array_equal(state.lengths, [9, 4, 0])
    np.testing.assert_array_equal(state.steps, [3, 1, 0])
    np.testing.assert_array_equal(info.drafted_lengths[:, 3], state.steps)
    np.testing.assert_array_equal(info.drafted_lengths, info.accepted_lengths)
    np.testing.assert_array_equal(info.accepted_lengths.sum(1), state.steps)
    np.testing.assert_array_equal(info.calls["verifier"], state.steps)
    np.testing.assert_array_equal(info.calls["drafter"], 4 * state.steps)
    accepted = info.accepted_lengths @ np.arange(4)
    np.testing.assert_allclose(info.block_sum, accepted, atol=1e-5)
    np.testing.assert_allclose(info.log_prob.processed, info.log_prob.target, atol=1e-5)


def test_a_finished_row_makes_no_passes():
    loop = decoding.Speculative(MODEL, drafting.Chain(MODEL, 3), eos_ids=())
    params = pair(*PARAMS)

    def calls(limits):
        rows = len(limits)
        state = begin(
        loop,
            params, jnp.zeros((rows, 1), jnp.int32), jnp.ones((rows,), jnp.int32), seeds=0,
            ids=jnp.arange(rows), limits=jnp.array(limits), sampling=Sampling(),
            max_new=20, max_length=32,
        )  # fmt: skip
        return int(loop.run(params, state, 100).info.calls["drafter"][0])

    assert calls([20]) == calls([20, 0, 0, 0, 0, 0])


def begun(*rule):
    given = {"ids": np.arange(3), "limits": LIMITS, "max_new": 4}
    return begin(speculative(verification.Block()), pair(*PARAMS, *rule), PROMPTS, LENGTHS, **given)


PARTS = [
    (
        lambda: decoding.Speculative(MODEL, drafting.Chain(testing.TabularModel(V + 1, 1), 2)),
        "drafter's vocabulary has 4 tokens, the verifier's 3",
    ),
    (lambda: drafting.Chain(MODEL, 0), "max_draft must be a whole number of at least 1, got 0"),
    (lambda: drafting.Chain(MODEL, 2.0), "max_draft must be a whole number of at least 1, got 2.0"),
    (
        lambda: decoding.Speculative(
            MODEL, drafting.Chain(MODEL, 2, AfterTokenOne()), verification.GreedyBlock()
        ),
        "Chain has fixed_length=False",
    ),
    (lambda: decoding.Autoregressive(MODEL, eos_ids=[2]), "eos_ids must be a tuple of token ids"),
    (lambda: decoding.Autoregressive(MODEL, eos_ids=(3,)), r"eos_ids must lie in \[0, 2\], got 3"),
    (
        lambda: speculative(verification.Block),
        "verification must be an instance, got the class Block",
    ),
    (lambda: begun(rules.OPT), "rule must be an instance, got the class OPT"),
    (lambda: begun(rules.OPT([0.1, 0.2])), r"rule.strength must be scalar or \[B\] = \(3,\)"),
    (
        lambda: decoding.Autoregressive(MODEL).check_rule(rules.Diff(0.1)),
        "Diff reads the drafter, but there is none",
    ),
    (
        lambda: decoding.Autoregressive(MODEL).check_rule(HalfARule()),
        "HalfARule has no reads_draft_confidence, reads_verifier_confidence",
    ),
    (
        lambda: decoding.Autoregressive(MODEL).check_rule(NotAPytree()),
        "rule must be a pytree, got NotAPytree: decorate the class",
    ),
]


@pytest.mark.parametrize(("make", "message"), PARTS)
def test_parts_that_do_not_fit_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
    with pytest.raises(AssertionError, match="a loop of no steps would never end"):
        speculative(verification.Block()).run(pair(*PARAMS), begun(), 0)
