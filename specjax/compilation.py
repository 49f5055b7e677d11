"""Compilation of specjax's programs: `jit` replaces `jax.jit`.

In jaxlib 0.10.2 XLA's compiler for CPUs fuses products with the sums after them and gives both to
YNNPACK, which has bugs: sums of the squares of a product have wrong rows from the 32,769th on (jax
issue 39103), others crash (39257, 40412). So specjax compiles without these fusions. Separate
products still use YNNPACK.

The options belong to each program. specjax sets nothing global in JAX, except by
`enable_compilation_cache`: a user's own programs are compiled with the user's XLA_FLAGS
(docs/faq.md).
"""

import contextlib
import dataclasses
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tqdm
from jax.extend.core import get_opaque_trace_state

_FUSIONS = "xla_cpu_experimental_ynn_fusion_type"
# Only separate products.
CPU_OPTIONS = {_FUSIONS: "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}
# Nothing: for few tokens Eigen's products are faster than YNNPACK's.
STEP_OPTIONS = {_FUSIONS: ""}
# Seconds of a compilation before it is told of, and between two lines about it.
_LONG, _EVERY = 2.0, 20.0
# Of a thread. `words`: says what the program does that it now calls and perhaps compiles; `end`: is
# set when its compilation ends.
_calls = threading.local()


def cpu_options(backend: str) -> dict[str, Any] | None:
    """Compiler options of any program on a backend; None for devices other than CPUs.

    Also None if this XLA has no such options.
    """
    if backend != "cpu":
        return None
    # Another version of XLA may know only the second value.
    options = next((x for x in (CPU_OPTIONS, STEP_OPTIONS) if _is_known(**x)), None)
    return None if options is None else dict(options)


def step_options(backend: str) -> dict[str, Any] | None:
    """Returns options for programs with products of few tokens; see `cpu_options`."""
    return dict(STEP_OPTIONS) if backend == "cpu" and _is_known(**STEP_OPTIONS) else None


@functools.cache
def _is_known(**options: Any) -> bool:
    try:
        jax.jit(lambda: 0, compiler_options=options).lower().compile()
    except jax.errors.JaxRuntimeError:  # an option or a value that this XLA does not know
        return False
    return True


def _first_sharding(tree: Any) -> Any:
    """The sharding of the first leaf that has a sharding, or None."""
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, tuple | list):
        leaves = [tree] if hasattr(tree, "sharding") else jax.tree.leaves(tree)
        return next((x.sharding for x in leaves if getattr(x, "sharding", None) is not None), None)
    return next((sharding for sharding in map(_first_sharding, tree) if sharding is not None), None)


@functools.cache
def _no_trace() -> Any:
    """JAX's state while nothing is traced: that of a new thread, because this thread may trace."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(get_opaque_trace_state).result()


class Jitted:
    """A function jitted by `jit`."""

    def __init__(
        self, fun: Callable[..., Any], options: Any, words: Any, settings: dict[str, Any]
    ) -> None:
        functools.update_wrapper(self, fun)
        self._words = words
        self._within = jax.jit(fun, **settings)
        # The backend is known only at the call.
        self._alone = functools.cache(
            lambda backend: jax.jit(fun, compiler_options=options(backend), **settings)
        )

    def _jitted(self, *arguments: Any) -> Any:
        # JAX refuses options within another program.
        if get_opaque_trace_state() != _no_trace():
            return self._within
        placed = _first_sharding(arguments)
        device = None if placed is None else next(iter(placed.device_set))
        return self._alone(jax.default_backend() if device is None else device.platform)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        jitted = self._jitted(args, kwargs)
        if self._words is None:
            return jitted(*args, **kwargs)
        _calls.words = functools.partial(self._words, *args, **kwargs)
        try:
            return jitted(*args, **kwargs)
        finally:
            _calls.words = None

    def num_programs(self) -> int:
        """Returns the number of compiled programs for the default backend."""
        jitted: Any = self._alone(jax.default_backend())
        return jitted._cache_size()

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """Traces like `jax.jit`; shapes may have shardings on another machine's devices."""
        return self._jitted(args, kwargs).trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers like `jax.jit`; see `trace`."""
        return self._jitted(args, kwargs).lower(*args, **kwargs)


def jit(
    fun: Callable[..., Any],
    *,
    options: Callable[[str], Any] = cpu_options,
    words: Callable[..., str] | None = None,
    **settings: Any,
) -> Jitted:
    """`jax.jit(fun, **settings)`, compiled with the options that `options(backend)` gives.

    A call while another program is traced belongs to that program, with its options.
    `words(*arguments)` says what the program does, for a line while it is compiled; by default its
    name does.
    """
    return Jitted(fun, options, words, settings)


def product_precision(dtype: Any) -> jax.lax.Precision | None:
    """The `precision` of all products of a network with activations of this dtype.

    By default JAX rounds the operands of most float32 products, to bfloat16 on a TPU and to TF32 on
    a GPU, so that passes of one token and of several tokens may choose different tokens. Users of
    float32 want its precision; bfloat16 is for speed. None leaves it to JAX, as where the user has
    set `jax_default_matmul_precision`.
    """
    config: Any = jax.config
    if dtype != jnp.float32 or config.jax_default_matmul_precision is not None:
        return None
    return jax.lax.Precision.HIGHEST


# Events of jax.monitoring: the parts of a compilation, which do not overlap.
_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"
_COMPILE_PARTS = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    _BACKEND_COMPILE,
)


@dataclasses.dataclass
class Compilations:
    """What this process compiles.

    Attributes:
      announcement: a line for stderr when the first program has been compiled; "" for none, and no
        lines about long compilations.
      compiled: the number of programs that the backend compiled.
      read: the number of programs that were read from the cache on disk.
      seconds: of tracing, lowering, compiling, and reading programs from the cache.
    """

    announcement: str = ""
    compiled: int = 0
    read: int = 0
    seconds: float = 0.0
    _hit: bool = False

    def on_start(self, event: str, value: float, **about: Any) -> None:
        if event != _BACKEND_COMPILE or not self.announcement:
            return
        words = getattr(_calls, "words", None)
        name = about["fun_name"].removeprefix("jit(").strip("_)").replace("_", " ")
        what = words() if words else name
        _calls.end = threading.Event()
        threading.Thread(target=_tell_time, args=(what, _calls.end), daemon=True).start()

    def on_event(self, event: str, **_: Any) -> None:
        self._hit |= event == "/jax/compilation_cache/cache_hits"

    def on_duration(self, event: str, duration_secs: float, **_: Any) -> None:
        if event in _COMPILE_PARTS:
            self.seconds += duration_secs
        if event != _BACKEND_COMPILE:
            return
        if hasattr(_calls, "end"):
            _calls.end.set()
        self.read += self._hit
        self.compiled += not self._hit
        if self.compiled == 1 and not self._hit and self.announcement:
            print(self.announcement, file=sys.stderr, flush=True)
        self._hit = False


def _tell_time(what: str, end: threading.Event) -> None:
    """Says how long a compilation takes: on a terminal each second, elsewhere in a few lines."""
    begin, due = time.monotonic(), _LONG
    if end.wait(_LONG):
        return
    with tqdm.tqdm(bar_format="{desc}", leave=False, disable=None) as bar:
        while not end.wait(_LONG / 2):
            seconds = time.monotonic() - begin
            text = f"specjax: compiling {what}: {seconds:.0f} s"
            if not bar.disable:
                bar.set_description_str(text)
            elif seconds >= due:
                print(text, file=sys.stderr, flush=True)
                due = seconds + _EVERY


@contextlib.contextmanager
def count_compilations(announcement: str = "") -> Iterator[Compilations]:
    """Counts what this process compiles or reads from disk until the context ends."""
    counts = Compilations(announcement)
    jax.monitoring.register_scalar_listener(counts.on_start)
    jax.monitoring.register_event_listener(counts.on_event)
    jax.monitoring.register_event_duration_secs_listener(counts.on_duration)
    try:
        yield counts
    finally:
        jax.monitoring.unregister_scalar_listener(counts.on_start)
        jax.monitoring.unregister_event_listener(counts.on_event)
        jax.monitoring.unregister_event_duration_listener(counts.on_duration)


def compile_seconds() -> float:
    """Returns the seconds of compilation since the first call; see `Compilations`."""
    return _since_first_call().seconds


@functools.cache
def _since_first_call() -> Compilations:
    counts = Compilations()
    jax.monitoring.register_event_duration_secs_listener(counts.on_duration)
    return counts


def enable_compilation_cache() -> str | None:
    """Makes JAX keep compiled programs on disk, for all later processes of this user.

    It changes JAX's global options `jax_compilation_cache_dir` and
    `jax_persistent_cache_min_compile_time_secs`. It does not override the user's settings:
    JAX_COMPILATION_CACHE_DIR names another directory, and JAX_ENABLE_COMPILATION_CACHE=false
    disables the cache. The `specjax` command calls it; an import of specjax changes nothing.

    Returns:
      The directory; None if it cannot be written or the cache is disabled.
    """
    config: Any = jax.config
    if not config.jax_enable_compilation_cache:
        return None
    if config.jax_compilation_cache_dir:
        return config.jax_compilation_cache_dir
    try:
        root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        directory = Path(root) / "specjax" / "programs"
        # JAX runs the programs in this directory, so only this user may write to it.
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            return None
    except (OSError, RuntimeError):  # RuntimeError: the user has no home directory
        return None
    jax.config.update("jax_compilation_cache_dir", str(directory))
    # Decoding compiles many small programs, which take seconds in total.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return str(directory)


def placement(tree: Any) -> Any:
    """Returns the shardings of a tree as a hashable value for `jit_at`; None on one device."""
    # Fast, because every call of a loop needs it: the first leaf shows whether there is one device.
    if len(_first_sharding(tree).device_set) == 1:
        return None
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple(leaf.sharding for leaf in leaves)


def jit_at(fun: Callable[..., Any], **options: Any) -> Callable[..., Jitted]:
    """Jits a function with a given placement of its result (None by default)."""

    @functools.cache
    def jitted(where: Any) -> Jitted:
        there = {} if where is None else {"out_shardings": jax.tree.unflatten(*where)}
        return jit(fun, **options, **there)

    return lambda where=None: jitted(where)
