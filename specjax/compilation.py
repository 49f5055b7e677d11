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
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import get_opaque_trace_state

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


def _first_placed(tree: Any) -> Any:
    """Where the first leaf lies that has a place; None if none has."""
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        leaves = [tree] if hasattr(tree, "sharding") else jax.tree.leaves(tree)
        return next((x.sharding for x in leaves if getattr(x, "sharding", None) is not None), None)
    return next((found for found in map(_first_placed, tree) if found is not None), None)


def _backend_of(tree: Any) -> str:
    """The platform of the first leaf that has a place; else the default one."""
    placed = _first_placed(tree)
    return jax.default_backend() if placed is None else next(iter(placed.device_set)).platform


@functools.cache
def _no_trace() -> Any:
    """JAX's state where nothing is traced: that of a new thread, also if this one traces now."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(get_opaque_trace_state).result()


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
        if get_opaque_trace_state() != _no_trace():
            return self._within
        return self._alone(_backend_of(given))

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

    A call while another program is traced belongs to that program.

    Args:
      fun: as `jax.jit` takes it.
      options: a function of the backend's name that returns compiler options or None.
      settings: other arguments of `jax.jit`.

    Returns:
      A `Jitted`, which is called, traced and lowered as a function of `jax.jit`.
    """
    return Jitted(fun, options, settings)


def product_precision(dtype: Any) -> jax.lax.Precision | None:
    """The `precision` of every product of a network whose activations have this dtype.

    JAX by itself rounds the operands of float32 products, to bfloat16 on a TPU and to TF32 on a
    GPU, in most products but not in all: a pass of one token and one of several then choose other
    tokens. Who decodes in float32 wants its digits; bfloat16 is there for speed.

    Args:
      dtype: the dtype of the activations.

    Returns:
      HIGHEST for float32, unless the user has set `jax_default_matmul_precision`; else None, by
      which JAX takes the user's setting or its own.
    """
    config: Any = jax.config
    if dtype != jnp.float32 or config.jax_default_matmul_precision is not None:
        return None
    return jax.lax.Precision.HIGHEST


# Events of jax.monitoring: the parts of a compilation, which do not overlap.
COMPILE_PARTS = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    "/jax/core/compile/backend_compile_duration",
)


def compile_seconds() -> float:
    """What this process has spent on compilation since this was first asked.

    Tracing and lowering count, and programs that are read from the cache on disk.
    """
    return sum(_spent())


@functools.cache
def _spent() -> list[float]:
    """One number, which grows."""
    spent = [0.0]

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event in COMPILE_PARTS:
            spent[0] += duration_secs

    jax.monitoring.register_event_duration_secs_listener(listen)
    return spent


def placement(tree: Any) -> Any:
    """Where the arrays of a tree lie, as a hashable value for `jit_at`; None on one device."""
    # Every call of a loop asks, and on one device the first leaf says it.
    if len(_first_placed(tree).device_set) == 1:
        return None
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple(leaf.sharding for leaf in leaves)


def jit_at(fun: Callable[..., Any], **options: Any) -> Callable[..., Jitted]:
    """Jits a function whose result is to lie where the caller says.

    Args:
      fun: as `jit` takes it.
      **options: of `jit`.

    Returns:
      A function of a `placement` (None by default) that returns the jitted function.
    """

    @functools.cache
    def jitted(where: Any) -> Jitted:
        there = {} if where is None else {"out_shardings": jax.tree.unflatten(*where)}
        return jit(fun, **options, **there)

    def at(where: Any = None) -> Jitted:
        return jitted(where)

    return at
