"""Turns logits into the distribution that tokens are drawn from, and draws from it.

Drafter, verifier and baselines all use the function `distribution`, so that they cannot differ.
Its order is fixed: temperature, then top-k, then top-p. All computations are float32.

Functions take one position; `jax.vmap` them over rows. Axes: V vocabulary, U uniforms of a draw.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt32

from specjax.kernel_choice import on_one_tpu
from specjax.platforms import by_platform, entry
from specjax.sampling import draw_kernels
from specjax.sampling.draws import TINY, descend, levels_of, total
from specjax.types import Sampling


def distribution(logits: Float[Array, " V"], sampling: Sampling) -> Float32[Array, " V"]:
    """The distribution that tokens are drawn from: temperature, then top-k, then top-p.

    Args:
      logits: -inf marks a token that cannot be drawn. If all are -inf, the result is uniform
        (one-hot at token 0 if greedy). NaN logits give NaN.
      sampling: its fields are scalars.
    """
    if not _has_kernel(logits, sampling):
        return distribution_plainly(logits, sampling)
    return on_one_tpu(
        *_unfiltered(logits, sampling),
        kernel=draw_kernels.distribution,
        plain=_distribution_at,
    )


def _has_kernel(logits: Array, sampling: Sampling) -> bool:
    filtered = sampling.top_k is not None or sampling.top_p is not None
    return not filtered and draw_kernels.suits(logits.size)


def _unfiltered(logits: Array, sampling: Sampling) -> tuple[Array, Array]:
    """The inputs of the kernels of `distribution` and `draw_from_logits`."""
    return logits.astype(jnp.float32), jnp.asarray(sampling.temperature, jnp.float32)


def _distribution_at(logits: Array, temperature: Array) -> Array:
    return distribution_plainly(logits, Sampling(temperature))


def _drawn_at(logits: Array, temperature: Array, uniform: Array) -> tuple[Array, Array]:
    return draw_plainly(logits, Sampling(temperature), uniform)


def distribution_plainly(logits: Float[Array, " V"], sampling: Sampling) -> Float32[Array, " V"]:
    """`distribution`, without a kernel."""
    parts = _weigh(logits, sampling)
    arrays = parts.chosen, parts.largest
    mass, first = by_platform(*arrays, tpu=_reduced, default=_reduced_apart)
    return _probs(parts, mass, first)


def draw_from_logits(
    logits: Float[Array, " V"],
    sampling: Sampling,
    uniform: Float32[Array, "*U"],
) -> tuple[Float32[Array, " V"], Int32[Array, ""]]:
    """`distribution`, and a token drawn from it, with fewer passes over the vocabulary.

    The probabilities are equal to those of `distribution` but for the rounding of their sum. For
    `uniform` see `draw`.
    """
    if not _has_kernel(logits, sampling) or uniform.ndim == 0:
        return draw_plainly(logits, sampling, uniform)
    return on_one_tpu(
        *_unfiltered(logits, sampling),
        uniform,
        kernel=draw_kernels.draw_from_logits,
        plain=_drawn_at,
    )


def draw_plainly(
    logits: Float[Array, " V"],
    sampling: Sampling,
    uniform: Float32[Array, "*U"],
) -> tuple[Float32[Array, " V"], Int32[Array, ""]]:
    """`draw_from_logits`, without a kernel."""
    parts = _weigh(logits, sampling)
    # The first of the largest logits is the token that a uniform of 0 finds among them.
    levels = levels_of(parts.chosen)
    uniform = jnp.where(parts.greedy, 0.0, uniform)
    token = descend(levels, uniform, parts.weights.size)
    return _probs(parts, total(levels[-1]), token), token


def log_distribution(logits: Float[Array, " V"], sampling: Sampling) -> Float32[Array, " V"]:
    """The logarithm of `distribution`, also where that rounds a probability to 0.

    It is -inf where a filter leaves a token out, or a logit is -inf. At temperature 0 it is the
    model's own, as at temperature 1 without filters.
    """
    logs = _weigh(logits, sampling).logs
    return logs - jnp.log(total(jnp.exp(logs)))


def log_confidence(logits: Float[Array, " V"], token: Int32[Array, ""]) -> Float32[Array, ""]:
    """The logarithm of `confidence` at a token, also where that rounds it to 0."""
    top, logit = (x.astype(jnp.float32) for x in (jnp.max(logits), entry(logits, token)))
    mass = total(jnp.exp(_weigh(logits, Sampling()).logs))
    return jnp.where(logit == top, 0.0, logit - top) - jnp.log(mass)


class _Weights(NamedTuple):
    """Logits, turned into weights.

    Attributes:
      logs: `log_distribution` but for a constant; at most 0.
      weights: `distribution` before it is divided by its sum, if not greedy; NaN where a logit is.
      largest: 1 at the largest logits, else 0; NaN where a logit is.
    """

    logs: Float32[Array, " V"]
    weights: Float32[Array, " V"]
    largest: Float32[Array, " V"]
    greedy: Bool[Array, ""]

    @property
    def chosen(self) -> Array:
        """The weights to draw by: `largest` if greedy, else `weights`."""
        return jnp.where(self.greedy, self.largest, self.weights)


def _weigh(logits: Array, sampling: Sampling) -> _Weights:
    assert sampling.processors is None, "draw rows by the functions of specjax.processing"
    assert logits.ndim == 1, "logits must be those of one position: vmap over the others"
    settings = jax.tree.leaves((sampling.temperature, sampling.top_k, sampling.top_p))
    assert not any(map(jnp.ndim, settings)), "a setting per row: vmap over the rows"
    logits = logits.astype(jnp.float32)
    top = jnp.max(logits)
    is_top = logits == top
    # The distance below the largest logit: exactly zero there, also if it is infinite.
    distance = jnp.where(is_top, 0.0, top - logits)
    temperature = jnp.asarray(sampling.temperature, jnp.float32)
    greedy = temperature < TINY
    logs = -distance / jnp.where(greedy, 1.0, temperature)
    # At a huge temperature XLA computes inf * 0.
    logs = jnp.where(jnp.isinf(distance), -jnp.inf, logs)
    weights = jnp.exp(logs)
    # Weights that would be 0 after the division by the sum are set to 0 before it, so that both
    # agree on what can be drawn.
    weights = jnp.where(weights < TINY * logits.size, 0.0, weights)
    if sampling.top_k is not None or sampling.top_p is not None:
        rank = descending_bits(logits)
    kept = []
    if sampling.top_k is not None:
        kept.append(in_top_k(rank, jnp.asarray(sampling.top_k, jnp.int32)))
        weights = jnp.where(kept[-1], weights, 0.0)
    if sampling.top_p is not None:
        kept.append(in_top_p(weights, rank, jnp.asarray(sampling.top_p, jnp.float32)))
        weights = jnp.where(kept[-1], weights, 0.0)
    for each in kept:
        logs = jnp.where(each | greedy, logs, -jnp.inf)
    # A maximum may lose NaN (XLA's are fast, not careful): a sum does not.
    largest = jnp.where(jnp.isnan(logits), logits, is_top.astype(jnp.float32))
    return _Weights(logs, weights, largest, greedy)


def _probs(parts: _Weights, mass: Array, first: Array) -> Array:
    """`distribution`, from the sum of the drawing weights and the first largest logit."""
    place = np.arange(parts.weights.size, dtype=np.int32)
    one_hot = jnp.where(jnp.isnan(mass), mass, (place == first).astype(jnp.float32))
    return jnp.where(parts.greedy, one_hot, parts.weights / mass)


def _reduced_apart(chosen: Array, largest: Array) -> tuple[Array, Array]:
    """The sum of the drawing weights, and the first of the largest logits."""
    place = np.arange(chosen.size, dtype=np.int32)
    # Not argmax, which reduces pairs and takes five times as long on CPUs.
    return total(chosen), jnp.min(jnp.where(largest == 1.0, place, chosen.size))


@jax.custom_jvp
def _reduced(chosen: Array, largest: Array) -> tuple[Array, Array]:
    """`_reduced_apart` in one pass; XLA on TPUs does not fuse the two sums itself."""
    place = lax.iota(jnp.int32, chosen.size)
    first = jnp.where(largest == 1.0, place, chosen.size)

    def join(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        return a[0] + b[0], lax.min(a[1], b[1])

    start = (np.float32(0.0), np.int32(chosen.size))
    return tuple(lax.reduce((chosen, first), start, join, (0,)))


@_reduced.defjvp
def _(primals: Any, tangents: Any) -> Any:
    # JAX has no derivative for a reduction of pairs.
    return _reduced(*primals), (total(tangents[0]), np.zeros((), jax.dtypes.float0))


def confidence(logits: Float[Array, " V"]) -> Float32[Array, " V"]:
    """What rules read as a model's confidence: softmax at temperature 1, unfiltered."""
    return distribution(logits, Sampling())


# Top-k and top-p, without sorting the vocabulary.


def descending_bits(logits: Float32[Array, "*B V"]) -> UInt32[Array, "*B V"]:
    """Integers that order floats from the largest (+inf) down; equal floats get equal integers.

    NaN comes first, whatever its sign: a filter must not hide it.
    """
    # -0 becomes 0. XLA would take a sum with 0 away.
    bits = lax.bitcast_convert_type(jnp.where(logits == 0.0, 0.0, logits), jnp.uint32)
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
    mass = jnp.maximum(p * jnp.sum(weights), TINY)
    # The smallest threshold that keeps a probability of p; all tokens up to it are kept.
    return (rank <= _edge(rank, weights, mass)) | (p >= 1.0)


def _edge(rank: Array, values: Array, least: Array) -> Array:
    """The smallest bound up to which values sum to `least`; if none, the largest uint32."""
    # Its derivative is zero except at jumps.
    arrays = lax.stop_gradient((rank, values, least))
    return by_platform(*arrays, tpu=_edge_by_sixteenths, default=_edge_by_halves)


def _edge_by_halves(rank: Array, values: Array, least: Array) -> Array:

    def halve(_, span):
        low, high = span
        middle = low + (high - low) // 2
        hit = jnp.sum(jnp.where(rank <= middle, values, jnp.zeros((), values.dtype))) >= least
        return jnp.where(hit, low, middle + 1), jnp.where(hit, middle, high)

    span = (jnp.uint32(0), jnp.uint32(0xFFFFFFFF))
    return lax.fori_loop(0, 32, halve, span)[1]


def _edge_by_sixteenths(rank: Array, values: Array, least: Array) -> Array:
    none = np.zeros((), values.dtype)

    def digit(i: Array, low: Array) -> Array:
        width = jnp.uint32(1) << (28 - 4 * i).astype(jnp.uint32)
        bounds = [low + np.uint32(j) * width - np.uint32(1) for j in range(1, 16)]
        counted = tuple(jnp.where(rank <= bound, values, none) for bound in bounds)
        sums = lax.reduce(counted, (none,) * 15, lambda x, y: jax.tree.map(jnp.add, x, y), (0,))
        below = sum((x < least).astype(jnp.uint32) for x in sums)
        return low + below * width

    return lax.fori_loop(0, 8, digit, jnp.uint32(0))
