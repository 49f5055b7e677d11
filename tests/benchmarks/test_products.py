"""The benchmark of products multiplies what it says; no time is asserted."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import products
from specjax.models.weights import product

pytest.importorskip("llvmlite")


def test_each_size_and_number_of_rows_has_a_line(rows):
    options = ["--sizes", "built-in", "--rows", "1", "6", "--layers", "1", "--repeats", "1"]
    assert products.main(options) == 0
    rows = rows()
    assert [(row["size"], row["rows"]) for row in rows] == [("built-in", 1), ("built-in", 6)]
    assert all(row[f"{form}_ms"] > 0 for row in rows for form in ("XLA", *products.FORMS))


def test_both_sides_multiply_the_same():
    x = np.random.default_rng(1).normal(size=(3, 256)).astype(np.float32)
    weights = products._weights(256, 512, "float32", 2)
    ours, theirs = (products._through(dot, x, weights)() for dot in (product, jnp.dot))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
