"""From logits to the distribution that tokens are drawn from, and drawing from it.

One function, `distribution`, serves drafter, verifier and baselines alike, so that they cannot
differ. Its order is fixed: temperature, then top-k, then top-p. All of it is float32.

Functions take one position; `jax.vmap` them over rows. V: vocabulary.
"""

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax

from specjax.base import Array, checked, traced_dataclass

# Sums over a vocabulary go through blocks of this many entries: float32 loses too much otherwise.
_BLOCK = 512
_FAN_OUT = 64
# Distances below the largest logit are non-negative floats, whose bits order them as integers.
_INF_BITS = 0x7F800000
_TINY = float(jnp.finfo(jnp.float32).tiny)


@traced_dataclass
class Sampling:
    """How tokens are drawn. Each field is one number, or an array of one number per row.

    A field that is None is left out of the compiled program, so an unfiltered run never looks for
    a threshold.

    Attributes:
      temperature: >= 0; logits are divided by it. 0: greedy, one-hot at the first argmax.
      top_k: >= 1, or None; only the k largest logits stay. Ties with the k-th all stay.
      top_p: in (0, 1], or None; a token stays while the tokens strictly more probable than it
        (after temperature and top-k) hold less than this mass, so ties at the edge all stay.

    Raises:
      ValueError: if a concrete value is outside its range.
    """

    temperature: Array | float = 1.0
    top_k: Array | int | None = None
    top_p: Array | float | None = None

    def __post_init__(self) -> None:
        put = object.__setattr__
        put(self, "temperature", checked("temperature", self.temperature, low=0.0))
        if self.top_k is not None:
            put(self, "top_k", checked("top_k", self.top_k, low=1, dtype=jnp.int32))
        if self.top_p is not None:
            put(self, "top_p", checked("top_p", self.top_p, low=0.0, high=1.0, open_low=True))


def distribution(logits: Array, sampling: Sampling) -> Array:
    """The distribution that tokens are drawn from: temperature, then top-k, then top-p.

    Args:
      logits: `[V]`, any float dtype; -inf marks a token that cannot be drawn. Where all are -inf
        the result is uniform (one-hot at token 0 if greedy).
      sampling: a `Sampling` whose fields are scalars.

    Returns:
      `[V]` float32 probabilities.

    Raises:
      ValueError: (at trace time) if `logits` is not one vector.
    """
    logits = _vector("logits", logits).astype(jnp.float32)
    largest = jnp.max(logits)
    # How far below the largest logit; exact zero at it, also where it is infinite.
    distance = jnp.where(logits == largest, 0.0, largest - logits)
    temperature = jnp.asarray(sampling.temperature, jnp.float32)
    greedy = temperature < _TINY
    weights = jnp.exp(-distance / jnp.where(greedy, 1.0, temperature))
    if sampling.top_k is not None:
        weights = _keep_top_k(weights, distance, jnp.asarray(sampling.top_k, jnp.int32))
    if sampling.top_p is not None:
        weights = _keep_top_p(weights, distance, jnp.asarray(sampling.top_p, jnp.float32))
    first = jnp.arange(logits.size) == jnp.argmax(logits)
    return jnp.where(greedy, first.astype(jnp.float32), weights / total(weights))


def confidence(logits: Array) -> Array:
    """The distribution that rules read a model's confidence from: softmax, unfiltered, at T = 1.

    Args:
      logits: `[V]`, any float dtype.

    Returns:
      `[V]` float32 probabilities.
    """
    return distribution(logits, Sampling())


def draw(weights: Array, uniform: Array) -> Array:
    """Draws one token by the inverse of the cumulative distribution.

    Args:
      weights: `[V]` float32, non-negative; need not sum to one.
      uniform: scalar float32 in [0, 1).

    Returns:
      An int32 token whose weight is positive: the first whose cumulative weight exceeds `uniform`
      times the total. Token 0 if no weight is positive.
    """
    # Sums of 64, of 64 of those, and so on; then down again, one block a level: no long cumulative
    # sum, which float32 (and its cost, on CPUs quadratic) forbids.
    levels = [_vector("weights", weights)]
    while levels[-1].size > _FAN_OUT:
        blocks = _blocks(levels[-1], _FAN_OUT)
        levels[-1:] = [blocks, lax.optimization_barrier(jnp.sum(blocks, axis=1))]
    top = jnp.cumsum(levels[-1])
    token, target = _first_above(levels[-1], top, uniform * top[-1])
    for blocks in levels[-2::-1]:
        inside = lax.dynamic_index_in_dim(blocks, token, keepdims=False)
        index, target = _first_above(inside, jnp.cumsum(inside), target)
        token = token * _FAN_OUT + index
    return token.astype(jnp.int32)


def residual(target: Array, draft: Array, scale: Array | float = 1.0) -> Array:
    """What is left of a target after a draft was rejected: norm((scale * target - draft)_+).

    Args:
      target: `[V]` float32 probabilities.
      draft: `[V]` float32 probabilities.
      scale: scalar >= 0.

    Returns:
      `[V]` float32 probabilities; `target` itself where nothing is left (which exact arithmetic
      reaches with probability zero).
    """
    weights = residual_weights(target, draft, scale)
    return weights / total(weights)


def residual_weights(target: Array, draft: Array, scale: Array | float = 1.0) -> Array:
    """`residual` before normalisation: `[V]` float32 weights with a positive sum, for `draw`."""
    weights = jnp.maximum(scale * target - draft, 0.0)
    # Not "sum > 0": dividing by a subnormal sum would overflow.
    return jnp.where(jnp.max(weights) >= _TINY, weights, target)


def normalise(weights: Array, fallback: Array) -> Array:
    """Weights / sum(weights), `[V]` float32; `fallback` where the sum is zero."""
    mass = total(weights)
    return jnp.where(mass > 0.0, weights / jnp.where(mass > 0.0, mass, 1.0), fallback)


def total(weights: Array) -> Array:
    """The sum of `weights [V]`, in two levels: accurate to about 1e-6 of it at V = 262,144."""
    # The barrier keeps XLA from merging the two levels back into one long float32 sum.
    return jnp.sum(lax.optimization_barrier(jnp.sum(_blocks(weights), axis=1)))


def _blocks(x: Array, width: int | None = None) -> Array:
    if width is None:
        # A power of two that divides V needs no padding; a short vector is one block.
        width = next((w for w in (512, 256, 128) if x.size % w == 0), min(_BLOCK, x.size))
    return jnp.pad(x, (0, -x.size % width)).reshape(-1, width)


def _first_above(weights: Array, cumulative: Array, target: Array) -> tuple[Array, Array]:
    """The first positive entry whose cumulative weight exceeds the target, else the last one.

    Also returns what is left of the target inside that entry.
    """
    positive = weights > 0.0
    hit = positive & (cumulative > target)
    last = weights.size - 1 - jnp.argmax(positive[::-1])
    index = jnp.where(jnp.any(hit), jnp.argmax(hit), jnp.where(jnp.any(positive), last, 0))
    before = jnp.where(index > 0, cumulative[jnp.maximum(index - 1, 0)], 0.0)
    return index, target - before


def _keep_top_k(weights: Array, distance: Array, k: Array) -> Array:
    bits = lax.bitcast_convert_type(distance, jnp.int32)
    count = jnp.minimum(k, weights.size)
    # The least threshold at or below which at least k tokens lie: no sort of the vocabulary.
    edge = _bisect(lambda bound: jnp.sum(bits <= bound, dtype=jnp.int32) >= count)
    return jnp.where(bits <= edge, weights, 0.0)


def _keep_top_p(weights: Array, distance: Array, p: Array) -> Array:
    bits = lax.bitcast_convert_type(distance, jnp.int32)
    mass = p * total(weights)
    # The least threshold at or below which the nucleus is full: all tokens up to it stay.
    edge = _bisect(lambda bound: total(jnp.where(bits <= bound, weights, 0.0)) >= mass)
    return jnp.where((bits <= edge) | (p >= 1.0), weights, 0.0)


def _bisect(reached: Callable[[Array], Array]) -> Array:
    """The least integer in [0, bits of infinity] at which a monotone predicate holds."""

    def halve(_, span):
        low, high = span
        middle = low + (high - low) // 2
        hit = reached(middle)
        return jnp.where(hit, low, middle + 1), jnp.where(hit, middle, high)

    return lax.fori_loop(0, 31, halve, (jnp.int32(0), jnp.int32(_INF_BITS)))[1]


def _vector(name: str, x: Array) -> Array:
    if jnp.ndim(x) != 1 or jnp.size(x) == 0:
        raise ValueError(
            f"{name} must be one vector [V], got shape {jnp.shape(x)}: vmap over the other axes"
        )
    return jnp.asarray(x)
