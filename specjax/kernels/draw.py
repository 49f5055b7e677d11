"""Softmax and a draw from it in one TPU kernel: what `sampling.drawn` does, without filters.

XLA makes some 25 operations of `drawn`. Here a tile of 8 x 128 numbers in VMEM holds one leaf of
the tree of sums of each of eight rows, and three passes over the tiles do it all.

Axes: B rows, V vocabulary; R rows of a block, at most 8; C chunks of 128 tiles.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specjax import sampling as sampling_lib
from specjax.kernels.choice import on_one_tpu
from specjax.kernels.lanes import (
    LANES,
    SUBLANES,
    column,
    first_above,
    lane,
    only,
    over_tiles,
    row,
    tile_of,
)
from specjax.sampling import TINY, num_uniforms
from specjax.types import Array, Sampling

# Holds logits and probabilities of eight rows at V = 262,144, each twice, to read ahead.
_VMEM = 48 << 20


def drawn_rows(logits: Array, sampling: Sampling, uniforms: Array) -> tuple[Array, Array]:
    """`sampling.drawn` of all rows, by the kernel where it can be used.

    Args:
      logits: `[B, V]`, any float dtype.
      sampling: fields `[B]`.
      uniforms: `[B, num_uniforms(V)]` float32 in [0, 1).

    Returns:
      `[B, V]` float32 probabilities, and `[B]` int32 tokens.
    """
    plain = jax.vmap(sampling_lib.drawn)
    filtered = sampling.top_k is not None or sampling.top_p is not None
    if filtered or not suits(logits.shape[1]):
        return plain(logits, sampling, uniforms)
    return on_one_tpu(
        logits.astype(jnp.float32),
        jnp.broadcast_to(sampling.temperature, logits.shape[:1]).astype(jnp.float32),
        uniforms,
        kernel=drawn,
        plain=lambda logits, temperature, uniforms: plain(logits, Sampling(temperature), uniforms),
    )


def suits(vocab_size: int) -> bool:
    """Whether the kernel takes this vocabulary: more than 512 tokens, at most 2 million."""
    return num_uniforms(vocab_size) > 1 and vocab_size <= LANES**3


def drawn(
    logits: Array, temperature: Array, uniforms: Array, *, interpret: bool = False
) -> tuple[Array, Array]:
    """`sampling.drawn` of all rows, for a `Sampling` without top-k and top-p.

    Args:
      logits: `[B, V]` float32; `suits(V)` must hold.
      temperature: `[B]` float32.
      uniforms: `[B, num_uniforms(V)]` float32 in [0, 1).
      interpret: whether to run it on any machine, step by step (static).

    Returns:
      `[B, V]` float32 probabilities, equal to `sampling.drawn`'s to a few roundings, and `[B]`
      int32 tokens.
    """
    batch, vocab = logits.shape
    rows = min(batch, SUBLANES)
    steps = pl.cdiv(batch, rows)
    temperature = jnp.pad(temperature, (0, steps * rows - batch), constant_values=1.0)
    # Vectors of rows lie in lanes, as XLA keeps them: [B, 1] would be a copy of its own.
    vector = pl.BlockSpec((1, 1, rows), lambda i: (i, 0, 0))
    whole = pl.BlockSpec((rows, pl.cdiv(vocab, LANES) * LANES), lambda i: (i, 0))
    levels = pl.BlockSpec((rows, uniforms.shape[1]), lambda i: (i, 0))
    chunks = pl.cdiv(vocab, LANES * LANES)
    probs, tokens = pl.pallas_call(
        functools.partial(_kernel, vocab=vocab),
        grid=(steps,),
        in_specs=[vector, levels, whole],
        out_specs=[whole, vector],
        out_shape=[
            jax.ShapeDtypeStruct((batch, vocab), jnp.float32),
            jax.ShapeDtypeStruct((steps, 1, rows), jnp.int32),
        ],
        scratch_shapes=[pltpu.VMEM((rows, chunks * LANES), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=_VMEM
        ),
        interpret=interpret,
        name="drawn",
    )(temperature.reshape(steps, 1, rows), uniforms, logits)
    return probs, tokens.reshape(-1)[:batch]


def _kernel(
    temperature_ref: Any,
    uniforms_ref: Any,
    logits_ref: Any,
    probs_ref: Any,
    token_ref: Any,
    sums_ref: Any,
    *,
    vocab: int,
) -> None:
    """One block: temperature and token `[1, 1, R]`, uniforms `[R, levels]`, the others `[R, V]`.

    `sums_ref [R, C * 128]` takes the sums of the tiles.
    """
    temperature, uniforms = column(temperature_ref[0]), uniforms_ref[...]
    greedy = temperature < TINY
    largest = _largest(logits_ref, vocab)
    divisor = jnp.where(greedy, 1.0, temperature)
    first = _weigh(logits_ref, probs_ref, sums_ref, largest, divisor, vocab)
    mass = jnp.sum(sums_ref[...], axis=1, keepdims=True)
    # The greedy rows are multiplied by zero, and their one is put in afterwards.
    zero = jnp.where(jnp.isnan(largest), largest, 0.0)
    best = jnp.min(first * LANES + lane(first), axis=1, keepdims=True)
    one = jnp.where(greedy & (first * LANES + lane(first) == best), first, -1)
    leaf = _leaf(sums_ref, uniforms)
    inside = _normalise(probs_ref, jnp.where(greedy, zero, 1.0 / mass), one, leaf, vocab)
    index = first_above(inside, uniforms[:, uniforms.shape[1] - 1 :])
    drawn = jnp.where(greedy, best, leaf * LANES + index)
    token_ref[0] = row(jnp.where(jnp.isnan(largest), 0, drawn))


def _largest(logits_ref: Any, vocab: int) -> Array:
    """The largest logit of each row, `[R, 1]`; NaN if one is."""

    def body(chunk: Any, within: int, real: int, best: list[Array]) -> list[Array]:
        # Four chains, since each maximum waits for the one before.
        logits = only(tile_of(logits_ref, chunk, within)[...], real, -jnp.inf)
        i = within % len(best)
        return [*best[:i], jnp.maximum(best[i], logits), *best[i + 1 :]]

    start = jnp.full((logits_ref.shape[0], LANES), -jnp.inf, jnp.float32)
    best = over_tiles(vocab, body, [start] * 4)
    return jnp.max(functools.reduce(jnp.maximum, best), axis=1, keepdims=True)


def _weigh(
    logits_ref: Any, weights_ref: Any, sums_ref: Any, largest: Array, temperature: Array, vocab: int
) -> Array:
    """Writes the weights of `sampling.distribution` as for rows that are not greedy.

    Args:
      logits_ref: `[R, V]`.
      weights_ref: `[R, V]`, which takes the weights.
      sums_ref: `[R, C * 128]`, which takes the tiles' sums.
      largest: `[R, 1]`.
      temperature: `[R, 1]`, positive.
      vocab: V.

    Returns:
      `[R, 128]` int32: in each lane the first tile with the largest logit there, or a tile past V.
    """
    rate = -1.0 / temperature
    none = jnp.full((logits_ref.shape[0], LANES), sums_ref.shape[1], jnp.int32)
    start = none, none, jnp.zeros(none.shape, jnp.float32)

    def body(chunk: Any, within: int, real: int, carry: Any) -> Any:
        first, inside, sums = carry
        logits = only(tile_of(logits_ref, chunk, within)[...], real, -jnp.inf)
        hit = logits == largest
        # See `sampling._weights` for both conditions.
        weights = jnp.exp(jnp.where(hit, 0.0, (largest - logits) * rate))
        weights = only(jnp.where(weights >= TINY * vocab, weights, 0.0), real, 0.0)
        tile_of(weights_ref, chunk, within)[...] = weights
        sums = jnp.where(lane(sums) == within, jnp.sum(weights, axis=1, keepdims=True), sums)
        return first, jnp.minimum(inside, jnp.where(hit, within, none)), sums

    def done(chunk: Any, carry: Any) -> Any:
        first, inside, sums = carry
        tile_of(sums_ref, 0, chunk)[...] = sums
        return jnp.minimum(first, chunk * LANES + inside), *start[1:]

    return over_tiles(vocab, body, start, done)[0]


def _leaf(sums_ref: Any, uniforms: Array) -> Array:
    """The tile that is drawn in each row, `[R, 1]` int32; `sums_ref [R, C * 128]`."""
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


def _normalise(probs_ref: Any, inverse: Array, one: Array, leaf: Array, vocab: int) -> Array:
    """Turns weights into probabilities, in place.

    Args:
      probs_ref: `[R, V]`, weights.
      inverse: `[R, 1]`, the factor.
      one: `[R, 128]` int32, the tile in which a lane's probability is 1 instead, or -1.
      leaf: `[R, 1]` int32, a tile.
      vocab: V.

    Returns:
      `[R, 128]`, the probabilities in the tile `leaf`.
    """

    def body(chunk: Any, within: int, real: int, inside: Array) -> Array:
        del real
        weights = tile_of(probs_ref, chunk, within)
        probs = jnp.where(one - chunk * LANES == within, 1.0, weights[...] * inverse)
        weights[...] = probs
        return jnp.where(leaf - chunk * LANES == within, probs, inside)

    leaf = jnp.broadcast_to(leaf, one.shape)
    return over_tiles(vocab, body, jnp.zeros(one.shape, jnp.float32))
