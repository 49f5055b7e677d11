"""The shapes that annotations say are checked while tests run, and only while tests run."""

import subprocess
import sys

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from jaxtyping import Array, Float, Int

from specjax.rules import OPT
from tests.shape_checks import checked


@jaxtyping.jaxtyped(typechecker=checked)
def draw(
    probs: Float[Array, "B V"], counts: Int[Array, " B"] | None, rule: OPT
) -> tuple[Float[Array, " B"], Int[Array, " B"] | None]:
    return probs.sum(-1) if probs.shape[-1] > 1 else probs, counts


def test_an_array_that_fits_passes():
    total, _ = draw(jnp.ones((2, 3)), jnp.zeros((2,), jnp.int32), "no array")
    assert total.shape == draw(np.ones((2, 3), np.float32), None, None)[0].shape == (2,)
    assert draw(jnp.ones((2, 3)), None, None)[1] is None


@pytest.mark.parametrize(
    "probs, counts",
    [
        (jnp.ones((3,)), None),
        (jnp.ones((2, 3), jnp.int32), None),
        (jnp.ones((2, 3)), jnp.zeros((3,), jnp.int32)),
        (jnp.ones((2, 3)), jnp.zeros((2,))),
        (jnp.ones((2, 1)), None),
        (np.ones((2, 3, 1), np.float32), None),
        (None, None),
    ],
)
def test_an_array_that_does_not_fit_is_told(probs, counts):
    with pytest.raises(jaxtyping.TypeCheckError, match="probs|counts|result"):
        draw(probs, counts, None)


def test_production_checks_nothing():
    code = "import specjax.verification as v; print(hasattr(v.verify, '__wrapped__'))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
