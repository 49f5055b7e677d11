"""JAX's cache of compiled programs on disk, and what compilation costs.

Nothing happens at import. The `specjax` command enables the cache; a program that imports specjax
does so with `specjax.enable_compilation_cache()`, or sets JAX's own options.
"""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

# Events of jax.monitoring. The three parts of a compilation never nest.
_CACHE_HIT = "/jax/compilation_cache/cache_hits"
_BACKEND_COMPILE = "/jax/core/compile/backend_compile_duration"
_COMPILE_PARTS = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    _BACKEND_COMPILE,
)


def cache_directory() -> Path:
    """Where compiled programs are kept unless JAX_COMPILATION_CACHE_DIR names another directory."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "specjax" / "programs"


def enable_compilation_cache() -> str | None:
    """Lets JAX keep compiled programs on disk, for all later processes of this user.

    It changes JAX's global options `jax_compilation_cache_dir` and
    `jax_persistent_cache_min_compile_time_secs`. What the user has set stays:
    JAX_COMPILATION_CACHE_DIR names another directory, JAX_ENABLE_COMPILATION_CACHE=false keeps
    nothing.

    Returns:
      The directory, or None where nothing is kept: it cannot be written, or JAX is told not to.
    """
    config: Any = jax.config
    if not config.jax_enable_compilation_cache:
        return None
    if config.jax_compilation_cache_dir:
        return config.jax_compilation_cache_dir
    try:
        directory = cache_directory()
        # What is read from here is run: nobody else may write it.
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK):
            return None
    except (OSError, RuntimeError):  # RuntimeError: the user has no home directory
        return None
    jax.config.update("jax_compilation_cache_dir", str(directory))
    # Decoding also runs many small programs, which together take seconds to compile.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return str(directory)


@dataclasses.dataclass
class Compilations:
    """What was compiled since counting began.

    Attributes:
      compiled: programs that the backend compiled.
      read: programs that were read from the cache on disk instead.
      seconds: spent on both, tracing and lowering included.
      announcement: printed on stderr when the first program has been compiled; "" for none.
    """

    compiled: int = 0
    read: int = 0
    seconds: float = 0.0
    announcement: str = ""

    _hit: bool = False

    def on_event(self, event: str, **_: Any) -> None:
        """Listens to `jax.monitoring`'s events."""
        self._hit |= event == _CACHE_HIT

    def on_duration(self, event: str, duration_secs: float, **_: Any) -> None:
        """Listens to `jax.monitoring`'s durations."""
        if event in _COMPILE_PARTS:
            self.seconds += duration_secs
        if event != _BACKEND_COMPILE:
            return
        if self._hit:
            self.read += 1
        else:
            self.compiled += 1
            if self.compiled == 1 and self.announcement:
                print(self.announcement, file=sys.stderr, flush=True)
        self._hit = False


@contextlib.contextmanager
def count_compilations(announcement: str = "") -> Iterator[Compilations]:
    """Counts the programs that this process compiles or reads from disk.

    Args:
      announcement: printed on stderr when the first program has been compiled, not if all are read
        from disk.

    Yields:
      The counts so far; they grow until the context ends.
    """
    counts = Compilations(announcement=announcement)
    jax.monitoring.register_event_listener(counts.on_event)
    jax.monitoring.register_event_duration_secs_listener(counts.on_duration)
    try:
        yield counts
    finally:
        jax.monitoring.unregister_event_listener(counts.on_event)
        jax.monitoring.unregister_event_duration_listener(counts.on_duration)
