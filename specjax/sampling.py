"""Turns logits into the distribution that tokens are drawn from, and draws from it.

Drafter, verifier and baselines all use the function `distribution`, so that they cannot differ.
Its order is fixed: temperature, then top-k, then top-p. All computations are float32.

Functions take one position; `jax.vmap` them over rows. V: vocabulary.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from specjax import platforms
from specjax.checks import check_scalars
from specjax.filters import descending_bits, keep_top_k, keep_top_p
from specjax.kernels import draw as draw_kernels
from specjax.kernels.choice import on_one_tpu
from specjax.platforms import by_platform
from specjax.types import Array, Sampling

# Entries per node of the tree that a draw descends (the lanes of a TPU), and of its root at most.
_FAN_OUT, _ROOT = 128, 512
TINY = float(jnp.finfo(jnp.float32).tiny)


def distribution(logits: Array, sampling: Sampling) -> Array:
    """The distribution that tokens are drawn from: temperature, then top-k, then top-p.

    Args:
      logits: `[V]`, any float dtype; -inf marks a token that cannot be drawn. If all are -inf,
        the result is uniform (one-hot at token 0 if greedy). NaN logits give NaN.
      sampling: a `Sampling` whose fields are scalars.

    Returns:
      `[V]` float32 probabilities.

    Raises:
      ValueError: (at trace time) if `logits` is not one vector or a setting is not one number.
    """
    if not _has_kernel(logits, sampling):
        return _distribution(logits, sampling)
    return on_one_tpu(
        *_unfiltered(logits, sampling),
        kernel=draw_kernels.distribution,
        plain=_distribution_at,
    )


def _has_kernel(logits: Array, sampling: Sampling) -> bool:
    filtered = sampling.top_k is not None or sampling.top_p is not None
    return not filtered and draw_kernels.suits(_vector("logits", logits).size)


def _unfiltered(logits: Array, sampling: Sampling) -> tuple[Array, Array]:
    """What the kernels of `distribution` and `drawn` read."""
    check_scalars(sampling)
    return logits.astype(jnp.float32), jnp.asarray(sampling.temperature, jnp.float32)


def _distribution_at(logits: Array, temperature: Array) -> Array:
    return _distribution(logits, Sampling(temperature))


def _drawn_at(logits: Array, temperature: Array, uniform: Array) -> tuple[Array, Array]:
    return _drawn(logits, Sampling(temperature), uniform)


def _distribution(logits: Array, sampling: Sampling) -> Array:
    weighed = _weighed(logits, sampling)
    given = weighed.chosen, weighed.largest
    mass, first = by_platform(*given, tpu=_reduced, default=_reduced_apart)
    return _probs(weighed, mass, first)


def drawn(logits: Array, sampling: Sampling, uniform: Array) -> tuple[Array, Array]:
    """`distribution`, and a token drawn from it, with fewer passes over the vocabulary.

    Args:
      logits: see `distribution`.
      sampling: see `distribution`.
      uniform: `[num_uniforms(V)]` float32 in [0, 1).

    Returns:
      `[V]` float32 probabilities, equal to `distribution`'s but for the rounding of their sum, and
      an int32 token.

    Raises:
      ValueError: see `distribution` and `draw`.
    """
    if not _has_kernel(logits, sampling) or uniform.ndim == 0:
        return _drawn(logits, sampling, uniform)
    return on_one_tpu(
        *_unfiltered(logits, sampling),
        uniform,
        kernel=draw_kernels.drawn,
        plain=_drawn_at,
    )


def _drawn(logits: Array, sampling: Sampling, uniform: Array) -> tuple[Array, Array]:
    weighed = _weighed(logits, sampling)
    # The first of the largest logits is the token that a uniform of 0 finds among them.
    levels = _levels(weighed.chosen)
    uniform = jnp.where(weighed.greedy, 0.0, uniform)
    token = _descend(levels, uniform, weighed.weights.size)
    return _probs(weighed, total(levels[-1]), token), token


class _Weighed(NamedTuple):
    """Logits, turned into weights.

    Attributes:
      weights: `[V]` float32 >= 0: `distribution` before it is divided by its sum, if not greedy;
        NaN where a logit is.
      largest: `[V]` float32, 1 at the largest logits, else 0; NaN where a logit is.
      greedy: bool scalar.
    """

    weights: Array
    largest: Array
    greedy: Array

    @property
    def chosen(self) -> Array:
        """What a token is drawn by: `largest` if greedy, else `weights`."""
        return jnp.where(self.greedy, self.largest, self.weights)


def _weighed(logits: Array, sampling: Sampling) -> _Weighed:
    if sampling.processing is not None:
        raise ValueError(
            "sampling has a processor: draw rows by the functions of specjax.processing"
        )
    logits = _vector("logits", logits).astype(jnp.float32)
    check_scalars(sampling)
    top = jnp.max(logits)
    is_top = logits == top
    # The distance below the largest logit: exactly zero there, also if it is infinite.
    distance = jnp.where(is_top, 0.0, top - logits)
    temperature = jnp.asarray(sampling.temperature, jnp.float32)
    greedy = temperature < TINY
    weights = jnp.exp(-distance / jnp.where(greedy, 1.0, temperature))
    # What would be 0 after the division by the sum is 0 before it: both then say the same of what
    # can be drawn. So are -inf logits at a huge temperature, where XLA computes inf * 0.
    weights = jnp.where((weights < TINY * logits.size) | jnp.isinf(distance), 0.0, weights)
    if sampling.top_k is not None or sampling.top_p is not None:
        rank = descending_bits(logits)
    if sampling.top_k is not None:
        weights = keep_top_k(weights, rank, jnp.asarray(sampling.top_k, jnp.int32))
    if sampling.top_p is not None:
        weights = keep_top_p(weights, rank, jnp.asarray(sampling.top_p, jnp.float32))
    # A maximum may pass NaN over (XLA's are fast, not careful): a sum does not.
    largest = jnp.where(jnp.isnan(logits), logits, is_top.astype(jnp.float32))
    return _Weighed(weights, largest, greedy)


def _probs(weighed: _Weighed, mass: Array, first: Array) -> Array:
    """`distribution`, from the sum of what is chosen by and the first of the largest logits."""
    place = np.arange(weighed.weights.size, dtype=np.int32)
    one_hot = jnp.where(jnp.isnan(mass), mass, (place == first).astype(jnp.float32))
    return jnp.where(weighed.greedy, one_hot, weighed.weights / mass)


def _reduced_apart(chosen: Array, largest: Array) -> tuple[Array, Array]:
    """The sum of what is chosen by, and the first of the largest logits."""
    place = np.arange(chosen.size, dtype=np.int32)
    # Not argmax, which reduces pairs and takes five times as long on CPUs.
    return total(chosen), jnp.min(jnp.where(largest == 1.0, place, chosen.size))


@jax.custom_jvp
def _reduced(chosen: Array, largest: Array) -> tuple[Array, Array]:
    """`_reduced_apart` in one pass, which XLA on TPUs does not make of two sums by itself."""
    place = lax.iota(jnp.int32, chosen.size)
    first = jnp.where(largest == 1.0, place, chosen.size)

    def join(a: tuple[Array, Array], b: tuple[Array, Array]) -> tuple[Array, Array]:
        return a[0] + b[0], lax.min(a[1], b[1])

    start = (np.float32(0.0), np.int32(chosen.size))
    return tuple(lax.reduce((chosen, first), start, join, (0,)))


@_reduced.defjvp
def _(primals: Any, tangents: Any) -> Any:
    # A reduction of pairs has no derivative of its own in JAX.
    return _reduced(*primals), (total(tangents[0]), np.zeros((), jax.dtypes.float0))


def confidence(logits: Array) -> Array:
    """The distribution that gives rules a model's confidence: softmax at temperature 1, unfiltered.

    Args:
      logits: `[V]`, any float dtype.

    Returns:
      `[V]` float32 probabilities.
    """
    return distribution(logits, Sampling())


def num_uniforms(vocab_size: int) -> int:
    """The number of independent uniforms that make `draw` exact at this vocabulary size."""
    count = 1
    while vocab_size > _ROOT:
        vocab_size, count = -(-vocab_size // _FAN_OUT), count + 1
    return count


def draw(weights: Array, uniform: Array) -> Array:
    """Draws one token by the inverse of the cumulative distribution.

    Sums of up to 128 entries, sums of 128 such sums and so on form a tree. The draw descends from
    its root, because a long cumulative sum is not monotone in float32 and would draw tokens of zero
    probability.

    Args:
      weights: `[V]` float32, non-negative; need not sum to one.
      uniform: float32 in [0, 1): a scalar, or `[num_uniforms(V)]`, one for each level of the tree.
        One float32 uniform has 2^23 values: at V = 262,144 the law of the draw is then off by
        0.5 % in total variation. With one per level it is exact to rounding.

    Returns:
      An int32 token whose weight is positive: with a scalar, the first token whose cumulative
      weight exceeds `uniform` times the total. Token 0 if no weight is positive.

    Raises:
      ValueError: (at trace time) for other shapes or dtypes.
    """
    weights = _vector("weights", weights)
    if weights.dtype != jnp.float32:
        raise ValueError(f"weights must be float32, got {weights.dtype}")
    if uniform.shape != (num_uniforms(weights.size),) or not draw_kernels.suits(weights.size):
        return _draw(weights, uniform)
    return on_one_tpu(weights, uniform, kernel=draw_kernels.draw_by_weights, plain=_draw)


def _draw(weights: Array, uniform: Array) -> Array:
    return _descend(_levels(weights), uniform, weights.size)


def _levels(weights: Array) -> list[Array]:
    """The tree of sums, leaves first: nodes `[m, 128]`, and the root `[n]`."""
    levels, size = [weights], weights.size
    # As many as `num_uniforms` says, whatever is padded.
    while size > _ROOT:
        size = -(-size // _FAN_OUT)
        blocks = _blocks(levels[-1])
        levels[-1:] = [blocks, lax.optimization_barrier(jnp.sum(blocks, axis=1))]
    return levels


def _descend(levels: list[Array], uniform: Array, size: int) -> Array:
    """The token that `draw` finds on its way from the root down."""
    if uniform.shape not in ((), (len(levels),)):
        raise ValueError(
            f"uniform must be a scalar or [{len(levels)}] at V = {size}, got shape "
            f"{uniform.shape}: draw num_uniforms(V) uniforms"
        )
    fresh = uniform.ndim == 1
    levels = [*levels[:-1], levels[-1][None]]
    token, target = jnp.int32(0), jnp.float32(0.0)
    for depth, blocks in enumerate(reversed(levels)):
        inside = lax.dynamic_index_in_dim(blocks, token, keepdims=False)
        cumulative = by_platform(inside, tpu=_cumulative_by_product, default=jnp.cumsum)
        if fresh or depth == 0:
            target = (uniform[depth] if fresh else uniform) * cumulative[-1]
        index, target = _first_above(inside, cumulative, target)
        token = token * inside.size + index
    return token


def residual(target: Array, draft: Array, scale: Array | float = 1.0) -> Array:
    """The distribution after a rejected draft: norm((scale * target - draft)_+).

    Source: Leviathan et al. (arXiv 2211.17192); with a scale, Sun et al., Block Verification.

    Args:
      target: `[V]` float32 probabilities.
      draft: `[V]` float32 probabilities.
      scale: scalar >= 0.

    Returns:
      `[V]` float32 probabilities; `target` itself if the residual has no mass (in exact
      arithmetic this has probability zero).
    """
    weights = residual_weights(target, draft, scale)
    return weights / total(weights)


def residual_weights(target: Array, draft: Array, scale: Array | float = 1.0) -> Array:
    """`residual` before normalisation: `[V]` float32 weights with a positive sum, for `draw`."""
    weights = jnp.maximum(scale * target - draft, 0.0)
    # Not "sum > 0": division by a subnormal sum would overflow.
    return jnp.where(jnp.max(weights) >= TINY, weights, target)


def residual_mass(target: Array, draft: Array, scale: Array | float = 1.0) -> Array:
    """sum_v (scale * target(v) - draft(v))_+; `[V]`, `[V]`, scalar -> scalar."""
    left = scale * target - draft
    # x + |x| is twice the positive part. It needs no constant: for max(x, 0) XLA on CPUs writes a
    # whole array of zeros, to share it between two such sums.
    return 0.5 * total(left + jnp.abs(left))


def normalise(weights: Array, fallback: Array) -> Array:
    """Weights / sum(weights), `[V]` float32; `fallback` if the sum is zero."""
    mass = total(weights)
    return jnp.where(mass > 0.0, weights / jnp.where(mass > 0.0, mass, 1.0), fallback)


def total(weights: Array) -> Array:
    """The sum of `weights [V]`, float32 scalar.

    XLA sums in a tree on every backend: the relative error is below 1e-6 at V = 262,144. Our own
    sum in two levels took five times as long on CPUs.
    """
    return jnp.sum(weights)


def _blocks(x: Array) -> Array:
    """`x [n]` in nodes `[m, 128]`, padded with zeros."""
    ways = platforms.vocabulary_ways()
    nodes = -(-x.size // _FAN_OUT)
    if nodes > ways:
        nodes += -nodes % ways
    return jnp.pad(x, (0, nodes * _FAN_OUT - x.size)).reshape(nodes, _FAN_OUT)


def _cumulative_by_product(x: Array) -> Array:
    """`jnp.cumsum` of a short vector in one operation, where XLA makes five of it."""
    below = np.tri(x.size, dtype=np.float32).T
    return jnp.dot(x, below, precision=lax.Precision.HIGHEST)


def _first_above(weights: Array, cumulative: Array, target: Array) -> tuple[Array, Array]:
    """The first positive entry whose cumulative weight exceeds the target, else the last one.

    Also returns the target minus the cumulative weight before that entry.
    """
    size, place = weights.size, np.arange(weights.size, dtype=np.int32)
    positive = weights > 0.0
    # One reduction: the minimum is the first hit, else the last positive entry, else 2 * size.
    order = jnp.where(positive, 2 * size - 1 - place, 2 * size)
    best = jnp.min(jnp.where(positive & (cumulative > target), place, order))
    index = jnp.where(best < size, best, jnp.where(best < 2 * size, 2 * size - 1 - best, 0))
    before = jnp.where(index > 0, cumulative[jnp.maximum(index - 1, 0)], 0.0)
    return index, target - before


def _vector(name: str, x: Array) -> Array:
    if jnp.ndim(x) != 1 or jnp.size(x) == 0:
        raise ValueError(
            f"{name} must be one vector [V], got shape {jnp.shape(x)}: vmap over the other axes"
        )
    return jnp.asarray(x)
