"""Whole sequences through the real loop follow the enumerated law, EOS and limits included."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from specjax import decoding, drafting, sampling, testing, verification
from tests.tables import RULES, VERIFICATIONS

V, EOS = 3, 2
MODEL = testing.TabularModel(V, 2)
PARAMS = tuple(jnp.asarray(testing.random_table(s, V, 2, scale=1.2, zeros=0.1)) for s in (5, 6))
PROMPTS = np.array([[0, 0, 0], [1, 0, 0], [0, 1, 1]], np.int32)
LENGTHS = np.array([1, 2, 3], np.int32)
LIMITS = np.array([4, 3, 2], np.int32)
TEMPERATURES = np.array([1.0, 0.7, 1.3], np.float32)


@functools.cache
def tables(row):
    """q, p, q_conf, p_conf after every continuation of a row's prompt."""
    out = []
    for params in PARAMS:
        for temperature in (TEMPERATURES[row], 1.0):
            settings = sampling.Sampling(temperature)
            out.append(
                testing.prefix_distributions(
                    MODEL,
                    params,
                    PROMPTS[row, : LENGTHS[row]],
                    3,
                    lambda x, settings=settings: sampling.distribution(x, settings),
                )
            )
    p, p_conf, q, q_conf = out
    return q, p, q_conf, p_conf


@jax.jit
def apply(rule, *args):
    return jax.vmap(rule)(*args)


def exact_law(rule, row):
    """The law of a row's whole output, from the models and the rule alone."""
    pi = np.asarray(apply(rule, *tables(row)))
    law: dict[tuple[int, ...], float] = {}
    limit = LIMITS[row]
    full = testing.target_law(pi, limit)
    for value, tokens in enumerate(itertools.product(range(V), repeat=limit)):
        end = tokens.index(EOS) + 1 if EOS in tokens else limit
        law[tokens[:end]] = law.get(tokens[:end], 0.0) + full[value]
    return law


def sample(loop, rule, copies, *, stop_after=100, seed=0):
    rows = 3 * copies
    args = [np.tile(x, (copies,) + (1,) * (x.ndim - 1)) for x in (PROMPTS, LENGTHS)]
    state = loop.init(
        (PARAMS[0], (PARAMS[1], ())),
        *map(jnp.asarray, args),
        seed=seed,
        ids=jnp.arange(rows, dtype=jnp.int32),
        limits=jnp.asarray(np.tile(LIMITS, copies)),
        sampling=sampling.Sampling(np.tile(TEMPERATURES, copies)),
        max_new=4,
        max_length=16,
    )
    while not bool(state.finished.all()):
        state = loop.run((PARAMS[0], (PARAMS[1], ())), rule, state, stop_after)
    return state


def p_value(seen, law, draws):
    assert all(law.get(k, 0.0) > 0.0 for k in seen)
    big = [k for k, v in law.items() if v * draws >= 5]
    observed = np.array([seen.get(k, 0) for k in big] + [0.0])
    expected = np.array([law[k] * draws for k in big] + [0.0])
    observed[-1], expected[-1] = draws - observed.sum(), draws - expected.sum()
    if expected[-1] < 5:
        observed, expected = observed[:-1], expected[:-1]
        expected *= observed.sum() / expected.sum()
    return stats.chisquare(observed, expected, sum_check=False).pvalue


def outputs(state):
    tokens, emitted = np.asarray(state.tokens), np.asarray(state.info.emitted)
    return [tuple(row[:n].tolist()) for row, n in zip(tokens, emitted, strict=True)]


COPIES = 7000


@pytest.mark.parametrize("name", VERIFICATIONS)
def test_the_law_of_whole_sequences(name):
    loop = decoding.Speculative(
        MODEL, drafting.NeuralDrafter(MODEL, 2), VERIFICATIONS[name], (EOS,)
    )
    for rule_name, rule in RULES.items():
        texts = outputs(sample(loop, rule, COPIES))
        for row in range(3):
            seen: dict[tuple[int, ...], int] = {}
            for text in texts[row::3]:
                seen[text] = seen.get(text, 0) + 1
            law = exact_law(rule, row)
            assert p_value(seen, law, COPIES) > 1e-5, (rule_name, row)
            if rule_name == "Lossless" and row == 0:
                # The control: another rule's law is told apart by as many draws.
                other = exact_law(RULES["TokenV2"], row)
                assert p_value(seen, {k: other.get(k, 1e-9) for k in law}, COPIES) < 1e-5


def test_autoregressive_follows_the_verifier():
    loop = decoding.Autoregressive(MODEL, (EOS,))
    copies = 7000
    state = loop.init(
        PARAMS[0],
        jnp.asarray(np.tile(PROMPTS, (copies, 1))),
        jnp.asarray(np.tile(LENGTHS, copies)),
        seed=1,
        ids=jnp.arange(3 * copies, dtype=jnp.int32),
        limits=jnp.asarray(np.tile(LIMITS, copies)),
        sampling=sampling.Sampling(np.tile(TEMPERATURES, copies)),
        max_new=4,
        max_length=8,
    )
    texts = outputs(loop.run(PARAMS[0], state, 100))
    for row in range(3):
        seen: dict[tuple[int, ...], int] = {}
        for text in texts[row::3]:
            seen[text] = seen.get(text, 0) + 1
        assert p_value(seen, exact_law(RULES["Lossless"], row), copies) > 1e-5


@pytest.mark.parametrize("name", VERIFICATIONS)
def test_a_row_is_the_same_in_any_company_and_in_any_slices(name):
    loop = decoding.Speculative(
        MODEL, drafting.NeuralDrafter(MODEL, 3), VERIFICATIONS[name], (EOS,)
    )
    rule = RULES["TokenV3"]
    whole = sample(loop, rule, 8)
    sliced = sample(loop, rule, 8, stop_after=1)
    jax.tree.map(np.testing.assert_array_equal, whole.info, sliced.info)
    np.testing.assert_array_equal(whole.tokens, sliced.tokens)
    # Alone, in wider padding, with a longer cache.
    for row in (1, 5, 23):
        kind = row % 3
        state = loop.init(
            (PARAMS[0], (PARAMS[1], ())),
            jnp.asarray(np.pad(PROMPTS[kind : kind + 1], ((0, 0), (0, 4)))),
            jnp.asarray(LENGTHS[kind : kind + 1]),
            seed=0,
            ids=jnp.array([row], jnp.int32),
            limits=jnp.asarray(LIMITS[kind : kind + 1]),
            sampling=sampling.Sampling(TEMPERATURES[kind]),
            max_new=4,
            max_length=21,
        )
        state = loop.run((PARAMS[0], (PARAMS[1], ())), rule, state, 100)
        np.testing.assert_array_equal(state.tokens[0], whole.tokens[row])
    assert len({outputs(whole)[i] for i in range(0, 24, 3)}) > 1
    np.testing.assert_array_equal(sample(loop, rule, 8).tokens, whole.tokens)
    assert (sample(loop, rule, 8, seed=1).tokens != whole.tokens).any()


def test_the_drafter_as_verifier_accepts_everything_and_totals_add_up():
    loop = decoding.Speculative(MODEL, drafting.NeuralDrafter(MODEL, 3), verification.Block(), ())
    params = (PARAMS[0], (PARAMS[0], ()))
    state = loop.init(
        params,
        jnp.asarray(PROMPTS),
        jnp.asarray(LENGTHS),
        seed=0,
        ids=jnp.arange(3),
        limits=jnp.array([9, 4, 0]),
        sampling=sampling.Sampling(),
        max_new=9,
        max_length=20,
    )
    info = loop.run(params, RULES["Lossless"], state, 100).info
    np.testing.assert_array_equal(info.emitted, [9, 4, 0])
    np.testing.assert_array_equal(info.rounds, [3, 1, 0])
    np.testing.assert_array_equal(info.drafted, 3 * info.rounds)
    np.testing.assert_array_equal(info.accepted, info.drafted)
    np.testing.assert_array_equal(info.discarded, 0)
    np.testing.assert_array_equal(info.accepted_at.sum(1), info.accepted)
    np.testing.assert_array_equal(info.drafter_calls, 4 * info.rounds)
    np.testing.assert_allclose(info.block_sum, info.accepted, atol=1e-5)
    np.testing.assert_allclose(info.log_p, info.log_target, atol=1e-5)


def test_refilled_slots_decode_as_fresh_rows():
    loop = decoding.Speculative(MODEL, drafting.NeuralDrafter(MODEL, 2), eos_ids=(EOS,))
    params, rule = (PARAMS[0], (PARAMS[1], ())), RULES["Diff"]

    def init(ids):
        kinds = [i % 3 for i in ids]
        return loop.init(
            params,
            jnp.asarray(PROMPTS[kinds]),
            jnp.asarray(LENGTHS[kinds]),
            seed=3,
            ids=jnp.array(ids),
            limits=jnp.asarray(LIMITS[kinds]),
            sampling=sampling.Sampling(TEMPERATURES[kinds]),
            max_new=4,
            max_length=16,
        )

    want = outputs(loop.run(params, rule, init(list(range(8))), 100))
    state = loop.run(params, rule, init([0, 1, 2, 3]), 100)
    assert outputs(state) == want[:4]
    state = decoding.insert_rows(state, jnp.array([2, 0]), init([6, 5]))
    got = outputs(loop.run(params, rule, state, 100))
    assert got == [want[5], want[1], want[6], want[3]]


def test_a_sweep_compiles_once():
    from specjax import rules
    from specjax.decoding import _speculative

    loop = decoding.Speculative(MODEL, drafting.NeuralDrafter(MODEL, 1), eos_ids=(EOS,))
    sample(loop, rules.OPT(0.0), 1)
    before = _speculative._run._cache_size()
    for alpha in np.linspace(0, 1, 5):
        sample(loop, rules.OPT(alpha), 1)
    assert _speculative._run._cache_size() == before


def test_parts_that_do_not_fit_are_refused():
    other = testing.TabularModel(V + 1, 1)
    with pytest.raises(ValueError, match="drafter's vocabulary has 4 tokens, the verifier's 3"):
        decoding.Speculative(MODEL, drafting.NeuralDrafter(other, 2))
    with pytest.raises(ValueError, match="max_draft must be at least 1, got 0"):
        drafting.NeuralDrafter(MODEL, 0)
