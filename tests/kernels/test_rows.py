"""The kernels of sums over the vocabulary against the plain code, in Pallas' interpreter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import sampling
from specjax.kernels import rows


@pytest.mark.parametrize(("batch", "vocab"), [(1, 513), (8, 1000), (18, 640)])
def test_equal_the_plain_code(batch, vocab):
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.full(vocab, 0.1), (2, batch)).astype(np.float32)
    q[0] = p[0]  # no mass is left
    scale = rng.random(batch).astype(np.float32)
    scale[0] = 1.0
    index = rng.integers(0, vocab, batch).astype(np.int32)
    index[0] = vocab - 1
    np.testing.assert_array_equal(
        rows.entry(jnp.asarray(p), index, interpret=True), p[np.arange(batch), index]
    )
    wanted = jax.jit(jax.vmap(sampling._residual_mass))(p, q, scale)
    got = rows.residual_mass(*map(jnp.asarray, (p, q, scale)), interpret=True)
    np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-9)
    assert got[0] == 0.0


def test_nan_and_infinite_entries():
    x = np.zeros((3, 600), np.float32)
    x[:, 7] = [np.nan, np.inf, -np.inf]
    index = np.array([7, 7, 6], np.int32)
    np.testing.assert_array_equal(
        rows.entry(jnp.asarray(x), index, interpret=True), [np.nan, np.inf, 0.0]
    )
