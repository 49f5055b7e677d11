"""Attention of a few queries over a long ragged cache in one TPU kernel.

XLA writes the logits of all positions to main memory. Here blocks of the cache pass by under an
online softmax, and only blocks that some query of their row sees are read.

Axes: B rows, T queries, S positions of a segment, J numbers of a position, for all heads. A set of
heads has U queries of W lanes at each of the T places, R = U T in all; see `attention.Attention`.

Sources: Milakov and Gimelshein 2018 (online softmax); Dao et al. 2023, Flash-Decoding.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from specjax.compilation import jit, product_precision
from specjax.models.position_encoding import MASKED

# Positions of a block.
BLOCK = 1024
# The lanes of a vector, and of the largest matrix unit: smaller products waste a part of it.
_LANES, _MATRIX = 128, 256
# Lanes that a step reads, of several sets. More steps can be split over the cores of a v5p.
_STEP = 512
_SUBLANES = 8
_VMEM = 40 << 20


def heads_of_a_set(kv_heads: int, width: int) -> int:
    """The number of heads whose keys are one operand: they fill the lanes, or are all heads."""
    sizes = (n for n in range(1, kv_heads) if kv_heads % n == 0)
    full = (n for n in sizes if n * width >= _MATRIX and n * width % _LANES == 0)
    return next(full, kv_heads)


@functools.partial(jit, static_argnames=("scale", "softcap", "interpret"))
def attend_long(
    query: Float[Array, "B T sets U W"],
    *segments: Array,
    scale: float,
    softcap: float | None,
    interpret: bool = False,
) -> Float[Array, "B T sets U W"]:
    """The values that queries of sets of heads attend to, in a long segment and short ones.

    Args:
      query: with zeros at the lanes of other heads of its set.
      *segments: for each the keys and values `[B, S, J]` and the bias, `[B, 1, T or 1, S]` or
        `[B, sets, U, T or 1, S]`, with what `attention.Segment` says; the long segment first, the
        others with at most `BLOCK` positions. Entries of the first after the last position that a
        query sees may be NaN.
      scale: factor of the products.
      softcap: limit of the logits before the bias; None for none.
      interpret: works on any machine.
    """
    rows, length, sets, own, lanes = query.shape
    # A tile has eight of the places, so that a bias for all heads is the same for each query.
    padded = length if length == 1 else pl.cdiv(length, _SUBLANES) * _SUBLANES
    query = jnp.pad(query, [(0, 0), (0, padded - length), (0, 0), (0, 0), (0, 0)])
    query = query.transpose(0, 2, 3, 1, 4).reshape(rows, sets, own * padded, lanes)
    size = min(BLOCK, segments[0].shape[1])
    inside = math.gcd(sets, max(_STEP // lanes, 1))

    def part_of_row(shape: tuple[int, ...], *places: str) -> pl.BlockSpec:
        def index(part: Any, i: Any, row_of: Any, block_of: Any, _: Any) -> tuple[Any, ...]:
            known = {"part": part, "block": block_of[i], "": 0}
            return row_of[i], *(known[place] for place in places)

        return pl.BlockSpec((1, *shape), index)

    queries = part_of_row((inside, own * padded, lanes), "part", "", "")
    args, specs = [query], [queries]
    for i in range(0, len(segments), 3):
        number = segments[i].shape[1]
        step, place = (number, "") if i else (size, "block")
        bias = _bias_of_rows(segments[i + 2], sets, padded)
        heads, part = (inside, "part") if bias.shape[1] > 1 else (1, "")
        args += [*segments[i : i + 2], bias]
        specs += [part_of_row((step, inside * lanes), place, "part")] * 2
        specs.append(part_of_row((heads, bias.shape[2], step), part, "", place))
    row_of, block_of, ends, count = _steps(segments[2], size)
    state = (inside, own * padded)
    out = pl.pallas_call(
        functools.partial(
            _kernel, scale=scale, softcap=softcap, precision=product_precision(query.dtype)
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(sets // inside, count),
            in_specs=specs,
            out_specs=queries,
            scratch_shapes=[
                pltpu.VMEM((*state, _LANES), jnp.float32),
                pltpu.VMEM((*state, _LANES), jnp.float32),
                pltpu.VMEM((*state, lanes), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM
        ),
        interpret=interpret,
        name="attend_long",
    )(row_of, block_of, ends, *args)
    out = out.reshape(rows, sets, own, padded, lanes)[:, :, :, :length]
    return out.transpose(0, 3, 1, 2, 4)


def _bias_of_rows(
    bias: Float32[Array, "B ..."], sets: int, padded: int
) -> Float32[Array, "B _ _ S"]:
    """The bias with the padded places: of all sets, or `[B, sets, R, S]`."""
    if bias.shape[-2] > 1:
        more = [(0, 0)] * (bias.ndim - 2) + [(0, padded - bias.shape[-2]), (0, 0)]
        bias = jnp.pad(bias, more, constant_values=MASKED)
    if bias.ndim == 4:
        return bias
    bias = jnp.broadcast_to(bias, (*bias.shape[:3], padded, bias.shape[-1]))
    return bias.reshape(bias.shape[0], sets, -1, bias.shape[-1])


def _steps(
    bias: Float32[Array, "B ..."], size: int
) -> tuple[Int32[Array, " n"], Int32[Array, " n"], Int32[Array, " B"], Int32[Array, ""]]:
    """The row and the block of each step, the end of what each row sees, and the number of steps.

    A row's blocks reach from the first to the last that it sees: of a window, few. A row that sees
    nothing has one.
    """
    rows, length = bias.shape[0], bias.shape[-1]
    blocks = pl.cdiv(length, size)
    seen: Bool[Array, "B S"] = jnp.any(bias > 0.5 * MASKED, axis=tuple(range(1, bias.ndim - 1)))
    places = jnp.arange(length, dtype=jnp.int32)[None]
    ends = jnp.max(jnp.where(seen, places + 1, 0), axis=1)
    first = jnp.min(jnp.where(seen, places, length), axis=1)
    first = jnp.minimum(first, jnp.maximum(ends - 1, 0)) // size
    counts = jnp.maximum(-(-ends // size) - first, 1)
    stops = jnp.cumsum(counts)
    # Comparisons instead of a search: there are few numbers.
    number = jnp.arange(rows * blocks, dtype=jnp.int32)[:, None]
    own = (number < stops[None]) & (number >= (stops - counts)[None])
    row_of = jnp.sum(jnp.where(own, jnp.arange(rows, dtype=jnp.int32)[None], 0), axis=1)
    block_of = jnp.sum(jnp.where(own, number + (first + counts - stops)[None], 0), axis=1)
    return row_of, block_of, ends, stops[-1]


def _kernel(
    row_of: Any,
    block_of: Any,
    ends: Any,
    query_ref: Any,
    *refs: Any,
    scale: float,
    softcap: float | None,
    precision: Any,
) -> None:
    """One block: queries `[1, sets, R, W]`, keys and values `[1, S, sets W]`, bias as above."""
    *segments, out_ref, most_ref, sum_ref, mean_ref = refs
    step = pl.program_id(1)
    row = row_of[step]
    starts = (step == 0) | (row_of[jnp.maximum(step - 1, 0)] != row)
    following = row_of[jnp.minimum(step + 1, pl.num_programs(1) - 1)]
    stops = (step + 1 == pl.num_programs(1)) | (following != row)
    fold = functools.partial(
        _fold, query_ref, most_ref, sum_ref, mean_ref, scale, softcap, precision
    )

    @pl.when(starts)
    def _() -> None:
        most_ref[...] = jnp.full(most_ref.shape, MASKED, jnp.float32)
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)
        mean_ref[...] = jnp.zeros(mean_ref.shape, jnp.float32)
        for i in range(3, len(segments), 3):
            fold(*segments[i : i + 3], None)

    size = segments[0].shape[1]
    live = ends[row] - block_of[step] * size

    @pl.when(live >= size)
    def _() -> None:
        fold(*segments[:3], None)

    @pl.when(live < size)
    def _() -> None:
        fold(*segments[:3], live)

    @pl.when(stops)
    def _() -> None:
        for i in range(out_ref.shape[1]):
            out_ref[0, i] = (mean_ref[i] / sum_ref[i][:, :1]).astype(out_ref.dtype)


def _fold(
    query_ref: Any,
    most_ref: Any,
    sum_ref: Any,
    mean_ref: Any,
    scale: float,
    softcap: float | None,
    precision: Any,
    keys_ref: Any,
    values_ref: Any,
    bias_ref: Any,
    live: Array | None,
) -> None:
    """Adds a block to the largest logits, the sums and the weighted values.

    After `live` entries the values may be NaN, which a weight of zero does not hide.
    """
    _, sets, queries, lanes = query_ref.shape
    product = functools.partial(
        lax.dot_general, precision=precision, preferred_element_type=jnp.float32
    )
    bias = _wide(bias_ref[0, 0], queries)
    for i in range(sets):
        if bias_ref.shape[1] > 1:
            bias = _wide(bias_ref[0, i], queries)
        keys = keys_ref[0, :, i * lanes : (i + 1) * lanes]
        values = values_ref[0, :, i * lanes : (i + 1) * lanes]
        if live is not None:
            place = lax.broadcasted_iota(jnp.int32, values.shape, 0)
            values = jnp.where(place < live, values, jnp.zeros_like(values))
        logits = product(query_ref[0, i], keys, (((1,), (1,)), ((), ()))) * scale
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)
        logits = jnp.where(bias > 0.5 * MASKED, logits + bias, MASKED)
        before = most_ref[i]
        most = jnp.maximum(before, jnp.max(logits, axis=1, keepdims=True))
        weights = jnp.exp(logits - most[:, :1])
        kept = jnp.exp(before - most)
        most_ref[i] = most
        sum_ref[i] = kept * sum_ref[i] + jnp.sum(weights, axis=1, keepdims=True)
        added = product(weights.astype(values.dtype), values, (((1,), (0,)), ((), ())))
        mean_ref[i] = kept[:, :1] * mean_ref[i] + added


def _wide(bias: Float32[Array, "_ S"], queries: int) -> Float32[Array, "_ S"]:
    """The bias of the places, repeated for the queries of each; one for all stays one."""
    if bias.shape[0] in (1, queries):
        return bias
    shape = (queries // bias.shape[0], *bias.shape)
    return jnp.broadcast_to(bias[None], shape).reshape(queries, bias.shape[1])
