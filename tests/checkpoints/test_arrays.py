"""Arrays are searched for NaN wherever their numbers lie, and not copied for it."""

import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest

from specjax.checkpoints import arrays


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x,
        lambda x: x.T,
        lambda x: x[:, :, ::2],
        lambda x: x[::-1, :, ::-1],
        lambda x: x.swapaxes(1, 2),
        lambda x: x[:1, None],
        lambda x: x[0, 0, 0, ...],
        lambda x: x[:0],
    ],
)
def test_a_nan_is_found_wherever_it_is(monkeypatch, dtype, view):
    monkeypatch.setattr(arrays, "_BLOCK", 50)
    array = view(np.ones((6, 10, 14), dtype))
    arrays._check_finite("w", array)
    for place in list(np.ndindex(array.shape))[::37]:
        array[place] = np.nan
        with pytest.raises(arrays.NotFiniteError) as error:
            arrays._check_finite("w", array)
        assert str(error.value) == f"w has nan at {place}"
        array[place] = 1


def test_an_array_that_repeats_one_number_is_searched(monkeypatch):
    monkeypatch.setattr(arrays, "_BLOCK", 50)
    arrays._check_finite("w", np.broadcast_to(np.float32(1), (1, 40, 40)))
    with pytest.raises(arrays.NotFiniteError, match=r"w has inf at \(0, 0, 0\)"):
        arrays._check_finite("w", np.broadcast_to(np.float32(np.inf), (1, 40, 40)))


def test_an_array_whose_numbers_lie_apart_is_not_copied():
    array = np.zeros((2**12, 2**13), np.float32)[:, ::2].T
    tracemalloc.start()
    try:
        arrays._check_finite("w", array)
        assert tracemalloc.get_traced_memory()[1] < array.nbytes / 4
    finally:
        tracemalloc.stop()
