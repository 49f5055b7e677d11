"""How T5X runs."""

import jax
import pytest


@pytest.fixture
def as_t5x_runs():
    """T5X's code mixes dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield
