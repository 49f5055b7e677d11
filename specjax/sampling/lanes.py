"""Computations of kernels within tiles of 8 x 128 numbers: rows in sublanes, entries in lanes.

For code inside Pallas TPU kernels. R: rows of a block, at most 8.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from specjax.compilation import jit
from specjax.types.language_model import Array

LANES, SUBLANES = 128, 8
# Holds two arrays of eight rows at V = 262,144, each twice, to read ahead.
_VMEM = 48 << 20

# Tracing a kernel of 250 tiles takes a second, and several branches use it.
traced_once = functools.partial(jit, static_argnames="interpret")


def lane(x: Array) -> Array:
    """The index of each entry of `x [R, n]` in its row, int32."""
    return lax.broadcasted_iota(jnp.int32, x.shape, 1)


def column(x: Array) -> Array:
    """`[1, R]`, as XLA keeps a vector of rows, to `[R, 1]`."""
    wide = jnp.broadcast_to(x, (x.shape[1], x.shape[1]))
    same = lane(wide) == lax.broadcasted_iota(jnp.int32, wide.shape, 0)
    return jnp.sum(jnp.where(same, wide, jnp.zeros_like(wide)), axis=1, keepdims=True)


def row(x: Array) -> Array:
    """`[R, 1]` to `[1, R]`."""
    wide = jnp.broadcast_to(x, (x.shape[0], x.shape[0]))
    same = lane(wide) == lax.broadcasted_iota(jnp.int32, wide.shape, 0)
    return jnp.sum(jnp.where(same, wide, jnp.zeros_like(wide)), axis=0, keepdims=True)


def over_rows(
    kernel: Callable[..., None],
    vocab: int,
    inputs: tuple[Array, ...],
    outputs: tuple[tuple[int, Any], ...],
    *,
    sums: bool = False,
    interpret: bool = False,
) -> list[Array]:
    """Calls a kernel for blocks of up to eight rows.

    Args:
      kernel: takes a ref per input and output. A vector of rows `[B]` comes as `[1, 1, R]`, in
        lanes, as in XLA's arrays; others `[B, n]` as `[R, n]`, where V is rounded up to tiles.
      vocab: V.
      inputs: `[B]` or `[B, n]`.
      outputs: for each result n, 0 for a vector, and its dtype.
      sums: whether the kernel takes another ref, `[R, C * 128]` float32 for C chunks of tiles.
      interpret: see `drawn`.

    Returns:
      The results, `[B]` or `[B, n]`.
    """
    batch = inputs[0].shape[0]
    rows = min(batch, SUBLANES)
    steps = pl.cdiv(batch, rows)

    def spec(width: int) -> Any:
        if not width:
            return pl.BlockSpec((1, 1, rows), lambda i: (i, 0, 0))
        width = pl.cdiv(width, LANES) * LANES if width == vocab else width
        return pl.BlockSpec((rows, width), lambda i: (i, 0))

    def vector(x: Array) -> Array:
        if x.ndim > 1:
            return x
        return jnp.pad(x, (0, steps * rows - batch)).reshape(steps, 1, rows)

    room = pltpu.VMEM((rows, pl.cdiv(vocab, LANES * LANES) * LANES), jnp.float32)
    out = pl.pallas_call(
        kernel,
        grid=(steps,),
        in_specs=[spec(x.shape[1] if x.ndim > 1 else 0) for x in inputs],
        out_specs=[spec(width) for width, _ in outputs],
        out_shape=[
            jax.ShapeDtypeStruct((batch, width) if width else (steps, 1, rows), dtype)
            for width, dtype in outputs
        ],
        scratch_shapes=[room] if sums else [],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=_VMEM
        ),
        interpret=interpret,
    )(*map(vector, inputs))
    return [x if x.ndim == 2 else x.reshape(-1)[:batch] for x in out]


def over_tiles(
    vocab: int, body: Callable[..., Any], carry: Any, done: Callable[..., Any] | None = None
) -> Any:
    """Runs `carry = body(chunk, within, real, carry)` for every tile of a vocabulary, in order.

    The program has up to 255 tiles; more tiles are a loop over chunks of 128. So a tile's place in
    its chunk is static: computing its address would take longer than most bodies.

    Args:
      vocab: V.
      body: gets the chunk's number, the tile's number in it (static), the number of real entries of
        the tile (static), and the carry.
      carry: the first carry.
      done: `carry = done(chunk, carry)` after each chunk.

    Returns:
      The last carry.
    """
    chunks, rest = divmod(vocab, LANES * LANES)

    def run(chunk: Any, size: int, carry: Any) -> Any:
        for within in range(pl.cdiv(size, LANES)):
            carry = body(chunk, within, min(LANES, size - within * LANES), carry)
        return carry if done is None else done(chunk, carry)

    if chunks > 1:
        carry = lax.fori_loop(0, chunks, lambda i, carry: run(i, LANES * LANES, carry), carry)
    elif chunks:
        carry = run(0, LANES * LANES, carry)
    return run(chunks, rest, carry) if rest else carry


def tile_of(ref: Any, chunk: Any, within: Any) -> Any:
    """A tile `[R, 128]` of `ref [R, V]`, to be read and written with `[...]`."""
    if not isinstance(chunk, int):
        start = pl.multiple_of(chunk * LANES * LANES, LANES * LANES)
        ref, chunk = ref.at[:, pl.ds(start, LANES * LANES)], 0
    at = (chunk * LANES + within) * LANES
    return ref.at[:, pl.ds(at if isinstance(at, int) else pl.multiple_of(at, LANES), LANES)]


def only(x: Array, real: int, fill: float) -> Array:
    """`x [R, 128]` with `fill` after its first `real` entries (static)."""
    return x if real == LANES else jnp.where(lane(x) < real, x, fill)


def cumulative(x: Array) -> Array:
    """The cumulative sums of the rows of `x [R, n]`, n a multiple of 128."""
    shift, place = 1, lane(x)
    while shift < x.shape[1]:
        x = x + jnp.where(place >= shift, pltpu.roll(x, shift, 1), 0.0)
        shift *= 2
    return x


def first_above(weights: Array, uniform: Array) -> Array:
    """Draws an entry of each row, as a level of `sampling.draw` does.

    Args:
      weights: `[R, n]` float32, non-negative; n a multiple of 128.
      uniform: `[R, 1]` float32 in [0, 1).

    Returns:
      `[R, 1]` int32: the first positive entry whose cumulative weight exceeds `uniform` times the
      sum, else the last positive one, else 0.
    """
    size, place = weights.shape[1], lane(weights)
    sums = cumulative(weights)
    positive = weights > 0.0
    target = uniform * sums[:, size - 1 :]
    order = jnp.where(positive, 2 * size - 1 - place, 2 * size)
    best = jnp.where(positive & (sums > target), place, order)
    best = jnp.min(best, axis=1, keepdims=True)
    return jnp.where(best < size, best, jnp.where(best < 2 * size, 2 * size - 1 - best, 0))
