"""The kernels of draws against the plain code, in Pallas' interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.sampling import distributions, draw_kernels, draws
from specjax.sampling.draws import num_uniforms
from specjax.types import Sampling

# In Pallas' interpreter.
_drawn, _distribution, _draw_by_weights = (
    jax.jit(functools.partial(kernel, interpret=True))
    for kernel in (
        draw_kernels.draw_from_logits,
        draw_kernels.distribution,
        draw_kernels.draw_by_weights,
    )
)
_SMALL = [(1, 513), (3, 640), (8, 1000), (9, 700)]
_LARGE = [(8, 32128), (2, 128 * 128), (3, 128 * 128 + 5), (9, 70000)]


def _inputs(rows: int, vocab: int):
    rng = np.random.default_rng(0)
    logits = rng.standard_normal((rows, vocab)) * rng.choice([0.1, 1.0, 8.0], (rows, 1))
    logits[rng.random(logits.shape) < 0.3] = -np.inf
    temperature = rng.choice([1.0, 0.5, 0.0, 2.0, 1e-3], rows)
    uniforms = rng.random((rows, num_uniforms(vocab)))
    return tuple(x.astype(np.float32) for x in (logits, temperature, uniforms))


def _check(logits, temperature, uniforms):
    """All three kernels."""
    logits, temperature, uniforms = map(jnp.asarray, (logits, temperature, uniforms))
    plain = jax.vmap(lambda x, t, u: distributions.draw_plainly(x, Sampling(t), u))
    probs, tokens = jax.jit(plain)(logits, temperature, uniforms)
    got = _drawn(logits, temperature, uniforms)
    np.testing.assert_allclose(got[0], probs, rtol=3e-5, atol=1e-37)
    _check_tokens(got[1], tokens, probs)
    again = _distribution(logits, temperature)
    np.testing.assert_array_equal(again, got[0])
    tokens = jax.jit(jax.vmap(draws.draw_plainly))(3.0 * probs, uniforms)
    got = _draw_by_weights(3.0 * probs, uniforms)
    _check_tokens(got, tokens, probs)


def _check_tokens(got, tokens, probs):
    """Sums round otherwise: a uniform beside an edge may fall on its other side, but never far."""
    rows = np.arange(len(tokens))
    assert ((np.asarray(probs)[rows, got] > 0) | np.isnan(probs[:, 0])).all()
    assert (np.asarray(got) != tokens).sum() <= len(tokens) // 100


def test_the_comparison_sees_a_uniform_of_another_level():
    logits, temperature, uniforms = _inputs(8, 1000)
    _check(logits, temperature, uniforms)
    with pytest.raises(AssertionError):
        weights = jnp.ones((8, 1000))
        kernel = _draw_by_weights(weights, uniforms[:, ::-1])
        plain = jax.jit(jax.vmap(draws.draw_plainly))(weights, uniforms)
        _check_tokens(kernel, plain, np.ones((8, 1000)))


@pytest.mark.parametrize(("rows", "vocab"), _SMALL)
def test_equal_the_plain_code(rows, vocab):
    _check(*_inputs(rows, vocab))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("rows", "vocab"), _LARGE)
def test_equal_the_plain_code_at_large_vocabularies(rows, vocab):
    _check(*_inputs(rows, vocab))


def test_edges():
    logits, temperature, uniforms = _inputs(8, 900)
    temperature[:] = [1, 0, 1, 0, 0, 1, 1, 0.7]
    logits[:2] = -np.inf  # nothing can be drawn
    logits[2:4] = np.nan
    logits[4, [700, 899]] = 50.0  # a tie
    logits[5, 899] = np.inf
    logits[6] = -np.inf
    logits[6, 899] = -1e38  # the last token alone
    uniforms[6:] = 0.0
    uniforms[7] = np.nextafter(np.float32(1.0), np.float32(0.0))
    _check(logits, temperature, uniforms)


@pytest.mark.exhaustive
def test_each_level_of_three_is_drawn_by_its_own_uniform():
    logits, temperature, uniforms = _inputs(1, 65537)
    logits[:] = 0.0
    temperature[:] = 1.0
    for uniform in ([0.0, 0.5, 0.999], [0.6, 0.001, 0.3]):
        uniforms[0] = uniform
        _check(logits, temperature, uniforms)


def test_no_weight_draws_token_0():
    uniforms = jnp.full((2, 2), 0.5)
    tokens = _draw_by_weights(jnp.zeros((2, 600)), uniforms)
    np.testing.assert_array_equal(tokens, 0)


def test_vocabularies():
    assert not draw_kernels.suits(512) and draw_kernels.suits(513) and draw_kernels.suits(262_208)
    assert not draw_kernels.suits(524_288)
