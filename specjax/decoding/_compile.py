"""How the loops are compiled."""

import functools
from collections.abc import Callable
from typing import Any

import jax

# XLA's CPU backend hands small products to YNNPACK, whose threads take longer to wake than a
# product of a few tokens takes: with Eigen a round is a tenth to a quarter shorter.
_CPU_OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": ""}


@functools.cache
def step_options(backend: str) -> dict[str, Any] | None:
    """Options for `jax.jit` of programs whose products are of few tokens, or None.

    Args:
      backend: as named by `jax.default_backend()`.
    """
    if backend != "cpu":
        return None
    try:
        jax.jit(lambda: 0, compiler_options=_CPU_OPTIONS).lower().compile()
    except jax.errors.JaxRuntimeError:  # another version of XLA
        return None
    return _CPU_OPTIONS


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
