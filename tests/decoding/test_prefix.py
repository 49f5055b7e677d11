"""Forced prefixes, where decoding starts: counted and kept to."""

import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decoding
from specjax.types import Sampling
from tests.decoding.helpers import alone, begin
from tests.models.tiny import tiny

T5 = tiny("t5_v1_1")
LOOP = decoding.Autoregressive(T5.model)
PREFIX = np.array([[7, 8], [9, 10]], np.int32)


def _start(prefix=None, prefix_lengths=None, max_length=8):
    return begin(
        LOOP,
        alone(T5.params),
        np.full((2, 3), 5, np.int32),
        np.full(2, 3, np.int32),
        seeds=0,
        ids=np.arange(2),
        limits=np.full(2, 4),
        sampling=Sampling(0.0),
        max_new=4,
        max_length=max_length,
        prefix=prefix,
        prefix_lengths=prefix_lengths,
    )


def test_without_lengths_each_row_has_the_whole_prefix():
    state = _start(PREFIX)
    np.testing.assert_array_equal(state.inner.verifier.positions, 2)
    np.testing.assert_array_equal(state.inner.tokens, PREFIX[:, 1])
    # The start token, the prefix, four new tokens and a block of one.
    with pytest.raises(
        ValueError, match="max_length must be at least 8, got 7: the longest .* 3 pos"
    ):
        _start(PREFIX, max_length=7)
    # No row has all of it here: there is room enough.
    _start(PREFIX, np.array([1, 0]), max_length=7)


def test_a_row_goes_on_from_its_own_prefix():
    sizes = np.array([2, 1], np.int32)
    out = np.asarray(LOOP.run(alone(T5.params), _start(PREFIX, sizes), 100).tokens)
    for row, size in enumerate(sizes):
        read = np.concatenate([[0], PREFIX[row, :size], out[row]])[None].astype(np.int32)
        inputs = jnp.full((1, 3), 5, jnp.int32)
        best = np.asarray(T5.apply(T5.params, inputs, read[:, :-1])).argmax(-1)[0]
        np.testing.assert_array_equal(out[row], best[size:])
