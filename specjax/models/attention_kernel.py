"""Attention of a few queries over a long ragged cache in one TPU kernel.

XLA writes the logits of all positions to main memory. Here blocks of the cache pass by under an
online softmax, and only blocks that some query of their row sees are read.

Axes: B rows, T places, S positions of a segment, K key-value heads of width D, each with N query
heads. P heads are a set, of P D lanes, with R = P N T queries that have zeros at the other heads'
lanes.

Sources: Milakov and Gimelshein 2018 (online softmax); Dao et al. 2023, Flash-Decoding.
"""

import functools
import math
from collections.abc import Iterator, Sequence
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
# Of a set; their logits for a block take 4 MiB, several times.
_QUERIES = 1024


def _heads_of_a_set(kv_heads: int, width: int) -> int:
    """The number of heads whose keys are one operand: they fill the lanes, or are all heads."""
    sizes = (n for n in range(1, kv_heads) if kv_heads % n == 0)
    full = (n for n in sizes if n * width >= _MATRIX and n * width % _LANES == 0)
    return next(full, kv_heads)


def fits(query: Array) -> bool:
    """Whether a chip's memory holds the logits of a block for these queries, `[B, T, K, N, D]`."""
    _, length, kv_heads, groups, width = query.shape
    padded = pl.cdiv(length, _SUBLANES) * _SUBLANES
    return _heads_of_a_set(kv_heads, width) * groups * padded <= _QUERIES


@functools.partial(jit, static_argnames=("scale", "softcap", "interpret"))
def attend_long(
    query: Float[Array, "B T K N D"],
    *segments: Array,
    scale: float,
    softcap: float | None,
    interpret: bool = False,
) -> Float[Array, "B T K N D"]:
    """The values that a few queries attend to, in a long segment and short ones.

    Args:
      query: for each of K heads those of N query heads.
      *segments: for each the keys and values `[B, S, K D]` and the bias `[B, 1 or K, 1 or N, 1 or
        T, S]`, as in `attention.Segment`, which hides the same from all heads. The long segment is
        the first; its entries after the last position that a query sees may be NaN. The others have
        at most `BLOCK` positions.
      scale: factor of the products.
      softcap: limit of the logits before the bias; None for none.
      interpret: works on any machine.
    """
    rows, length, kv_heads, groups, width = query.shape
    heads = _heads_of_a_set(kv_heads, width)
    sets, lanes = kv_heads // heads, heads * width
    inside = math.gcd(sets, max(_STEP // lanes, 1))
    # A tile has eight places, so that a bias for all heads is the same for each query.
    padded = length if length == 1 else pl.cdiv(length, _SUBLANES) * _SUBLANES
    size = min(BLOCK, segments[0].shape[1])

    def part_of_row(shape: tuple[int, ...], *places: str) -> pl.BlockSpec:
        def index(part: Any, i: Any, row_of: Any, block_of: Any, _: Any) -> tuple[Any, ...]:
            known = {"part": part, "block": block_of[i], "": 0}
            return row_of[i], *(known[place] for place in places)

        return pl.BlockSpec((1, *shape), index)

    queries = part_of_row((length, inside * lanes * groups), "", "part")
    args, specs = [query.reshape(rows, length, -1)], [queries]
    for i in range(0, len(segments), 3):
        keys, values, bias = segments[i : i + 3]
        step, place = size, "block"
        if i:
            # Mosaic has no product with a single entry.
            more = -keys.shape[1] % _SUBLANES
            keys, values = (jnp.pad(x, [(0, 0), (0, more), (0, 0)]) for x in (keys, values))
            bias = jnp.pad(bias, [(0, 0)] * 4 + [(0, more)], constant_values=MASKED)
            step, place = keys.shape[1], ""
        bias = _bias_of_sets(bias, query.shape, sets, padded)
        among, part = (inside, "part") if bias.shape[1] > 1 else (1, "")
        args += [keys, values, bias]
        specs += [part_of_row((step, inside * lanes), place, "part")] * 2
        specs.append(part_of_row((among, bias.shape[2], step), part, "", place))
    row_of, block_of, ends, count = _steps(segments[2], size)
    state = (inside, heads * groups * padded)
    out = pl.pallas_call(
        functools.partial(
            _kernel,
            parts=[*_parts(inside, heads, groups, width, length, padded)],
            scale=scale,
            softcap=softcap,
            precision=product_precision(query.dtype),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(sets // inside, count),
            in_specs=specs,
            out_specs=queries,
            scratch_shapes=[
                pltpu.VMEM((*state, lanes), jnp.float32),
                pltpu.VMEM((*state, _LANES), jnp.float32),
                pltpu.VMEM((*state, _LANES), jnp.float32),
                pltpu.VMEM((*state, lanes), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(args[0].shape, query.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_VMEM
        ),
        interpret=interpret,
        name="attend_long",
    )(row_of, block_of, ends, *args)
    return out.reshape(query.shape)


def _bias_of_sets(
    bias: Float32[Array, "B _ _ _ S"], query: tuple[int, ...], sets: int, padded: int
) -> Float32[Array, "B _ _ S"]:
    """The bias with the padded places: `[B, 1, 1 or T, S]` for all heads, or `[B, sets, R, S]`."""
    rows, _, kv_heads, groups, _ = query
    if bias.shape[3] > 1:
        more = [(0, 0)] * 3 + [(0, padded - bias.shape[3]), (0, 0)]
        bias = jnp.pad(bias, more, constant_values=MASKED)
    if bias.shape[1:3] == (1, 1):
        return bias[:, 0]
    bias = jnp.broadcast_to(bias, (rows, kv_heads, groups, padded, bias.shape[4]))
    return bias.reshape(rows, sets, -1, bias.shape[4])


def _steps(
    bias: Float32[Array, "B _ _ _ S"], size: int
) -> tuple[Int32[Array, " n"], Int32[Array, " n"], Int32[Array, " B"], Int32[Array, ""]]:
    """The row and the block of each step, the end of what each row sees, and the number of steps.

    A row's blocks reach from the first to the last that it sees: of a window, few. A row that sees
    nothing has one.
    """
    rows, length = bias.shape[0], bias.shape[-1]
    blocks = pl.cdiv(length, size)
    seen: Bool[Array, "B S"] = jnp.any(bias[:, 0, 0] > 0.5 * MASKED, axis=1)
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


# Each query's lanes in `[T, sets P N D]`, and its place in `[sets, R, P D]`, where R = P N padded.
def _parts(
    sets: int, heads: int, groups: int, width: int, length: int, padded: int
) -> Iterator[tuple[slice, tuple[int, slice, slice]]]:
    for number in range(sets * heads * groups):
        at, among = divmod(number, heads * groups)
        own, rows = among // groups * width, slice(among * padded, among * padded + length)
        yield slice(number * width, (number + 1) * width), (at, rows, slice(own, own + width))


def _kernel(
    row_of: Any,
    block_of: Any,
    ends: Any,
    query_ref: Any,
    *refs: Any,
    parts: Sequence[tuple[slice, tuple[int, slice, slice]]],
    scale: float,
    softcap: float | None,
    precision: Any,
) -> None:
    """One block: queries `[1, T, sets P N D]`, keys and values `[1, S, sets P D]`, their bias."""
    keys_ref, values_ref, bias_ref, *others, out_ref, spread_ref, most_ref, sum_ref, mean_ref = refs
    step = pl.program_id(1)
    row = row_of[step]
    starts = (step == 0) | (row_of[jnp.maximum(step - 1, 0)] != row)
    following = row_of[jnp.minimum(step + 1, pl.num_programs(1) - 1)]
    stops = (step + 1 == pl.num_programs(1)) | (following != row)
    fold = functools.partial(
        _fold, spread_ref, most_ref, sum_ref, mean_ref, scale, softcap, precision
    )

    @pl.when(starts)
    def _() -> None:
        spread_ref[...] = jnp.zeros(spread_ref.shape, jnp.float32)
        for lanes, place in parts:
            spread_ref[place] = query_ref[0, :, lanes].astype(jnp.float32)
        most_ref[...] = jnp.full(most_ref.shape, MASKED, jnp.float32)
        sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)
        mean_ref[...] = jnp.zeros(mean_ref.shape, jnp.float32)
        for i in range(0, len(others), 3):
            fold(others[i], others[i + 1], others[i + 2], None)

    size = keys_ref.shape[1]
    live = ends[row] - block_of[step] * size

    @pl.when(live >= size)
    def _() -> None:
        fold(keys_ref, values_ref, bias_ref, None)

    @pl.when(live < size)
    def _() -> None:
        fold(keys_ref, values_ref, bias_ref, live)

    @pl.when(stops)
    def _() -> None:
        for lanes, place in parts:
            mean = mean_ref[place] / sum_ref[place[0], place[1], :1]
            out_ref[0, :, lanes] = mean.astype(out_ref.dtype)


def _fold(
    spread_ref: Any,
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

    After `live` entries nothing is seen. Values may be NaN there, which a weight of zero does not
    hide.
    """
    sets, queries, lanes = spread_ref.shape
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
        query = spread_ref[i].astype(keys.dtype)
        logits = product(query, keys, (((1,), (1,)), ((), ()))) * scale
        if softcap is not None:
            logits = softcap * jnp.tanh(logits / softcap)
        seen = bias > 0.5 * MASKED
        if live is not None:  # after the end of the cache the bias is arbitrary, too
            seen &= lax.broadcasted_iota(jnp.int32, logits.shape, 1) < live
        logits = jnp.where(seen, logits + bias, MASKED)
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
