"""Softmax and a draw from it in one TPU kernel: `sampling.draw_from_logits` without filters.

XLA makes about 25 operations of `draw_from_logits`. Here a tile of 8 x 128 numbers in VMEM, rows in
sublanes and entries in lanes, is one leaf of the tree of sums for each of eight rows, and three
passes over the tiles suffice.

Axes: B rows, V vocabulary, U uniforms of a draw; R rows of a block, at most 8; C chunks of 128
tiles; L a multiple of 128.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float32, Int32

from specjax.compilation import jit

LANES, SUBLANES = 128, 8
# Holds two arrays of eight rows at V = 262,144, each twice, to read ahead.
_VMEM = 48 << 20

# Tracing a kernel of 250 tiles takes a second, and several branches use it.
traced_once = functools.partial(jit, static_argnames="interpret")
# The smallest normal number: smaller temperatures and probabilities count as 0.
_TINY = float(jnp.finfo(jnp.float32).tiny)
# Eight rows of two arrays, each twice to read ahead, fit into that part of VMEM.
_MOST = 22 * LANES * LANES


def suits(vocab_size: int) -> bool:
    """Whether the kernels support this vocabulary size: above a draw's root, at most 360,448."""
    return 512 < vocab_size <= _MOST


@traced_once
def draw_from_logits(
    logits: Float32[Array, "B V"],
    temperature: Float32[Array, " B"],
    uniforms: Float32[Array, "B U"],
    *,
    interpret: bool = False,
) -> tuple[Float32[Array, "B V"], Int32[Array, " B"]]:
    """`sampling.draw_from_logits` of many rows, for a `Sampling` without top-k and top-p.

    The probabilities are equal to `sampling.draw_from_logits`'s to a few roundings. `suits(V)` must
    be true. `interpret` (static) works on any machine.
    """
    vocab = logits.shape[1]
    probs, tokens = over_rows(
        functools.partial(_drawn, vocab=vocab), vocab, (temperature, uniforms, logits),
        ((vocab, jnp.float32), (0, jnp.int32)), interpret=interpret,
    )  # fmt: skip
    return probs, tokens


@traced_once
def distribution(
    logits: Float32[Array, "B V"], temperature: Float32[Array, " B"], *, interpret: bool = False
) -> Float32[Array, "B V"]:
    """`sampling.distribution` of many rows; arguments as for `draw_from_logits`."""
    vocab = logits.shape[1]
    kernel, inputs = functools.partial(_distribution, vocab=vocab), (temperature, logits)
    (probs,) = over_rows(kernel, vocab, inputs, ((vocab, jnp.float32),), interpret=interpret)
    return probs


@traced_once
def draw_by_weights(
    weights: Float32[Array, "B V"], uniforms: Float32[Array, "B U"], *, interpret: bool = False
) -> Int32[Array, " B"]:
    """`sampling.draw` of many rows."""
    vocab = weights.shape[1]
    kernel = functools.partial(_draw_by_weights, vocab=vocab)
    inputs, outputs = (uniforms, weights), ((0, jnp.int32),)
    (tokens,) = over_rows(kernel, vocab, inputs, outputs, interpret=interpret)
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
    """The inputs of `_normalise`, and the greedy rows and their tokens."""

    inverse: Float32[Array, "R 1"]
    one: Int32[Array, "R 128"]
    greedy: Bool[Array, "R 1"]
    best: Int32[Array, "R 1"]


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
    """The largest logit of each row; NaN if any is."""

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
        # See `sampling._weigh` for both conditions.
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
    """The drawn tile of each row."""
    sums = sums_ref[...]
    if uniforms.shape[1] == 2:
        return first_above(sums, uniforms[:, :1])
    chunks = [sums[:, i : i + LANES] for i in range(0, sums.shape[1], LANES)]
    nodes = jnp.zeros(chunks[0].shape, jnp.float32)
    for i, chunk in enumerate(chunks):
        nodes = jnp.where(lane(nodes) == i, jnp.sum(chunk, axis=1, keepdims=True), nodes)
    node = first_above(nodes, uniforms[:, :1])
    inside = functools.reduce(
        lambda inside, i: jnp.where(node == i, chunks[i], inside), range(len(chunks)), nodes
    )
    return node * LANES + first_above(inside, uniforms[:, 1:2])


def _normalise(probs_ref: Any, inverse: Array, one: Array, leaf: Array | None, vocab: int) -> Array:
    """Turns weights into probabilities, in place."""

    def body(chunk: Any, within: int, real: int, inside: Array) -> Array:
        weights = tile_of(probs_ref, chunk, within)
        probs = jnp.where(one - chunk * LANES == within, 1.0, weights[...] * inverse)
        weights[...] = probs
        if leaf is None:
            return inside
        return jnp.where(leaf - chunk * LANES == within, probs, inside)

    if leaf is not None:
        leaf = jnp.broadcast_to(leaf, one.shape)
    return over_tiles(vocab, body, jnp.zeros(one.shape, jnp.float32))


# Computations within tiles.


def lane(x: Array) -> Int32[Array, "R L"]:
    """The index of each entry in its row."""
    return lax.broadcasted_iota(jnp.int32, x.shape, 1)


def column(x: Float32[Array, "1 R"]) -> Float32[Array, "R 1"]:
    """A column of a vector of rows, as XLA keeps it."""
    wide = jnp.broadcast_to(x, (x.shape[1], x.shape[1]))
    same = lane(wide) == lax.broadcasted_iota(jnp.int32, wide.shape, 0)
    return jnp.sum(jnp.where(same, wide, jnp.zeros_like(wide)), axis=1, keepdims=True)


def row(x: Int32[Array, "R 1"]) -> Int32[Array, "1 R"]:
    """A vector of rows of a column."""
    wide = jnp.broadcast_to(x, (x.shape[0], x.shape[0]))
    same = lane(wide) == lax.broadcasted_iota(jnp.int32, wide.shape, 0)
    return jnp.sum(jnp.where(same, wide, jnp.zeros_like(wide)), axis=0, keepdims=True)


def over_rows(
    kernel: Callable[..., None],
    vocab: int,
    inputs: tuple[Array, ...],
    outputs: tuple[tuple[int, Any], ...],
    *,
    interpret: bool,
) -> list[Array]:
    """Calls a kernel for blocks of up to eight rows.

    Args:
      kernel: takes a ref per input and output, then one of `[R, C * 128]` float32 for C chunks of
        tiles. A vector of rows `[B]` comes as `[1, 1, R]`, in lanes, as in XLA's arrays; others
        `[B, n]` as `[R, n]`, where V is rounded up to tiles.
      inputs: `[B]` or `[B, n]`; so are the results.
      outputs: for each result n, 0 for a vector, and its dtype.
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
        scratch_shapes=[room],
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
      body: gets the chunk's number, the tile's number in it (static), the number of real entries of
        the tile (static), and the carry.
      done: `carry = done(chunk, carry)` after each chunk.
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


def only(x: Float32[Array, "R 128"], real: int, fill: float) -> Float32[Array, "R 128"]:
    """The tile with `fill` after its first `real` entries (static)."""
    return x if real == LANES else jnp.where(lane(x) < real, x, fill)


def cumulative(x: Float32[Array, "R L"]) -> Float32[Array, "R L"]:
    """The cumulative sums of the rows."""
    shift, place = 1, lane(x)
    while shift < x.shape[1]:
        x = x + jnp.where(place >= shift, pltpu.roll(x, shift, 1), 0.0)
        shift *= 2
    return x


def first_above(
    weights: Float32[Array, "R L"], uniform: Float32[Array, "R 1"]
) -> Int32[Array, "R 1"]:
    """Draws an entry of each row, as a level of `sampling.draw` does.

    It is the first positive entry whose cumulative weight exceeds `uniform` times the sum, else the
    last positive one, else 0.
    """
    size, place = weights.shape[1], lane(weights)
    sums = cumulative(weights)
    positive = weights > 0.0
    target = uniform * sums[:, size - 1 :]
    order = jnp.where(positive, 2 * size - 1 - place, 2 * size)
    best = jnp.where(positive & (sums > target), place, order)
    best = jnp.min(best, axis=1, keepdims=True)
    return jnp.where(best < size, best, jnp.where(best < 2 * size, 2 * size - 1 - best, 0))
