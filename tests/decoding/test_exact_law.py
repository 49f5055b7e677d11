"""Whole sequences through the real loop follow the enumerated law, EOS and limits included."""

import collections
import functools
import itertools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decoding, drafting, platforms, rules, sampling, testing, types, verification
from specjax.types import Sampling
from tests import laws
from tests.decoding import helpers
from tests.decoding.helpers import AfterTokenOne, alone, begin, pair
from tests.tables import RULES, VERIFICATIONS, p_value
from tests.variants import variants

V, EOS, MODEL, PARAMS = laws.V, laws.EOS, laws.MODEL, (laws.P, laws.A)
PROMPTS = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 1]], np.int32)
LENGTHS = np.array([1, 2, 3], np.int32)
LIMITS = np.array([4, 3, 2], np.int32)
TEMPERATURES = np.array([1.0, 0.7, 1.3], np.float32)
ROWS = [
    laws.Row(tuple(prompt[:length].tolist()), limit, temperature=temperature)
    for prompt, length, limit, temperature in zip(
        PROMPTS, LENGTHS, LIMITS.tolist(), TEMPERATURES, strict=True
    )
]


def exact_law(rule, row):
    """The law of a row's whole output, from the models and the rule alone."""
    return laws.law_of(laws.target(rule, ROWS[row]), ROWS[row])


def sample(loop, rule, copies, *, stop_after=100, seed=0, stopping=()):
    rows = 3 * copies
    args = [np.tile(x, (copies,) + (1,) * (x.ndim - 1)) for x in (PROMPTS, LENGTHS)]
    state = begin(
        loop,
        pair(*PARAMS, stopping=stopping),
        *map(jnp.asarray, args),
        seeds=seed,
        ids=jnp.arange(rows, dtype=jnp.int32),
        limits=jnp.asarray(np.tile(LIMITS, copies)),
        sampling=Sampling(np.tile(TEMPERATURES, copies)),
        max_new=4,
        max_length=16,
    )
    while not bool(state.finished.all()):
        state = loop.run(pair(*PARAMS, rule, stopping), state, stop_after)
    return state


def outputs(state):
    tokens, emitted = np.asarray(state.tokens), np.asarray(state.lengths)
    return [tuple(row[:n].tolist()) for row, n in zip(tokens, emitted, strict=True)]


# G = 3, so that carry-overs nest.
CHAIN = drafting.Chain(laws.MODEL, 3)


def by_committed(state):
    """Limits of drafts that committed tokens decide: nothing after token 1, else by length."""
    last = jnp.take_along_axis(state.tokens, jnp.maximum(state.lengths - 1, 0)[:, None], axis=1)
    limits = jnp.where(last[:, 0] == 1, 0, (3 * state.lengths + 2) % 4)
    return state._replace(draft_limits=limits)


class Peeking(drafting.Chain):
    """The control: it drops a drafted token because of its value."""

    def propose(self, params, state, inputs, **options):
        block, state = super().propose(params, state, inputs, **options)
        kept = jnp.where(block.tokens[:, 0] == 1, 0, block.num_drafted)
        return block._replace(num_drafted=kept), state


# Name -> the drafter, and options of the method and of `Texts`.
LOOPS = {
    "fixed": (CHAIN, {}, {}),
    "stops": (drafting.Chain(laws.MODEL, 3, AfterTokenOne()), {}, {}),
    "catches up": (drafting.Chain(laws.MODEL, 2, catches_up=True), {}, {}),
    "limits": (CHAIN, {"widths": (1, 2, 4)}, {"between": by_committed}),
    "peeks": (Peeking(laws.MODEL, 3), {}, {}),
}
# Where these read it, all rules share a program; a rule by itself is another one.
SHARED = ("Lossless", "OPT", "Diff", "TokenV2", "TokenV3", "Lossy")
QUICK = [
    *(("fixed", name, SHARED) for name in VERIFICATIONS),
    *(("fixed", name, ("Lossless",)) for name in VERIFICATIONS),
    ("stops", "Token", SHARED),
    ("stops", "Block", ("Lossless",)),
    ("catches up", "Block", SHARED),
    ("limits", "Token", SHARED),
]
CASES = [
    *QUICK,
    *(("fixed", name, tuple(RULES)) for name in VERIFICATIONS),
    *itertools.product(("stops", "catches up", "limits"), ("Token", "Block"), (tuple(RULES),)),
]


def farthest(loop, name, names):
    """How far the texts of some row are from the law of its rule; and what was enumerated."""
    drafter, of_method, of_texts = LOOPS[loop]
    judge = VERIFICATIONS[name]
    method = decoding.Speculative(laws.MODEL, drafter, judge, eos_ids=(EOS,), **of_method)
    texts = laws.Texts(method, **of_texts)
    both = list(itertools.product(ROWS, names))
    rule = RULES[names[0]] if len(names) == 1 else laws.OneOf.by_row([name for _, name in both])
    params = decoding.MethodParams(laws.P, drafting.chain.ChainParams(laws.A), rule)
    found = texts(params, [row for row, _ in both])
    wanted = [laws.law_of(laws.target(RULES[name], row), row) for row, name in both]
    return max(map(laws.distance, found, wanted)), texts, found


@pytest.mark.parametrize("case", variants(CASES, *QUICK), ids=str)
def test_the_law_of_whole_texts(case):
    off, texts, found = farthest(*case)
    assert off < 1e-6
    # Where drafts may end early, they do.
    assert (len(texts.drafted) > 1) == (case[0] in ("stops", "limits"))
    # The control: another rule's law is told apart.
    other = "TokenV2" if case[2][0] == "Lossless" else "Lossless"
    assert laws.distance(found[0], exact_law(RULES[other], 0)) > 0.01


@pytest.mark.parametrize(("name", "names"), [("Block", SHARED), ("Token", ("Lossless",))])
def test_the_law_of_what_is_computed_on_tpus(name, names):
    with platforms.as_on_tpus():
        assert farthest("catches up", name, names)[0] < 1e-6


def test_a_wrong_choice_of_limits_is_seen():
    assert farthest("peeks", "Token", ("Lossless",))[0] > 0.01


COPIES = 7000
SOME = variants(VERIFICATIONS, "Block")


@pytest.mark.parametrize("name", SOME)
def test_the_law_with_keys_of_its_own(name):
    """Nothing is put in the place of the draws."""
    loop = decoding.Speculative(
        MODEL, drafting.Chain(MODEL, 3), VERIFICATIONS[name], eos_ids=(EOS,)
    )
    texts = outputs(sample(loop, RULES["Lossless"], COPIES))
    for row in range(3):
        seen = collections.Counter(texts[row::3])
        law, other = (exact_law(RULES[rule], row) for rule in ("Lossless", "TokenV2"))
        assert p_value(seen, law, COPIES) > 1e-5
        # The control: another rule's law is told apart by as many draws.
        if row == 0:
            assert p_value(seen, {k: other.get(k, 1e-9) for k in law}, COPIES) < 1e-5


def test_autoregressive_follows_the_verifier():
    loop = decoding.Autoregressive(MODEL, eos_ids=(EOS,))
    state = begin(
        loop,
        alone(PARAMS[0]),
        np.tile(PROMPTS, (COPIES, 1)),
        np.tile(LENGTHS, COPIES),
        seeds=1,
        ids=np.arange(3 * COPIES),
        limits=np.tile(LIMITS, COPIES),
        sampling=Sampling(np.tile(TEMPERATURES, COPIES)),
        max_new=4,
    )
    texts = outputs(loop.run(alone(PARAMS[0]), state, 100))
    for row in range(3):
        seen = collections.Counter(texts[row::3])
        assert p_value(seen, exact_law(RULES["Lossless"], row), COPIES) > 1e-5


@types.traced_dataclass
class Sharper:
    """pi is proportional to a power of p."""

    strength: object

    reads_draft: ClassVar[bool] = False
    reads_draft_confidence: ClassVar[bool] = False
    reads_verifier_confidence: ClassVar[bool] = False

    def __call__(self, q, p, q_conf=None, p_conf=None):
        powers = p**self.strength
        return powers / jnp.sum(powers)


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
    with pytest.raises(ValueError, match="Diff reads the drafter, but there is none"):
        loop.check_rule(rules.Diff(0.1))


class HalfARule:
    reads_draft = False

    def __call__(self, q, p, q_conf=None, p_conf=None):
        return p


class NotAPytree(HalfARule):
    reads_draft_confidence = reads_verifier_confidence = False


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (HalfARule(), "HalfARule has no reads_draft_confidence, reads_verifier_confidence"),
        (NotAPytree(), "rule must be a pytree, got NotAPytree: decorate the class"),
    ],
)
def test_what_a_rule_without_a_drafter_lacks_is_named(rule, message):
    params = decoding.MethodParams(PARAMS[0], rule=rule)
    batch = types.PromptBatch(PROMPTS, LENGTHS, np.arange(3), np.full(3, 5))
    with pytest.raises(ValueError, match=message):
        decoding.Autoregressive(MODEL).init(params, batch, max_new=5)


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


@pytest.mark.parametrize("name", SOME)
def test_a_row_is_the_same_in_any_company_and_in_any_slices(name):
    loop = decoding.Speculative(
        MODEL, drafting.Chain(MODEL, 3), VERIFICATIONS[name], eos_ids=(EOS,)
    )
    rule = RULES["TokenV3"]
    whole = sample(loop, rule, 8)
    sliced = sample(loop, rule, 8, stop_after=1)
    jax.tree.map(np.testing.assert_array_equal, whole.info, sliced.info)
    np.testing.assert_array_equal(whole.tokens, sliced.tokens)
    # Alone, in wider padding, with a longer cache.
    for row in (1, 5, 23):
        kind = row % 3
        state = begin(
            loop,
            pair(*PARAMS),
            jnp.asarray(np.pad(PROMPTS[kind : kind + 1], ((0, 0), (0, 4)))),
            jnp.asarray(LENGTHS[kind : kind + 1]),
            seeds=0,
            ids=jnp.array([row], jnp.int32),
            limits=jnp.asarray(LIMITS[kind : kind + 1]),
            sampling=Sampling(TEMPERATURES[kind]),
            max_new=4,
            max_length=21,
        )
        state = loop.run(pair(*PARAMS, rule), state, 100)
        np.testing.assert_array_equal(state.tokens[0], whole.tokens[row])
    assert len({outputs(whole)[i] for i in range(0, 24, 3)}) > 1
    np.testing.assert_array_equal(sample(loop, rule, 8).tokens, whole.tokens)
    assert (sample(loop, rule, 8, seed=1).tokens != whole.tokens).any()


def test_the_drafter_as_verifier_accepts_everything_and_totals_add_up():
    loop = decoding.Speculative(MODEL, drafting.Chain(MODEL, 3), verification.Block())
    params = pair(PARAMS[0], PARAMS[0])
    state = begin(
        loop,
        params,
        jnp.asarray(PROMPTS),
        jnp.asarray(LENGTHS),
        seeds=0,
        ids=jnp.arange(3),
        limits=jnp.array([9, 4, 0]),
        sampling=Sampling(),
        max_new=9,
        max_length=20,
    )
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


def test_refilled_slots_decode_as_fresh_rows():
    loop = decoding.Speculative(MODEL, drafting.Chain(MODEL, 2), eos_ids=(EOS,))
    params, rule = pair(*PARAMS), RULES["Diff"]

    def init(ids):
        kinds = [i % 3 for i in ids]
        return begin(
            loop,
            params,
            jnp.asarray(PROMPTS[kinds]),
            jnp.asarray(LENGTHS[kinds]),
            seeds=3,
            ids=jnp.array(ids),
            limits=jnp.asarray(LIMITS[kinds]),
            sampling=Sampling(TEMPERATURES[kinds]),
            max_new=4,
            max_length=16,
        )

    state, later = (
        loop.run(params._replace(rule=rule), init(ids), 100) for ids in ([0, 1, 2, 3], [4, 5, 6, 7])
    )
    want = outputs(state) + outputs(later)
    state = decoding.method.insert_rows(state, jnp.array([2, 0]), init([6, 5]))
    got = outputs(loop.run(params._replace(rule=rule), state, 100))
    assert got == [want[5], want[1], want[6], want[3]]


def test_a_sweep_compiles_once():
    from specjax.decoding.method import jitted_run

    loop = decoding.Speculative(MODEL, drafting.Chain(MODEL, 1), eos_ids=(EOS,))
    sample(loop, rules.OPT(0.0), 1)
    before = jitted_run().num_programs()
    for strength in np.linspace(0, 1, 5):
        sample(loop, rules.OPT(strength), 1)
    assert jitted_run().num_programs() == before


def test_parts_that_do_not_fit_are_refused():
    other = testing.TabularModel(V + 1, 1)
    with pytest.raises(ValueError, match="drafter's vocabulary has 4 tokens, the verifier's 3"):
        decoding.Speculative(MODEL, drafting.Chain(other, 2))
    with pytest.raises(ValueError, match="max_draft must be a whole number of at least 1, got 0"):
        drafting.Chain(MODEL, 0)


def test_greedy_block_refuses_drafts_that_stop_early():
    drafter = drafting.Chain(MODEL, 3, AfterTokenOne())
    with pytest.raises(ValueError, match="Chain has fixed_length=False"):
        decoding.Speculative(MODEL, drafter, verification.GreedyBlock())


def test_greedy_block_refuses_draft_limits():
    loop = decoding.Speculative(
        MODEL, drafting.Chain(MODEL, 3), verification.GreedyBlock(), eos_ids=(EOS,)
    )
    start = functools.partial(begin, loop, pair(*PARAMS), PROMPTS, LENGTHS, ids=np.arange(3))
    with pytest.raises(ValueError, match=r"draft_limits must lie in \[3, 3\], got 0 in row 1"):
        start(limits=LIMITS, max_new=4, draft_limits=np.array([3, 0, 3]))
    start(limits=LIMITS, max_new=4, draft_limits=np.array([3, 3, 3]))


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


BAD = [
    ({"max_length": 9}, "max_length must be at least 10, got 9: the longest prompt takes 3 pos"),
    ({"input_lengths": [1, 2, 4]}, r"input_lengths must lie in \[1, 3\], got 4 in row 2"),
    ({"input_lengths": [0, 2, 3]}, r"input_lengths must lie in \[1, 3\], got 0 in row 0"),
    ({"inputs": [[0, 0, 0], [1, 7, 0], [0, 1, 1]]}, r"inputs must lie in \[0, 2\], got 7 in row 1"),
    ({"limits": [4, 5, 4]}, r"limits must lie in \[0, 4\], got 5 in row 1"),
    ({"draft_limits": [0, 1, 3]}, r"draft_limits must lie in \[0, (0|2)\], got [13] in row [12]"),
    ({"draft_limits": [0, -1, 0]}, r"draft_limits must lie in \[0, [02]\], got -1 in row 1"),
    ({"draft_limits": [0]}, r"draft_limits must be \[B\] = \(3,\), got shape \(1,\)"),
    ({"limits": [4]}, r"limits must be \[B\] = \(3,\), got shape \(1,\)"),
    ({"ids": [0, 1, 2, 3]}, r"ids must be \[B\] = \(3,\), got shape \(4,\)"),
    ({"seeds": [1]}, r"seeds must be scalar or \[B\] = \(3,\), got shape \(1,\)"),
    ({"seeds": [1, 2]}, r"seeds must be scalar or \[B\] = \(3,\), got shape \(2,\)"),
    ({"seeds": 2**40}, r"seeds must lie in \[0, 4294967295\], got 1099511627776"),
    ({"sampling": [1.0, 1.0]}, r"sampling.temperature must be scalar or \[B\] = \(3,\)"),
    ({"inputs": PROMPTS * 1.0}, "inputs must be of an integer dtype, got float64"),
    ({"seeds": 0.5}, "seeds must be of an integer dtype, got float64"),
    ({"prefix": [[0, 1], [0, -4], [0, 0]]}, r"prefix must lie in \[0, 2\], got -4 in row 1"),
    ({"prefix": [[0, 1], [0, 0], [3, 0]]}, r"prefix must lie in \[0, 2\], got 3 in row 2"),
    ({"prefix": [[0, 1]]}, r"prefix must be \[B, F\] = \(3, 2\), got shape \(1, 2\)"),
    ({"prefix": [0, 1, 1]}, r"prefix must be \[B, F\] = \(3, 3\), got shape \(3,\)"),
    ({"prefix": 1}, r"prefix must be \[B, F\] = \(3, 0\), got shape \(\)"),
    (
        {"prefix": [[0, 1]] * 3, "prefix_lengths": [2, 0, 5]},
        r"prefix_lengths must lie in \[0, 2\], got 5 in row 2",
    ),
    (
        {"prefix": [[0, 1]] * 3, "prefix_lengths": [-1, 0, 2]},
        r"prefix_lengths must lie in \[0, 2\], got -1 in row 0",
    ),
    ({"prefix": [[0, 1]] * 3, "prefix_lengths": [2]}, r"prefix_lengths must be \[B\] = \(3,\)"),
    (
        {"prefix_lengths": [1, 1, 1]},
        "prefix_lengths was given without prefix: give both or neither",
    ),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=lambda x: str(x)[:20])
@pytest.mark.parametrize("alone", [True, False])
def test_bad_input_is_named_before_any_work(change, message, alone):
    arguments = {
        "inputs": PROMPTS, "input_lengths": LENGTHS, "seeds": 0, "ids": [0, 1, 2],
        "limits": LIMITS, "sampling": 1.0, "max_new": 4, "max_length": 16,
    } | change  # fmt: skip
    arguments["sampling"] = Sampling(arguments["sampling"])
    for name in arguments.keys() - {"seeds", "sampling", "max_new", "max_length"}:
        arguments[name] = np.asarray(arguments[name])
    if alone:
        loop, params = decoding.Autoregressive(MODEL), helpers.alone(PARAMS[0])
        if "max_length" in change:
            arguments["max_length"], message = 7, "max_length must be at least 8, got 7"
    else:
        loop = decoding.Speculative(MODEL, drafting.Chain(MODEL, 2))
        params = pair(*PARAMS)
    with pytest.raises(ValueError, match=message):
        begin(loop, params, **arguments)


def test_parts_of_a_wrong_kind_are_named():
    drafter = drafting.Chain(MODEL, 2)
    with pytest.raises(ValueError, match="eos_ids must be a tuple of token ids"):
        decoding.Speculative(MODEL, drafter, eos_ids=[2])
    with pytest.raises(ValueError, match=r"eos_ids must lie in \[0, 2\], got 3"):
        decoding.Autoregressive(MODEL, eos_ids=(3,))
    with pytest.raises(ValueError, match=r"verification must be an instance, got the class Block"):
        decoding.Speculative(MODEL, drafter, verification.Block)
    with pytest.raises(ValueError, match="max_draft must be a whole number of at least 1, got 2.0"):
        drafting.Chain(MODEL, 2.0)
    loop = decoding.Speculative(MODEL, drafter)
    start = functools.partial(begin, loop, inputs=PROMPTS, input_lengths=LENGTHS, ids=np.arange(3))
    with pytest.raises(ValueError, match="rule must be an instance, got the class OPT"):
        start(pair(*PARAMS, rules.OPT), limits=LIMITS, max_new=4)
    with pytest.raises(ValueError, match=r"rule.strength must be scalar or \[B\] = \(3,\)"):
        start(pair(*PARAMS, rules.OPT([0.1, 0.2])), limits=LIMITS, max_new=4)
    with pytest.raises(AssertionError, match="a loop of no steps would never end"):
        sample(loop, rules.OPT(0.1), 1, stop_after=-1)
