"""Cascades in the whole loop: caches that are moved back, limits, EOS, passes, greedy outputs."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decoding, drafting, rules, testing
from specjax.types import PromptBatch, Sampling
from tests.decoding import test_loop as whole
from tests.drafting import binding
from tests.models.tiny import tiny


def run(method, params, rows=3, new=16, **prompts):
    given = {
        "inputs": np.random.default_rng(0).integers(3, 40, (rows, 5)).astype(np.int32),
        "input_lengths": np.array([5, 2, 4] * (rows // 3) or [5], np.int32),
        "ids": np.arange(rows),
        "limits": np.full(rows, new),
        "sampling": Sampling(0.0),
    } | prompts
    state = method.init(params, PromptBatch(**given), max_new=new)
    return method.run(params, state, 1000)


@functools.cache
def target(family):
    """A model and its parameters."""
    if family != "table":
        return tiny(family)[:2]
    return testing.TabularModel(48, 1), jnp.asarray(testing.random_table(3, 48, 1))


@functools.cache
def near(family, noise):
    """The model's parameters, with noise: it often agrees with the model."""
    keys = iter(jax.random.split(jax.random.key(7), 200))
    return jax.tree.map(
        lambda x: x + noise * jnp.std(x) * jax.random.normal(next(keys), x.shape, x.dtype),
        target(family)[1],
    )


LENIENT = rules.TokenV3(0.7)
GREEDY = [
    ("table", [[2, 2], [0, 2]], LENIENT),
    ("llama", [[2, 2], [0, 2]], LENIENT),
    ("t5_v1_1", [[3, 0, 2], [0, 2, 1], [0, 0, 2]], LENIENT),
    ("llama", [[2, 1], [0, 0]], rules.Lossless()),
    ("llama", [[1, 1, 1], [0, 2, 1], [0, 0, 2]], drafting.lenience(3.0)),
    ("gemma2", [[4, 0], [0, 3]], LENIENT),
]


# The laws at temperature 0 in tests/drafting/test_laws.py are the quick sibling.
@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "matrix", "rule"), GREEDY)
def test_nothing_below_the_verifier_changes_its_greedy_output(family, matrix, rule):
    model, params = target(family)
    sizes = dict(zip(("middle", "small", "least"), (0.05, 0.2, 0.4), strict=True))
    names = list(sizes)[: len(matrix)]
    named = {name: (model, near(family, sizes[name])) for name in names}
    drafter, own = binding.cascade(matrix, named, rules=rule)
    given = decoding.MethodParams(params, own, rules.Lossless())
    found = run(decoding.Speculative(model, drafter), given)
    alone = run(decoding.Autoregressive(model), decoding.MethodParams(params))
    np.testing.assert_array_equal(found.tokens, alone.tokens)
    # Some tokens stand, and some fall: caches were moved back.
    counts = (found.info.drafted_lengths, found.info.accepted_lengths)
    drafted, accepted = (np.asarray(x) @ np.arange(drafter.max_draft + 1) for x in counts)
    assert 0 < accepted.sum() < drafted.sum()


def test_models_that_agree_make_no_pass_to_catch_up():
    """All that was read and stands is found again, and each pass reads what it must."""
    model, params = whole.MODEL, whole.PARAMS[0]
    low = drafting.Chain(model, 2, name="low")
    drafter = drafting.cascades.VerticalCascade(low, model, max_draft=5, name="middle")
    given = decoding.MethodParams(
        params,
        decoding.MethodParams(params, drafting.chain.ChainParams(params)),
        rules.Lossless(),
    )
    prompts = {"inputs": whole.PROMPTS, "input_lengths": whole.LENGTHS}
    found = run(decoding.Speculative(model, drafter), given, new=18, **prompts)
    np.testing.assert_array_equal(found.info.accepted_lengths[:, 5], 3)
    calls = {name: int(count[0]) for name, count in found.info.calls.items()}
    # Each round: inner rounds of 2 + 1 and 1 + 1 tokens. The middle model reads the last token of a
    # block that stands with the next draft, the small one on its own. The last token of an inner
    # round, where it is told one more, it reads with its next draft.
    assert calls == {"verifier": 3, "middle": 3 * 2, "low": 3 * (2 + 1 + 1 + 1)}


def test_what_a_later_drafter_lacks_is_read_with_its_first_token():
    """Two tokens of each; the second one is told the first one's, and makes no pass for them."""
    model, params = whole.MODEL, whole.PARAMS[0]
    both = tuple(drafting.Chain(model, 2, name=name) for name in ("first", "second"))
    drafter = drafting.cascades.HorizontalCascade(both)
    own = (drafting.chain.ChainParams(params),) * 2
    given = decoding.MethodParams(params, own, rules.Lossless())
    prompts = {"inputs": whole.PROMPTS, "input_lengths": whole.LENGTHS}
    found = run(decoding.Speculative(model, drafter), given, new=15, **prompts)
    np.testing.assert_array_equal(found.info.accepted_lengths[:, 4], 3)
    calls = {name: int(count[0]) for name, count in found.info.calls.items()}
    # The first one reads three tokens and then four, two of them drafts: its pass holds three. The
    # second one reads the last token of a block that stands for a bonus.
    assert calls == {"verifier": 3, "first": 2 + 3 + 3, "second": 3 * (2 + 1)}


@pytest.mark.exhaustive
def test_a_learning_policy_below_learns_from_the_middle_model():
    """A drafter that is always right drafts longer, one that never is drafts nothing more."""
    model, params = tiny("llama")[:2]
    policy, numbers = drafting.Survival(drafting.OnlineEstimate(prior=0.5), 0.35).bind()
    low = drafting.Chain(model, 3, policy, name="low")
    drafter = drafting.cascades.VerticalCascade(low, model, max_draft=4, name="middle")
    assert not drafter.traits.prefix_only
    method = decoding.Speculative(model, drafter)

    def passes(small):
        own = decoding.MethodParams(params, drafting.chain.ChainParams(small, numbers))
        state = run(method, decoding.MethodParams(params, own, rules.Lossless()), new=30)
        return {name: int(np.asarray(count).sum()) for name, count in state.info.calls.items()}

    right, wrong = passes(params), passes(near("llama", 5.0))
    assert right["middle"] < wrong["middle"]
    assert right["low"] / right["middle"] > wrong["low"] / wrong["middle"]


def test_rows_of_several_drafters_share_the_passes_that_catch_up():
    """A whole block leaves the large drafter behind: it catches up in passes of all rows."""
    model, params = target("table")
    parts = [drafting.Chain(model, 1, name="large"), drafting.Chain(model, 2)]
    method = decoding.Speculative(model, drafting.cascades.HorizontalCascade(tuple(parts)))
    own = tuple(drafting.chain.ChainParams(near("table", noise)) for noise in (0.1, 0.3))
    given = decoding.MethodParams(params, own)
    inputs = np.random.default_rng(0).integers(3, 40, (3, 5)).astype(np.int32)
    lengths = np.array([5, 2, 4], np.int32)
    options = {"sampling": Sampling(1.0)}
    together = run(method, given, inputs=inputs, **options)
    differ = False
    for row in range(3):
        one = {"inputs": inputs[[row]], "input_lengths": lengths[[row]], "ids": np.array([row])}
        alone = run(method, given, rows=1, **one, **options)
        np.testing.assert_array_equal(alone.tokens[0], together.tokens[row])
        differ |= int(alone.info.calls["large"][0]) != int(together.info.calls["large"][row])
    assert differ and not method.independent_rows
    single = drafting.cascades.HorizontalCascade(tuple(parts[:1]))
    assert decoding.Speculative(model, single).independent_rows
