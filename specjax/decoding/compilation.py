"""How the loops are compiled, and where their results lie."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from specjax.compilation import Jitted, jit, step_options


def placement(tree: Any) -> Any:
    """Where the arrays of a tree lie, as a hashable value for `jit_steps`; None on one device."""
    leaves, structure = jax.tree.flatten(tree)
    # Every call of a loop asks, and on one device only the first leaf need say so.
    if len(leaves[0].sharding.device_set) == 1:
        return None
    return structure, tuple(leaf.sharding for leaf in leaves)


def jit_at(fun: Callable[..., Any], where: Any, **options: Any) -> Jitted:
    """`jit(fun, **options)` whose result lies at `where`, from `placement`."""
    if where is not None:
        options["out_shardings"] = jax.tree.unflatten(*where)
    return jit(fun, **options)


def jit_steps(fun: Callable[..., Any], **options: Any) -> Callable[[Any], Jitted]:
    """Jits a function of a state with `step_options`, so that its result lies where the state lay.

    Returns:
      A function of the state's `placement` that returns the jitted function.
    """

    @functools.cache
    def jitted(where: Any) -> Jitted:
        return jit_at(fun, where, options=step_options, **options)

    def at(where: Any = None) -> Jitted:
        return jitted(where)

    return at
