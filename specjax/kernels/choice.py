"""Which of two computations a program holds: a kernel, or the plain code that it stands for."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from specjax.types import Array


def on_one_tpu(*args: Array, kernel: Callable[..., Any], plain: Callable[..., Any]) -> Any:
    """`kernel(*args)` in a program for one TPU, `plain(*args)` in any other, and under `vmap`.

    XLA does not split a kernel over the devices of a mesh: where it would have to, and on other
    platforms, `plain` is compiled. Inside of a `jax.shard_map` over all axes of a mesh each device
    has its own arrays, and runs the kernel. Neither is differentiated.

    Args:
      *args: arrays.
      kernel: returns arrays of the shapes and dtypes that `plain` returns.
      plain: the same in plain code.

    Returns:
      What the chosen one returns.
    """
    shapes = jax.eval_shape(plain, *args)
    leaves, tree = jax.tree.flatten(shapes)
    out = tuple(jax.core.ShapedArray(leaf.shape, leaf.dtype) for leaf in leaves)
    return jax.tree.unflatten(tree, _choice.bind(*args, kernel=kernel, plain=plain, out=out))


def _flat(function: Callable[..., Any]) -> Callable[..., list[Array]]:
    return lambda *args: jax.tree.leaves(function(*args))


def _run_plain(*args: Array, plain: Callable[..., Any], **_: Any) -> list[Array]:
    return _flat(jax.jit(plain))(*args)


def _lower(ctx: mlir.LoweringRuleContext, *args: Any, tpu: bool, **params: Any) -> Any:
    chosen = params["kernel" if tpu and _on_one_device(ctx) else "plain"]
    return mlir.lower_fun(_flat(chosen), multiple_results=True)(ctx, *args)


def _on_one_device(ctx: mlir.LoweringRuleContext) -> bool:
    """Whether what is lowered runs on one device's own arrays, as Pallas asks for."""
    context: Any = ctx.module_context.axis_context
    if hasattr(context, "num_devices"):
        return context.num_devices == 1
    manual: frozenset[str] = getattr(context, "manual_axes", frozenset())
    return bool(manual) and manual == frozenset(context.mesh.axis_names)


def _batch(args: Any, dims: Any, *, plain: Callable[..., Any], **_: Any) -> Any:
    out = _flat(jax.vmap(plain, in_axes=tuple(dims)))(*args)
    return out, [0] * len(out)


_choice = Primitive("specjax_choice")
_choice.multiple_results = True
_choice.def_abstract_eval(lambda *_, out, **__: list(out))
_choice.def_impl(_run_plain)
batching.primitive_batchers[_choice] = _batch
mlir.register_lowering(_choice, functools.partial(_lower, tpu=False))
mlir.register_lowering(_choice, functools.partial(_lower, tpu=True), platform="tpu")
