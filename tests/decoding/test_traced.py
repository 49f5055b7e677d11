"""A method inside a caller's own jitted function."""

import jax
import jax.numpy as jnp
import numpy as np

from specjax import decoding, drafting, rules, testing
from specjax.types import PromptBatch, Sampling, row_axes
from tests.decoding.helpers import pair

MODEL = testing.TabularModel(5, 2)
TABLES = [jnp.asarray(testing.random_table(seed, 5, 2, scale=1.5)) for seed in (1, 2)]
METHOD = decoding.Speculative(MODEL, drafting.Chain(MODEL, 3), eos_ids=(4,))
PARAMS = pair(*TABLES, rules.OPT(0.2))
SIZES = {"max_new": 6, "max_length": 16}


def _prompts(rows, copies=1):
    inputs = np.array([[0, 1, 2], [3, 1, 0]], np.int32)[rows]
    return PromptBatch(
        inputs=inputs.repeat(copies, 0),
        input_lengths=np.array([3, 2], np.int32)[rows].repeat(copies),
        ids=np.arange(len(rows) * copies, dtype=np.uint32),
        limits=np.array([6, 4], np.int32)[rows].repeat(copies),
        seeds=np.uint32(7),
        sampling=Sampling(np.float32([1.0, 0.7])[rows].repeat(copies)),
    )


def _run(prompts):
    return METHOD.run(PARAMS, METHOD.init(PARAMS, prompts, **SIZES), 100)


def _traced(prompts, **options):
    decode = jax.jit(lambda params, batch: METHOD.traced(params, batch, **SIZES, **options))
    return decode(PARAMS, prompts)


def _same(state, other):
    for name in ("tokens", "lengths", "ended_by", "steps"):
        np.testing.assert_array_equal(getattr(state, name), getattr(other, name))
    np.testing.assert_allclose(state.info.log_prob.target, other.info.log_prob.target, rtol=1e-5)


def test_a_caller_s_program_decodes_as_the_method_alone():
    prompts = _prompts([0, 1])
    _same(_traced(prompts), _run(prompts))


def test_copies_are_rows_of_their_own():
    # Their ids are what rows of the same prompts would have in a batch of six.
    state = _traced(_prompts([0, 1]), copies=3)
    _same(state, _run(_prompts([0, 1], copies=3)))
    assert len({tuple(row) for row in np.asarray(state.tokens).tolist()}) > 2


def test_the_first_state_can_be_laid_out():
    seen = []

    def place(state, axes):
        seen.append(jax.tree.structure(state))
        assert axes.tokens == ("batch", None)
        assert axes.inner.drafter == row_axes(state.inner.drafter)
        return state

    prompts = _prompts([0, 1])
    _same(_traced(prompts, place=place), _run(prompts))
    assert len(seen) == 1
