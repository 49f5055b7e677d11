"""The target of compilation, and computations in the form that suits it.

Axes: B rows, N rows of a matrix, T positions, V vocabulary.
"""

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float32, Int32, Shaped

_T = TypeVar("_T")

_as_on_tpus: contextvars.ContextVar[bool] = contextvars.ContextVar("as_on_tpus", default=False)
# Not set in a caller's own program.
_partitioner: contextvars.ContextVar[Any] = contextvars.ContextVar("partitioner")


@functools.cache
def host_cpu() -> jax.Device | None:
    """The CPU of this process as a device; None if JAX_PLATFORMS excludes it."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


@contextlib.contextmanager
def scoped(variable: contextvars.ContextVar[_T], value: _T) -> Iterator[_T]:
    """The variable has this value until the context ends."""
    token = variable.set(value)
    try:
        yield value
    finally:
        variable.reset(token)


def compiled_for(partitioner: Any) -> AbstractContextManager[Any]:
    """Sets the `Partitioner` of a program while it is traced; None for one device."""
    return scoped(_partitioner, partitioner)


def traced_program() -> Any:
    """A hashable value; what reads this module is traced alike only in programs of equal values."""
    return _partitioner.get("a caller's")


def traced_partitioner() -> Any:
    """The `Partitioner` of the traced program; None for one device, and if it is unknown."""
    return _partitioner.get(None)


def runs_no_kernels() -> bool:
    """Whether the traced program uses the TPU form on any platform, where kernels do not run."""
    return _as_on_tpus.get()


def is_for_one_device() -> bool:
    """Whether the traced program is known to be for one device."""
    part = _partitioner.get(False)
    return part is None or (part is not False and part.mesh.size == 1)


def is_special() -> bool:
    """Whether the traced program is for several devices, or uses the TPU form anywhere."""
    part = _partitioner.get(None)
    return _as_on_tpus.get() or (part is not None and part.mesh.size > 1)


@contextlib.contextmanager
def as_on_tpus() -> Iterator[None]:
    """While a program is traced: uses the TPU form on any platform. For tests."""
    jax.clear_caches()  # cached programs ignore the variable
    try:
        with scoped(_as_on_tpus, True):
            yield
    finally:
        jax.clear_caches()


def by_platform(*args: Any, default: Callable[..., Any], **special: Callable[..., Any]) -> Any:
    """Computes `special[platform](*args)`, or `default(*args)` on a platform without its own."""
    if _as_on_tpus.get():
        return special.get("tpu", default)(*args)
    return lax.platform_dependent(*args, default=default, **special)


def when(wanted: Bool[Array, ""], run: Callable[[_T], _T], before: _T) -> _T:
    """`run(before)` if it is wanted, else `before`.

    A loop that runs once at most: XLA copies the caches that pass through a branch, but not those
    that a loop carries. It has no gradient.
    """

    def once(carry: tuple[Array, _T]) -> tuple[Array, _T]:
        return jnp.zeros_like(carry[0]), run(carry[1])

    with jax.named_scope("once"):
        return lax.while_loop(lambda carry: carry[0], once, (wanted, before))[1]


def entry(x: Shaped[Array, " V"], index: Int32[Array, ""]) -> Shaped[Array, ""]:
    """`x[index]` of a vector; outside of it, the result is arbitrary.

    TPUs gather single numbers along the lanes' axis only after transposing the whole array; a
    masked sum reads it in its layout, together with other sums.
    """

    def by_mask(x: Array, index: Array) -> Array:
        return jnp.sum(jnp.where(jnp.arange(x.size, dtype=index.dtype) == index, x, 0.0))

    return by_platform(x, index, tpu=by_mask, default=lambda x, index: x[index])


def row(x: Shaped[Array, "N V"], index: Int32[Array, ""]) -> Shaped[Array, " V"]:
    """`x[index]` of a matrix; see `entry`."""

    def by_mask(x: Array, index: Array) -> Array:
        place = jnp.arange(x.shape[0], dtype=index.dtype)[:, None]
        return jnp.sum(jnp.where(place == index, x, 0.0), axis=0)

    by_index = functools.partial(lax.dynamic_index_in_dim, keepdims=False)
    return by_platform(x, index, tpu=by_mask, default=by_index)


def with_layout(
    x: Array, order: tuple[int, ...], names: tuple[str | None, ...] | None = None
) -> Array:
    """`x` with a layout for TPUs: its axes in this order, the last in lanes.

    Otherwise XLA chooses the layout for the whole loop by one operation in it. It does not split a
    layout over a mesh, so there each device sets it for its own part.

    `order` has the axes, the outermost first; `names` their logical names, and None changes nothing
    on a mesh.
    """

    def constrain(x: Array) -> Array:
        return with_layout_constraint(x, Layout(order))

    if _partitioner not in contextvars.copy_context():
        return x
    part = _partitioner.get()
    if part is not None and part.mesh.size > 1:
        if names is None:
            return x
        spec = part.shardings(jax.ShapeDtypeStruct(x.shape, x.dtype), names).spec
        constrain = jax.shard_map(
            constrain, mesh=part.mesh, in_specs=spec, out_specs=spec, check_vma=False
        )
    return by_platform(x, tpu=constrain, default=lambda x: x)


def rows_in_tiles(x: Float32[Array, "B T V"]) -> Float32[Array, "B T V"]:
    """The array with a layout for TPUs: rows and vocabulary in a tile, positions outside.

    Otherwise XLA uses rows and positions for the tile if a sum runs over the vocabulary: 6 x 8
    numbers in 128 x 8.
    """
    return with_layout(x, (1, 0, 2), ("batch", None, "vocab"))
