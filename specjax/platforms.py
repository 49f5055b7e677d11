"""A computation in the form that suits the platform for which it is compiled."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from specjax.types.language_model import Array


def by_platform(*args: Any, tpu: Callable[..., Any], default: Callable[..., Any]) -> Any:
    """Computes `tpu(*args)` in a program for TPUs, `default(*args)` in any other."""
    return lax.platform_dependent(*args, tpu=tpu, default=default)


def entry(x: Array, index: Array) -> Array:
    """`x[index]` of a vector.

    TPUs gather single numbers along the axis that lies in lanes only after they have turned the
    whole array; a masked sum reads it as it lies, together with the sums beside it.

    Args:
      x: `[V]`.
      index: int32 scalar in 0 .. V - 1.

    Returns:
      A scalar.
    """
    return by_platform(x, index, tpu=entry_by_mask, default=entry_by_index)


def entry_by_index(x: Array, index: Array) -> Array:
    """See `entry`."""
    return x[index]


def entry_by_mask(x: Array, index: Array) -> Array:
    """See `entry`."""
    return jnp.sum(jnp.where(jnp.arange(x.size, dtype=index.dtype) == index, x, 0.0))


def laid_out(x: Array, order: tuple[int, ...]) -> Array:
    """`x`, whose axes lie on TPUs in this order, the last one in lanes.

    Left alone, XLA chooses for the whole loop what suits one operation in it best.
    """

    def constrain(x: Array) -> Array:
        return with_layout_constraint(x, Layout(order))

    return by_platform(x, tpu=constrain, default=lambda x: x)


def rows_in_tiles(x: Array) -> Array:
    """`x [B, T, V]`, laid out on TPUs with rows and vocabulary in a tile, positions outside of it.

    Left alone, XLA takes rows and positions for the tile where a sum runs over the vocabulary:
    6 x 8 numbers in 128 x 8.
    """
    return laid_out(x, (1, 0, 2))
