"""A recurrent layer's memory after rollbacks is that of the tokens that were kept."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decoding, drafting
from specjax.models import model_from_config, recurrent
from specjax.types import Prompts
from tests.models.test_ragged import INPUTS, LENGTHS, MAX_BLOCK, worst_error
from tests.models.tiny import CONFIGS, error, quick_jit, random_params, tiny
from tests.variants import variants

ROWS, LENGTH = 3, 40
RNG = np.random.default_rng(0)


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("name", variants(("qwen3_5", "qwen3_next"), "qwen3_5"))
def test_after_rollbacks_logits_are_those_of_a_full_pass(name, by_token):
    """The memory is so short that states move on; blocks are read at once, or as by a drafter."""
    t = tiny(name)
    model = type(t.model)(t.model.config, rollback=MAX_BLOCK)
    extend = quick_jit(model.extend)

    def each(params, cache, tokens, positions):
        found = []
        for i in range(tokens.shape[1]):
            found.append(extend(params, cache, tokens[:, i : i + 1], positions + i))
            cache = found[-1].cache
        return found[-1]._replace(logits=np.concatenate([x.logits for x in found], axis=1))

    t = t._replace(model=model, prefill=quick_jit(model.prefill, static_argnums=2), extend=extend)
    assert worst_error(t, each if by_token else None) <= 2e-5


def test_the_rule_in_chunks_is_the_rule_token_by_token():
    """In float64; more tokens than a chunk has, and a state from before."""
    rng = np.random.default_rng(0)
    rows, length, keys, groups, width, wide = 2, 150, 2, 2, 6, 5
    of_keys, of_values = (rows, length, keys, width), (rows, length, keys, groups, wide)
    queries, shared = (
        x / np.linalg.norm(x, axis=-1, keepdims=True) for x in rng.normal(size=(2, *of_keys))
    )
    values, betas = rng.normal(size=of_values), rng.uniform(size=of_values[:-1])
    decays = -rng.exponential(0.3, of_values[:-1])
    state = first = rng.normal(size=(rows, keys, groups, width, wide))
    wanted = []
    for t in range(length):
        state = np.exp(decays[:, t])[..., None, None] * state
        kept = np.einsum("bkd,bkndv->bknv", shared[:, t], state)
        write = betas[:, t][..., None] * (values[:, t] - kept)
        state = state + np.einsum("bkd,bknv->bkndv", shared[:, t], write)
        wanted.append(np.einsum("bkd,bkndv->bknv", queries[:, t], state))
    inputs = [x.astype(np.float32) for x in (first, queries, shared, values, betas, decays)]
    rule = quick_jit(recurrent.delta_rule).lower(*inputs).compile()
    # JAX's own solver on CPUs may wait for ever.
    assert "trsm" not in rule.as_text()
    read, writes = rule(*inputs)
    assert error(read, np.stack(wanted, axis=1)) <= 1e-5
    counts = np.full(rows, length, np.int32)
    after = quick_jit(recurrent.advance)(inputs[0], inputs[2], writes, inputs[5], counts)
    assert error(after, state) <= 1e-5


def test_the_solution_by_rows_and_its_gradient_are_those_of_the_solver():
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(2, 1, 2, 9, 9)), rng.normal(size=(2, 1, 2, 9, 3))
    given = a.astype(np.float32), b.astype(np.float32)

    forms = recurrent._solve_by_rows, recurrent._solve
    assert error(*(quick_jit(form)(*given) for form in forms)) <= 1e-5
    slopes = [
        quick_jit(jax.grad(lambda *x, of=form: jnp.sum(jnp.sin(of(*x))), argnums=(0, 1)))(*given)
        for form in forms
    ]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-4), *slopes)


def test_a_row_that_goes_back_too_far_is_nan():
    t = tiny("qwen3_5")
    model = type(t.model)(t.model.config, rollback=5)
    extend = quick_jit(model.extend)
    cache, _, start = quick_jit(model.prefill, static_argnums=2)(
        t.params, Prompts(INPUTS, LENGTHS), LENGTH
    )
    block = RNG.integers(0, 48, (ROWS, 6)).astype(np.int32)
    cache = extend(t.params, cache, block, start).cache
    logits = extend(t.params, cache, block, start + np.array([1, 0, 6])).logits
    fresh = t.prefill(t.params, Prompts(INPUTS, LENGTHS), LENGTH).cache
    tokens = np.concatenate([block[:, :1], block], axis=1)
    expected = t.extend(t.params, fresh, tokens, start).logits
    assert np.isnan(logits[1]).all() and np.isfinite(logits[2]).all()
    assert error(logits[0], expected[0, 1:]) <= 1e-5


def test_what_recurrent_layers_cannot_do_is_refused():
    model = model_from_config(CONFIGS["qwen3_5"])
    neural = lambda count: drafting.Chain(model, count, name=f"of {count}")  # noqa: E731
    several = lambda *counts: drafting.cascades.HorizontalCascade(tuple(map(neural, counts)))  # noqa: E731
    vertical = lambda drafter, count: drafting.cascades.VerticalCascade(drafter, model, count)  # noqa: E731
    lookup = lambda count: drafting.Lookup(max_copy=count, vocab_size=48)  # noqa: E731
    # In a cascade other passes may be taken back with a draft: those of a reviewer read twice the
    # block of the level below.
    for make, most in (
        (neural, 31),
        (lambda count: decoding.Speculative(model, lookup(count)), 31),
        (lambda count: decoding.TokenCascade(count, verifier=model, drafter=model), 31),
        (lambda count: several(count, 4), 27),
        (lambda count: several(4, count), 27),
        (lambda count: vertical(neural(5), count), 20),
        (lambda count: vertical(lookup(5), count), 20),
        (lambda count: vertical(several(2, 3), count), 20),
        (lambda count: several(count, 2, 3), 26),
    ):
        make(most)
        with pytest.raises(ValueError, match=r"may go back by 3\d tokens, but CausalLM can .* 32"):
            make(most + 1)
    assert not model.reads_trees and not model.continues_beginnings
    plain = model_from_config(CONFIGS["qwen3_5"].replace(layer_types=("full_attention",) * 3))
    assert plain.reads_trees and plain.most_rollback is None


def test_states_are_float32_where_activations_are_not():
    config = CONFIGS["qwen3_5"].replace(dtype="bfloat16", param_dtype="bfloat16")
    model = model_from_config(config)
    params = random_params(model)
    cache, last, start = jax.jit(model.prefill, static_argnums=2)(
        params, Prompts(INPUTS, LENGTHS), LENGTH
    )
    out = jax.jit(model.extend)(params, cache, last[:, None], start)
    layer = out.cache.recurrent.layers[0]
    kinds = [x.dtype for x in (layer.state, layer.keys, layer.writes, layer.decays)]
    assert set(kinds) == {jnp.float32.dtype}
    assert {x.dtype for x in layer.inputs} == {jnp.bfloat16.dtype}
    assert np.isfinite(out.logits).all()
