"""What a program is compiled for, and computations in the form that suits it."""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint


class _Target(NamedTuple):
    """Attributes: how arrays are spread, a `Partitioner`; None for one device."""

    partitioner: Any


_as_on_tpus: contextvars.ContextVar[bool] = contextvars.ContextVar("as_on_tpus", default=False)
# None where nobody has said so, as in a caller's own program.
_target: contextvars.ContextVar[_Target | None] = contextvars.ContextVar("target", default=None)


@contextlib.contextmanager
def compiled_for(partitioner: Any) -> Iterator[None]:
    """While a program is traced: over which devices it is spread.

    Args:
      partitioner: a `specjax.partitioning.Partitioner`, or None for one device.
    """
    token = _target.set(_Target(partitioner))
    try:
        yield
    finally:
        _target.reset(token)


def vocabulary_ways() -> int:
    """Over how many devices the vocabulary of the program that is traced is split; 1 if unknown."""
    target = _target.get()
    return 1 if target is None or target.partitioner is None else target.partitioner.ways("vocab")


def is_special() -> bool:
    """Whether what is traced is for several devices, or what TPUs compute on any platform."""
    target = _target.get()
    part = None if target is None else target.partitioner
    return _as_on_tpus.get() or (part is not None and part.mesh.size > 1)


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


def laid_out(
    x: Array, order: tuple[int, ...], names: tuple[str | None, ...] | None = None
) -> Array:
    """`x`, whose axes lie on TPUs in this order, the last one in lanes.

    Left alone, XLA chooses for the whole loop what suits one operation in it best. It does not
    split a layout over a mesh, so there each device fixes that of its own part.

    Args:
      x: any array.
      order: its axes, the outermost first.
      names: the logical names of its axes; None leaves it alone on a mesh.
    """

    def constrain(x: Array) -> Array:
        return with_layout_constraint(x, Layout(order))

    target = _target.get()
    if target is None:
        return x
    part = target.partitioner
    if part is not None and part.mesh.size > 1:
        if names is None:
            return x
        spec = part.shardings(jax.ShapeDtypeStruct(x.shape, x.dtype), names).spec
        constrain = jax.shard_map(
            constrain, mesh=part.mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
    return by_platform(x, tpu=constrain, default=lambda x: x)


def rows_in_tiles(x: Array) -> Array:
    """`x [B, T, V]`, laid out on TPUs with rows and vocabulary in a tile, positions outside of it.

    Left alone, XLA takes rows and positions for the tile where a sum runs over the vocabulary:
    6 x 8 numbers in 128 x 8.
    """
    return laid_out(x, (1, 0, 2), ("batch", None, "vocab"))
