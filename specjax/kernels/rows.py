"""Sums over the vocabulary of many rows, each in one TPU kernel.

XLA writes these as masked sums of float32 arrays that it lays out anew, at several times the cost.

Axes: B rows, V vocabulary; R rows of a block, at most 8.
"""

import functools
from typing import Any

import jax.numpy as jnp

from specjax.kernels.lanes import (
    LANES,
    column,
    lane,
    only,
    over_rows,
    over_tiles,
    row,
    tile_of,
    traced_once,
)
from specjax.types.language_model import Array


@traced_once
def entry(x: Array, index: Array, *, interpret: bool = False) -> Array:
    """`x[b, index[b]]`: `[B, V]` float32 and `[B]` int32 -> `[B]`."""
    vocab = x.shape[1]
    kernel = functools.partial(_entry, vocab=vocab)
    outputs = ((0, x.dtype),)
    return over_rows(kernel, vocab, (index, x), outputs, interpret=interpret)[0]


@traced_once
def residual_mass(target: Array, draft: Array, scale: Array, *, interpret: bool = False) -> Array:
    """`sampling.residual_mass` of many rows: `[B, V]`, `[B, V]` and `[B]` float32 -> `[B]`."""
    vocab = target.shape[1]
    kernel = functools.partial(_residual_mass, vocab=vocab)
    inputs, outputs = (scale, target, draft), ((0, jnp.float32),)
    return over_rows(kernel, vocab, inputs, outputs, interpret=interpret)[0]


def _entry(index_ref: Any, x_ref: Any, out_ref: Any, *, vocab: int) -> None:
    none = jnp.zeros((x_ref.shape[0], LANES), x_ref.dtype)
    place = column(index_ref[0]) - lane(none)

    def body(chunk: Any, within: int, real: int, found: Array) -> Array:
        del real  # no index leads past V
        hit = place - chunk * LANES * LANES == within * LANES
        return jnp.where(hit, tile_of(x_ref, chunk, within)[...], found)

    out_ref[0] = row(jnp.sum(over_tiles(vocab, body, none), axis=1, keepdims=True))


def _residual_mass(
    scale_ref: Any, target_ref: Any, draft_ref: Any, out_ref: Any, *, vocab: int
) -> None:
    none = jnp.zeros((target_ref.shape[0], LANES), jnp.float32)
    scale = column(scale_ref[0])

    def body(chunk: Any, within: int, real: int, sums: list[Array]) -> list[Array]:
        target, draft = (tile_of(ref, chunk, within)[...] for ref in (target_ref, draft_ref))
        left = only(jnp.maximum(scale * target - draft, 0.0), real, 0.0)
        i = within % len(sums)  # four chains, since each sum waits for the one before
        return [*sums[:i], sums[i] + left, *sums[i + 1 :]]

    sums = over_tiles(vocab, body, [none] * 4)
    out_ref[0] = row(jnp.sum(functools.reduce(jnp.add, sums), axis=1, keepdims=True))
