"""Top-k and top-p, without sorting the vocabulary. Axis: V vocabulary."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32

from specjax.platforms import by_platform


def descending_bits(logits: Float32[Array, "*B V"]) -> UInt32[Array, "*B V"]:
    """Integers that order floats from the largest (+inf) down; equal floats get equal integers.

    NaN comes first, whatever its sign: a filter must not hide it.
    """
    bits = lax.bitcast_convert_type(logits + 0.0, jnp.uint32)  # -0 + 0 is 0
    negative = bits >> 31 == 1
    order = jnp.where(negative, bits, ~(bits | jnp.uint32(1 << 31)))
    return jnp.where(jnp.isnan(logits), jnp.uint32(0), order)


def in_top_k(rank: UInt32[Array, " V"], k: Int32[Array, ""]) -> Bool[Array, " V"]:
    """The k largest logits by their `descending_bits`; all ties stay."""
    ones = jnp.ones(rank.shape, jnp.int32)
    # The smallest threshold that keeps at least k tokens, without sorting the vocabulary.
    return rank <= _edge(rank, ones, jnp.minimum(k, rank.size))


def in_top_p(
    weights: Float32[Array, " V"], rank: UInt32[Array, " V"], p: Float32[Array, ""]
) -> Bool[Array, " V"]:
    """The first tokens by their `descending_bits` with a part p of all weights; all ties stay."""
    # At least the smallest normal number: devices treat less as 0, and no token would reach it.
    mass = jnp.maximum(p * jnp.sum(weights), float(jnp.finfo(jnp.float32).tiny))
    # The smallest threshold that keeps a probability of p; all tokens up to it are kept.
    return (rank <= _edge(rank, weights, mass)) | (p >= 1.0)


def _edge(rank: Array, values: Array, wanted: Array) -> Array:
    """The smallest bound up to which values sum to `wanted`; if none, the largest uint32."""
    # Its derivative is zero except at jumps.
    arrays = lax.stop_gradient((rank, values, wanted))
    return by_platform(*arrays, tpu=_edge_by_sixteenths, default=_edge_by_halves)


def _edge_by_halves(rank: Array, values: Array, wanted: Array) -> Array:

    def halve(_, span):
        low, high = span
        middle = low + (high - low) // 2
        hit = jnp.sum(jnp.where(rank <= middle, values, jnp.zeros((), values.dtype))) >= wanted
        return jnp.where(hit, low, middle + 1), jnp.where(hit, middle, high)

    span = (jnp.uint32(0), jnp.uint32(0xFFFFFFFF))
    return lax.fori_loop(0, 32, halve, span)[1]


def _edge_by_sixteenths(rank: Array, values: Array, wanted: Array) -> Array:
    none = np.zeros((), values.dtype)

    def digit(i: Array, low: Array) -> Array:
        width = jnp.uint32(1) << (28 - 4 * i).astype(jnp.uint32)
        bounds = [low + np.uint32(j) * width - np.uint32(1) for j in range(1, 16)]
        counted = tuple(jnp.where(rank <= bound, values, none) for bound in bounds)
        sums = lax.reduce(counted, (none,) * 15, lambda x, y: jax.tree.map(jnp.add, x, y), (0,))
        below = sum((x < wanted).astype(jnp.uint32) for x in sums)
        return low + below * width

    return lax.fori_loop(0, 8, digit, jnp.uint32(0))
