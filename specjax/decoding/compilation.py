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


def jit_steps(fun: Callable[..., Any], **options: Any) -> Callable[[], Any]:
    """`jax.jit(fun, **options)` with `step_options`.

    Returns:
      A function of no arguments that returns the jitted function: what backend there is, is known
      once it is called.
    """

    @functools.cache
    def jitted(backend: str) -> Any:
        return jax.jit(fun, compiler_options=step_options(backend), **options)

    return lambda: jitted(jax.default_backend())
