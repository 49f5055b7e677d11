"""What a program is compiled for, and computations in the form that suits it."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint

from specjax.types.language_model import Array

_as_on_tpus: contextvars.ContextVar[bool] = contextvars.ContextVar("as_on_tpus", default=False)
_ways: contextvars.ContextVar[int] = contextvars.ContextVar("ways", default=1)


@contextlib.contextmanager
def vocabulary_over(ways: int) -> Iterator[None]:
    """While a program is traced: over how many devices the axis of the vocabulary is split."""
    token = _ways.set(ways)
    try:
        yield
    finally:
        _ways.reset(token)


def vocabulary_ways() -> int:
    """Over how many devices the vocabulary of the program that is traced is split."""
    return _ways.get()


@contextlib.contextmanager
def as_on_tpus() -> Iterator[None]:
    """While a program is traced: what is meant for TPUs, on any platform. Tests need it."""
    jax.clear_caches()  # which do not know of it
    token = _as_on_tpus.set(True)
    try:
        yield
    finally:
        _as_on_tpus.reset(token)
        jax.clear_caches()


def by_platform(*args: Any, tpu: Callable[..., Any], default: Callable[..., Any]) -> Any:
    """Computes `tpu(*args)` in a program for TPUs, `default(*args)` in any other."""
    if _as_on_tpus.get():
        return tpu(*args)
    return lax.platform_dependent(*args, tpu=tpu, default=default)


def entry(x: Array, index: Array) -> Array:
    """`x[index]` of a vector.

    TPUs gather single numbers along the axis that lies in lanes only after they have turned the
    whole array; a masked sum reads it as it lies, together with the sums beside it.

    Args:
      x: `[V]`.
      index: int32 scalar in 0 .. V - 1; outside, anything is returned.

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


def row(x: Array, index: Array) -> Array:
    """`x[index]` of a matrix; see `entry`.

    Args:
      x: `[N, V]`.
      index: int32 scalar in 0 .. N - 1; outside, anything is returned.

    Returns:
      `[V]`.
    """
    return by_platform(x, index, tpu=row_by_mask, default=row_by_index)


def row_by_index(x: Array, index: Array) -> Array:
    """See `row`."""
    return lax.dynamic_index_in_dim(x, index, keepdims=False)


def row_by_mask(x: Array, index: Array) -> Array:
    """See `row`."""
    place = jnp.arange(x.shape[0], dtype=index.dtype)[:, None]
    return jnp.sum(jnp.where(place == index, x, 0.0), axis=0)


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
