"""Forced prefixes, where decoding starts."""

import jax.numpy as jnp
import numpy as np

from specjax import decoding
from specjax.types import Sampling
from tests.decoding.helpers import alone, begin
from tests.models.tiny import tiny

T5 = tiny("t5_v1_1")
LOOP = decoding.Autoregressive(T5.model)
PREFIX = np.array([[7, 8], [9, 10]], np.int32)


def test_a_row_goes_on_from_its_own_prefix():
    sizes = np.array([2, 1], np.int32)
    state = begin(
        LOOP,
        alone(T5.params),
        np.full((2, 3), 5, np.int32),
        np.full(2, 3, np.int32),
        ids=np.arange(2),
        limits=np.full(2, 4),
        sampling=Sampling(0.0),
        max_new=4,
        prefix=PREFIX,
        prefix_lengths=sizes,
    )
    out = np.asarray(LOOP.run(alone(T5.params), state, 100).tokens)
    for row, size in enumerate(sizes):
        read = np.concatenate([[0], PREFIX[row, :size], out[row]])[None].astype(np.int32)
        inputs = jnp.full((1, 3), 5, jnp.int32)
        best = np.asarray(T5.apply(T5.params, inputs, read[:, :-1])).argmax(-1)[0]
        np.testing.assert_array_equal(out[row], best[size:])
