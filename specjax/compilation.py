"""How specjax compiles its programs: `jit` stands in the place of `jax.jit`.

In jaxlib 0.10.2 XLA's compiler for CPUs joins products with the sums behind them and hands both to
YNNPACK, in whose code for it are faults: sums of the squares of a product have wrong rows from the
32,769th on (jax issue 39103), others crash (39257, 40412). So no program of specjax is compiled
with these fusions. A product by itself is another part of YNNPACK, and stays.

The options are each program's own. specjax sets nothing global in JAX: what a user compiles, is
compiled as the user's XLA_FLAGS say (docs/faq.md).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.extend.core import unsafe_am_i_under_a_jit_DO_NOT_USE

_FUSIONS = "xla_cpu_experimental_ynn_fusion_type"
# Products by themselves alone.
CPU_OPTIONS = {_FUSIONS: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
# Nothing: rounds of few tokens take longer with YNNPACK's products than with Eigen's
# (docs/benchmarks.md).
STEP_OPTIONS = {_FUSIONS: ""}

# As XLA refuses an option, and a value of it.
_UNKNOWN = ("No such compile option", "not a valid enum value")


def cpu_options(backend: str) -> dict[str, Any] | None:
    """Options for `jax.jit` of any program, or None.

    Args:
      backend: as named by `jax.default_backend()`.

    Returns:
      Names and values, for `compiler_options`; None for another device than a CPU, and where this
      XLA has no such options.
    """
    if backend != "cpu":
        return None
    # An XLA without this value may still know how to leave YNNPACK out.
    found = next((x for x in (CPU_OPTIONS, STEP_OPTIONS) if _known(**x)), None)
    return None if found is None else dict(found)


def step_options(backend: str) -> dict[str, Any] | None:
    """Likewise, for programs whose products are of few tokens."""
    return dict(STEP_OPTIONS) if backend == "cpu" and _known(**STEP_OPTIONS) else None


@functools.cache
def _known(**options: Any) -> bool:
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError as error:
        if not any(words in str(error) for words in _UNKNOWN):
            raise
        return False
    return True


def _backend_of(leaves: list[Any]) -> str:
    """The platform of the first of them that has a place; else the default one."""
    shardings = (getattr(leaf, "sharding", None) for leaf in leaves)
    placed = next((where for where in shardings if where is not None), None)
    return jax.default_backend() if placed is None else next(iter(placed.device_set)).platform


class Jitted:
    """What `jit` returns.

    Args:
      fun: the function.
      options: a function of the backend's name that returns compiler options.
      settings: other arguments of `jax.jit`.
    """

    def __init__(self, fun: Callable[..., Any], options: Any, settings: dict[str, Any]) -> None:
        functools.update_wrapper(self, fun)
        self._within = jax.jit(fun, **settings)
        # What backend there is, is known once it is called.
        self._alone = functools.cache(
            lambda backend: jax.jit(fun, compiler_options=options(backend), **settings)
        )

    def _jitted(self, *given: Any) -> Any:
        # Within another program the options are that program's, and JAX refuses others.
        if unsafe_am_i_under_a_jit_DO_NOT_USE():
            return self._within
        leaves = jax.tree.leaves(given)
        traced = any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)
        return self._within if traced else self._alone(_backend_of(leaves))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As of a function of `jax.jit`."""
        return self._jitted(args, kwargs)(*args, **kwargs)

    def num_programs(self) -> int:
        """How many programs the default backend has of it."""
        jitted: Any = self._alone(jax.default_backend())
        return jitted._cache_size()

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As of a function of `jax.jit`; shapes may have shardings on another machine's devices."""
        return self._jitted(args, kwargs).trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As of a function of `jax.jit`; see `trace`."""
        return self._jitted(args, kwargs).lower(*args, **kwargs)


def jit(
    fun: Callable[..., Any], *, options: Callable[[str], Any] = cpu_options, **settings: Any
) -> Jitted:
    """`jax.jit(fun, **settings)`, compiled with `options`.

    A call among whose arguments is a traced array belongs to the program that is being traced.

    Args:
      fun: as `jax.jit` takes it.
      options: a function of the backend's name that returns compiler options or None.
      settings: other arguments of `jax.jit`.

    Returns:
      A `Jitted`, which is called, traced and lowered as a function of `jax.jit`.
    """
    return Jitted(fun, options, settings)
