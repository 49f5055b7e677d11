"""The choice between a kernel for one device and the plain code that it replaces."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array

from specjax import platforms
from specjax.compilation import jit


def on_one_tpu(*args: Array, kernel: Callable[..., Any], plain: Callable[..., Any]) -> Any:
    """`plain(*args)`; under `jax.vmap` in a program for one TPU, `kernel` for all rows at once.

    `plain` takes arrays of one row, and `kernel` arrays with a leading axis of rows. Both must be
    functions of modules or cached: they identify programs. Rows may share numbers, such as a
    temperature; if they share a vector, `plain` is compiled.

    XLA does not split a kernel over the devices of a mesh: if it would have to, and on other
    platforms, `plain` is compiled. Inside a `jax.shard_map` over all axes of a mesh, each device
    has its own arrays and runs the kernel if `check_vma=False`.
    """
    return _choose("tpu", args, kernel, plain)


def on_one_cpu(*args: Array, kernel: Callable[..., Any], plain: Callable[..., Any]) -> Any:
    """`kernel(*args)` in a program for one CPU; `plain(*args)` elsewhere and under `jax.vmap`.

    Both must be functions of modules or cached; see `on_one_tpu`.
    """
    return _choose("cpu", args, kernel, plain)


def _choose(platform: str, args: Any, kernel: Callable[..., Any], plain: Callable[..., Any]) -> Any:
    # JAX tracks differences between devices only in plain code, and only plain code knows while it
    # is traced what it is traced for.
    if any(jax.typeof(x).mat.varying for x in args) or platforms.is_special():
        return plain(*args)
    leaves, tree = jax.tree.flatten(jax.eval_shape(plain, *args))
    out = tuple(jax.core.ShapedArray(leaf.shape, leaf.dtype) for leaf in leaves)
    options = {"kernel": kernel, "plain": plain, "platform": platform}
    return jax.tree.unflatten(tree, _choice.bind(*args, out=out, axes=0, **options))


def _map_rows(plain: Callable[..., Any], axes: int) -> Callable[..., list[Array]]:
    """`plain` for arrays with this many axes of rows before their own."""
    for _ in range(axes):
        plain = jax.vmap(plain)
    return lambda *args: jax.tree.leaves(plain(*args))


def _flatten_rows(kernel: Callable[..., Any], axes: int) -> Callable[..., list[Array]]:
    """`kernel` for such arrays; outer axes become inner axes, in the order of `rows_in_tiles`."""
    turn = tuple(reversed(range(axes)))

    def run(*args: Array) -> list[Array]:
        sizes = args[0].shape[:axes]

        def flat(x: Array) -> Array:
            own = x.shape[axes:]
            return x.transpose(*turn, *range(axes, x.ndim)).reshape(math.prod(sizes), *own)

        def back(x: Array) -> Array:
            x = x.reshape(*(sizes[i] for i in turn), *x.shape[1:])
            return x.transpose(*turn, *range(axes, x.ndim))

        return [back(x) for x in jax.tree.leaves(kernel(*map(flat, args)))]

    return run


def _abstract(*args: Any, out: Any, axes: int, **_: Any) -> list[Any]:
    return [jax.core.ShapedArray((*args[0].shape[:axes], *x.shape), x.dtype) for x in out]


def _lower(ctx: mlir.LoweringRuleContext, *args: Any, on: str, **params: Any) -> Any:
    axes = params["axes"]
    run = _map_rows(params["plain"], axes)
    if on == params["platform"] and _on_one_device(ctx):
        if on == "cpu" and not axes:
            run = _map_rows(params["kernel"], 0)
        elif on == "tpu" and axes:
            run = _flatten_rows(params["kernel"], axes)
    return mlir.lower_fun(run, multiple_results=True)(ctx, *args)


def _on_one_device(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether the program runs on a single device's arrays, which kernels require."""
    context: Any = ctx.module_context.axis_context
    if hasattr(context, "num_devices"):
        return context.num_devices == 1
    manual: frozenset[str] = getattr(context, "manual_axes", frozenset())
    return bool(manual) and manual == frozenset(context.mesh.axis_names)


def _batch(args: Any, dims: Any, *, axes: int, **params: Any) -> Any:
    if any(dim is None and x.ndim > axes for x, dim in zip(args, dims, strict=True)):
        # A vector that all rows share would be copied for each row.
        out = jax.vmap(_map_rows(params["plain"], axes), in_axes=tuple(dims))(*args)
        return out, [0] * len(out)
    (size,) = {x.shape[dim] for x, dim in zip(args, dims, strict=True) if dim is not None}

    def leading(x: Array, dim: Any) -> Array:
        if dim is None:
            return jnp.broadcast_to(x, (size, *x.shape))
        return jnp.moveaxis(x, dim, 0)

    args = [leading(x, dim) for x, dim in zip(args, dims, strict=True)]
    out = _choice.bind(*args, axes=axes + 1, **params)
    return out, [0] * len(out)


@functools.partial(jit, static_argnames=("kernel", "plain", "out", "axes", "platform"))
def _plainly(*args: Array, plain: Callable[..., Any], axes: int, **_: Any) -> list[Array]:
    return _map_rows(plain, axes)(*args)


def _jvp(primals: Any, tangents: Any, *, plain: Callable[..., Any], axes: int, **_: Any) -> Any:
    tangents = [ad.instantiate_zeros(tangent) for tangent in tangents]
    return jax.jvp(_map_rows(plain, axes), tuple(primals), tuple(tangents))


_choice = Primitive("specjax_choice")
_choice.multiple_results = True
_choice.def_abstract_eval(_abstract)
_choice.def_impl(_plainly)
batching.primitive_batchers[_choice] = _batch
ad.primitive_jvps[_choice] = _jvp
mlir.register_lowering(_choice, functools.partial(_lower, on=""))
for _platform in ("cpu", "tpu"):
    mlir.register_lowering(_choice, functools.partial(_lower, on=_platform), platform=_platform)
