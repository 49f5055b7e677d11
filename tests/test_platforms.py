"""What is computed otherwise on TPUs gives the same."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import platforms, sampling
from specjax.models import layers
from specjax.partitioning import Partitioner, make_mesh
from specjax.sampling import distributions
from specjax.types import Sampling


def random(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("wanted", [False, True])
def test_what_is_wanted_runs_once(wanted):
    ran = []

    def run(before):
        jax.debug.callback(lambda: ran.append(1))
        count, (x, _) = before
        return count + 1, (x * 2.0, None)

    before = jnp.int32(3), (jnp.ones(2), None)
    count, (x, none) = jax.jit(lambda wanted: platforms.when(wanted, run, before))(wanted)
    jax.effects_barrier()
    assert (int(count), x.tolist(), none) == (
        (4, [2.0, 2.0], None) if wanted else (3, [1.0] * 2, None)
    )
    assert len(ran) == wanted


@pytest.mark.parametrize("special", [None, np.nan, np.inf])
def test_masks_find_what_indices_find(special):
    x = random(5, 700)
    if special is not None:
        x[2, 3] = special
    rows, tokens = jnp.array([0, 2, 4], jnp.int32), jnp.array([0, 3, 699], jnp.int32)

    def picked():
        each = jax.vmap(lambda at: platforms.row(jnp.asarray(x), at))(rows)
        entries = jax.vmap(lambda one: jax.vmap(lambda at: platforms.entry(one, at))(tokens))
        return each, entries(each)

    found = picked()
    with platforms.as_on_tpus():
        masked = picked()
    for one, other in zip(found, masked, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("vocab", [5, 600, 5000])
def test_a_draw_is_the_same(vocab, temperature):
    logits = random(200, vocab) * 3
    logits[:, vocab // 2] = logits.max(axis=1)  # a tie, sometimes with an earlier token
    logits[0, 1] = -np.inf
    uniforms = np.random.default_rng(1).random(
        (200, sampling.draws.num_uniforms(vocab)), np.float32
    )

    def drawn(logits, uniforms):
        return jax.vmap(
            lambda *x: sampling.distributions.draw_from_logits(x[0], Sampling(temperature), x[1])
        )(logits, uniforms)

    probs, tokens = jax.jit(drawn)(logits, uniforms)
    law = jax.vmap(lambda x: sampling.distributions.distribution(x, Sampling(temperature)))
    np.testing.assert_allclose(probs, law(logits), rtol=5e-6)
    with platforms.as_on_tpus():
        there, tokens_there = jax.jit(lambda *x: drawn(*x))(logits, uniforms)
        law_there = jax.jit(lambda x: law(x))(logits)
    np.testing.assert_allclose(there, probs, rtol=5e-6)
    # On a CPU the joint reduction goes one by one.
    np.testing.assert_allclose(law_there, probs, rtol=5e-5)
    # Sums round otherwise: a uniform beside an edge may fall on its other side.
    assert (np.asarray(tokens) == tokens_there).mean() > (0.98 if temperature else 0.999)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [3, 600, 5000])
@pytest.mark.parametrize("there", [False, True])
def test_one_nan_is_told(there, vocab, temperature):
    logits = random(8, vocab)
    logits[3, 1] = np.nan
    uniforms = np.full((8, sampling.draws.num_uniforms(vocab)), 0.5, np.float32)
    with platforms.as_on_tpus() if there else contextlib.nullcontext():
        law = jax.jit(
            jax.vmap(lambda x: sampling.distributions.distribution(x, Sampling(temperature)))
        )(logits)
        drawn = jax.vmap(
            lambda *x: sampling.distributions.draw_from_logits(x[0], Sampling(temperature), x[1])[0]
        )
        drawn = jax.jit(drawn)(logits, uniforms)
    for probs in (law, drawn):
        assert (np.isnan(probs).all(axis=1) == (np.arange(8) == 3)).all()
        assert np.isnan(probs).any(axis=1).sum() == 1


@pytest.mark.parametrize("kind", ["counts", "masses"])
def test_a_threshold_is_the_same(kind):
    rng = np.random.default_rng(3)
    rank = rng.integers(0, 2**32, (40, 300), np.uint32)
    rank[:, 100:120] = rank[:, :1]  # ties
    rank[0, :2] = 0, 2**32 - 1
    if kind == "counts":
        values, wanted = np.ones(rank.shape, np.int32), rng.integers(1, 302, 40).astype(np.int32)
    else:
        values = rng.integers(0, 8, rank.shape).astype(np.float32)  # exact in any order
        wanted = (rng.random(40) * 1.05 * values.sum(1)).astype(np.float32)
    found, expected = (
        jax.jit(jax.vmap(edge))(rank, values, wanted)
        for edge in (distributions._edge_by_sixteenths, distributions._edge_by_halves)
    )
    np.testing.assert_array_equal(found, expected)
    assert (np.asarray(expected) == 2**32 - 1).any() and len(set(expected.tolist())) > 20


def _texts(x):
    traced = jax.jit(lambda x: platforms.rows_in_tiles(x)).trace(x)
    return [traced.lower(lowering_platforms=(p,)).as_text() for p in ("tpu", "cpu")]


@pytest.mark.parametrize("mesh", [None, (4, 2)])
def test_rows_and_vocabulary_share_a_tile_in_programs_for_tpus(mesh):
    x = jnp.ones((8, 3, 6))
    assert not any("LayoutConstraint" in text for text in _texts(x))  # whose devices nobody knows
    with platforms.compiled_for(None if mesh is None else Partitioner(make_mesh(*mesh))):
        there, here = _texts(x)
    assert "LayoutConstraint" in there and "LayoutConstraint" not in here
    # XLA would gather what is split for a constraint of the whole: each device has its part.
    (line,) = (line for line in there.splitlines() if "LayoutConstraint" in line)
    assert ("tensor<8x3x6xf32>" if mesh is None else "tensor<2x3x3xf32>") in line


def test_a_product_with_one_row_is_the_same():
    x, kernel = random(1, 16), random(16, 8)
    plain = layers.product
    with platforms.as_on_tpus():
        there = jax.jit(lambda *given: plain(*given))(x, kernel)
        slopes = jax.jit(jax.grad(lambda x, kernel: plain(x, kernel).sum()))(x, kernel)
        rows = jax.jit(jax.vmap(lambda x: plain(x, kernel)))(random(3, 1, 16))
    np.testing.assert_allclose(there, x @ kernel, rtol=1e-5)
    np.testing.assert_allclose(slopes, kernel.sum(axis=1)[None], rtol=1e-5)
    assert rows.shape == (3, 1, 8)
