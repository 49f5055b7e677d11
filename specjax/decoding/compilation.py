"""How the loops are compiled."""

import functools
from collections.abc import Callable
from typing import Any

import jax

# XLA's CPU backend hands products to YNNPACK, with which rounds of few tokens take longer than
# with Eigen: docs/benchmarks.md.
_CPU_OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": ""}


@functools.cache
def step_options(backend: str) -> dict[str, Any] | None:
    """Options for `jax.jit` of programs whose products are of few tokens, or None.

    Args:
      backend: as named by `jax.default_backend()`.

    Returns:
      Names and values, for `compiler_options`; None where this XLA has no such options.
    """
    if backend != "cpu":
        return None
    try:
        jax.jit(lambda: 0, compiler_options=_CPU_OPTIONS).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return None
    return dict(_CPU_OPTIONS)


def placement(tree: Any) -> Any:
    """Where the arrays of a tree lie, as a hashable value for `jit_steps`; None on one device."""
    leaves, structure = jax.tree.flatten(tree)
    # Every call of a loop asks, and on one device only the first leaf need say so.
    if len(leaves[0].sharding.device_set) == 1:
        return None
    return structure, tuple(leaf.sharding for leaf in leaves)


def jit_at(fun: Callable[..., Any], where: Any, **options: Any) -> Any:
    """`jax.jit(fun, **options)` whose result lies at `where`, from `placement`."""
    if where is not None:
        options["out_shardings"] = jax.tree.unflatten(*where)
    return jax.jit(fun, **options)


def jit_steps(fun: Callable[..., Any], **options: Any) -> Callable[[Any], Any]:
    """Jits a function of a state with `step_options`, so that its result lies where the state lay.

    Returns:
      A function of the state's `placement` that returns the jitted function: what backend there is,
      is known once it is called.
    """

    @functools.cache
    def jitted(backend: str, where: Any) -> Any:
        return jit_at(fun, where, compiler_options=step_options(backend), **options)

    def at(where: Any = None) -> Any:
        return jitted(jax.default_backend(), where)

    return at
