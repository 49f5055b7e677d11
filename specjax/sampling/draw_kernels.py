"""Softmax and a draw from it in one TPU kernel: `sampling.drawn` without filters.

XLA makes about 25 operations of `drawn`. Here a tile of 8 x 128 numbers in VMEM is one leaf of the
tree of sums for each of eight rows, and three passes over the tiles suffice.

Axes: B rows, V vocabulary; R rows of a block, at most 8; C chunks of 128 tiles.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp

from specjax.sampling.lanes import (
    LANES,
    column,
    first_above,
    lane,
    only,
    over_rows,
    over_tiles,
    row,
    tile_of,
    traced_once,
)
from specjax.types.language_model import Array

# The smallest normal number: smaller temperatures and probabilities count as 0.
_TINY = float(jnp.finfo(jnp.float32).tiny)


# Eight rows of two arrays, each twice to read ahead, fit into `lanes`' part of VMEM.
_MOST = 22 * LANES * LANES


def suits(vocab_size: int) -> bool:
    """Whether the kernels support this vocabulary size: above a draw's root, at most 360,448."""
    return 512 < vocab_size <= _MOST


@traced_once
def drawn(
    logits: Array, temperature: Array, uniforms: Array, *, interpret: bool = False
) -> tuple[Array, Array]:
    """`sampling.drawn` of many rows, for a `Sampling` without top-k and top-p.

    Args:
      logits: `[B, V]` float32; `suits(V)` must be true.
      temperature: `[B]` float32.
      uniforms: `[B, num_uniforms(V)]` float32 in [0, 1).
      interpret: whether to interpret it, which works on any machine (static).

    Returns:
      `[B, V]` float32 probabilities, equal to `sampling.drawn`'s to a few roundings, and `[B]`
      int32 tokens.
    """
    vocab = logits.shape[1]
    probs, tokens = over_rows(
        functools.partial(_drawn, vocab=vocab), vocab, (temperature, uniforms, logits),
        ((vocab, jnp.float32), (0, jnp.int32)), sums=True, interpret=interpret,
    )  # fmt: skip
    return probs, tokens


@traced_once
def distribution(logits: Array, temperature: Array, *, interpret: bool = False) -> Array:
    """`sampling.distribution` of many rows; arguments as for `drawn`."""
    vocab = logits.shape[1]
    (probs,) = over_rows(
        functools.partial(_distribution, vocab=vocab), vocab, (temperature, logits),
        ((vocab, jnp.float32),), sums=True, interpret=interpret,
    )  # fmt: skip
    return probs


@traced_once
def draw_by_weights(weights: Array, uniforms: Array, *, interpret: bool = False) -> Array:
    """`sampling.draw` of many rows: weights `[B, V]` float32, uniforms as for `drawn` -> `[B]`."""
    vocab = weights.shape[1]
    kernel = functools.partial(_draw_by_weights, vocab=vocab)
    inputs, outputs = (uniforms, weights), ((0, jnp.int32),)
    (tokens,) = over_rows(kernel, vocab, inputs, outputs, sums=True, interpret=interpret)
    return tokens


def _drawn(
    temperature_ref: Any,
    uniforms_ref: Any,
    logits_ref: Any,
    probs_ref: Any,
    token_ref: Any,
    sums_ref: Any,
    *,
    vocab: int,
) -> None:
    """One block: temperature and token `[1, 1, R]`, uniforms `[R, levels]`, the others `[R, V]`."""
    uniforms = uniforms_ref[...]
    state = _softmax(temperature_ref, logits_ref, probs_ref, sums_ref, vocab)
    leaf = _leaf(sums_ref, uniforms)
    inside = _normalise(probs_ref, *state[:2], leaf, vocab)
    index = first_above(inside, uniforms[:, uniforms.shape[1] - 1 :])
    token_ref[0] = row(jnp.where(state.greedy, state.best, leaf * LANES + index))


def _distribution(
    temperature_ref: Any, logits_ref: Any, probs_ref: Any, sums_ref: Any, *, vocab: int
) -> None:
    state = _softmax(temperature_ref, logits_ref, probs_ref, sums_ref, vocab)
    _normalise(probs_ref, *state[:2], None, vocab)


def _draw_by_weights(
    uniforms_ref: Any, weights_ref: Any, token_ref: Any, sums_ref: Any, *, vocab: int
) -> None:
    uniforms, none = uniforms_ref[...], jnp.zeros((weights_ref.shape[0], LANES), jnp.float32)

    def add(chunk: Any, within: int, real: int, sums: Array) -> Array:
        weights = only(tile_of(weights_ref, chunk, within)[...], real, 0.0)
        return jnp.where(lane(sums) == within, jnp.sum(weights, axis=1, keepdims=True), sums)

    def keep(chunk: Any, sums: Array) -> Array:
        tile_of(sums_ref, 0, chunk)[...] = sums
        return none

    over_tiles(vocab, add, none, keep)
    leaf = _leaf(sums_ref, uniforms)
    wide = jnp.broadcast_to(leaf, none.shape)

    def find(chunk: Any, within: int, real: int, inside: Array) -> Array:
        weights = only(tile_of(weights_ref, chunk, within)[...], real, 0.0)
        return jnp.where(wide - chunk * LANES == within, weights, inside)

    inside = over_tiles(vocab, find, none)
    token_ref[0] = row(leaf * LANES + first_above(inside, uniforms[:, uniforms.shape[1] - 1 :]))


class _Softmax(NamedTuple):
    """Attributes: the inputs of `_normalise`, and the greedy rows and their tokens `[R, 1]`."""

    inverse: Array
    one: Array
    greedy: Array
    best: Array


def _softmax(
    temperature_ref: Any, logits_ref: Any, weights_ref: Any, sums_ref: Any, vocab: int
) -> _Softmax:
    """Writes weights and sums, see `_weigh`."""
    temperature = column(temperature_ref[0])
    greedy = temperature < _TINY
    largest = _largest(logits_ref, vocab)
    divisor = jnp.where(greedy, 1.0, temperature)
    first = _weigh(logits_ref, weights_ref, sums_ref, largest, divisor, vocab)
    mass = jnp.sum(sums_ref[...], axis=1, keepdims=True)
    # Greedy rows are multiplied by zero; their 1 is put in afterwards.
    zero = jnp.where(jnp.isnan(mass), mass, 0.0)
    place = first * LANES + lane(first)
    best = jnp.min(place, axis=1, keepdims=True)
    one = jnp.where(greedy & (place == best), first, -1)
    best = jnp.where(jnp.isnan(mass), 0, best)
    return _Softmax(jnp.where(greedy, zero, 1.0 / mass), one, greedy, best)


def _largest(logits_ref: Any, vocab: int) -> Array:
    """The largest logit of each row, `[R, 1]`; NaN if any is."""

    def body(chunk: Any, within: int, real: int, best: list[Array]) -> list[Array]:
        # Four chains, because each maximum waits for the maximum before.
        logits = only(tile_of(logits_ref, chunk, within)[...], real, -jnp.inf)
        i = within % len(best)
        return [*best[:i], jnp.maximum(best[i], logits), *best[i + 1 :]]

    start = jnp.full((logits_ref.shape[0], LANES), -jnp.inf, jnp.float32)
    best = over_tiles(vocab, body, [start] * 4)
    return jnp.max(functools.reduce(jnp.maximum, best), axis=1, keepdims=True)


def _weigh(
    logits_ref: Any, weights_ref: Any, sums_ref: Any, largest: Array, temperature: Array, vocab: int
) -> Array:
    """Writes the weights of `sampling.distribution`, as if no row were greedy."""
    rate = jnp.minimum(-1.0 / temperature, -_TINY)  # inf times it is never inf times 0
    none = jnp.full((logits_ref.shape[0], LANES), sums_ref.shape[1], jnp.int32)
    start = none, none, jnp.zeros(none.shape, jnp.float32)

    def body(chunk: Any, within: int, real: int, carry: Any) -> Any:
        first, inside, sums = carry
        logits = only(tile_of(logits_ref, chunk, within)[...], real, -jnp.inf)
        hit = logits == largest
        # See `sampling._weighed` for both conditions.
        weights = jnp.exp(jnp.where(hit, 0.0, (largest - logits) * rate))
        # NaN stays, and the sums show it; a maximum may lose it.
        weights = only(jnp.where(weights < _TINY * vocab, 0.0, weights), real, 0.0)
        tile_of(weights_ref, chunk, within)[...] = weights
        sums = jnp.where(lane(sums) == within, jnp.sum(weights, axis=1, keepdims=True), sums)
        return first, jnp.minimum(inside, jnp.where(hit, within, none)), sums

    def done(chunk: Any, carry: Any) -> Any:
        first, inside, sums = carry
        tile_of(sums_ref, 0, chunk)[...] = sums
        return jnp.minimum(first, chunk * LANES + inside), *start[1:]

    return over_tiles(vocab, body, start, done)[0]


def _leaf(sums_ref: Any, uniforms: Array) -> Array:
    """The drawn tile of each row, `[R, 1]` int32; `sums_ref [R, C * 128]`."""
    sums = sums_ref[...]
    if uniforms.shape[1] == 2:
        return first_above(sums, uniforms[:, :1])
    chunks = [sums[:, i : i + LANES] for i in range(0, sums.shape[1], LANES)]
    nodes = jnp.zeros(chunks[0].shape, jnp.float32)
    for i, chunk in enumerate(chunks):
        nodes = jnp.where(lane(nodes) == i, jnp.sum(chunk, axis=1, keepdims=True), nodes)
    node = first_above(nodes, uniforms[:, :1])
    inside = functools.reduce(
        lambda found, i: jnp.where(node == i, chunks[i], found), range(len(chunks)), nodes
    )
    return node * LANES + first_above(inside, uniforms[:, 1:2])


def _normalise(probs_ref: Any, inverse: Array, one: Array, leaf: Array | None, vocab: int) -> Array:
    """Turns weights into probabilities, in place."""

    def body(chunk: Any, within: int, real: int, inside: Array) -> Array:
        del real
        weights = tile_of(probs_ref, chunk, within)
        probs = jnp.where(one - chunk * LANES == within, 1.0, weights[...] * inverse)
        weights[...] = probs
        if leaf is None:
            return inside
        return jnp.where(leaf - chunk * LANES == within, probs, inside)

    if leaf is not None:
        leaf = jnp.broadcast_to(leaf, one.shape)
    return over_tiles(vocab, body, jnp.zeros(one.shape, jnp.float32))
