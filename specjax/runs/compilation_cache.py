"""JAX's cache of compiled programs on disk, and the number of compiled programs.

Nothing happens at import. The `specjax` command enables the cache. A program that imports specjax
enables it with `specjax.enable_compilation_cache()` or with JAX's own options.
"""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax

from specjax.compilation import BACKEND_COMPILE

_CACHE_HIT = "/jax/compilation_cache/cache_hits"


def cache_directory() -> Path:
    """Returns the default directory; JAX_COMPILATION_CACHE_DIR names another directory."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "specjax" / "programs"


def enable_compilation_cache() -> str | None:
    """Makes JAX keep compiled programs on disk, for all later processes of this user.

    It changes JAX's global options `jax_compilation_cache_dir` and
    `jax_persistent_cache_min_compile_time_secs`. It does not override the user's settings:
    JAX_COMPILATION_CACHE_DIR names another directory, and JAX_ENABLE_COMPILATION_CACHE=false
    disables the cache.

    Returns:
      The directory; None if it cannot be written or the cache is disabled.
    """
    config: Any = jax.config
    if not config.jax_enable_compilation_cache:
        return None
    if config.jax_compilation_cache_dir:
        return config.jax_compilation_cache_dir
    try:
        directory = cache_directory()
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


@dataclasses.dataclass
class Compilations:
    """Counts of compiled programs.

    Attributes:
      compiled: the number of programs that the backend compiled.
      read: the number of programs that were read from the cache on disk.
      announcement: a line for stderr when the first program has been compiled; "" for none.
    """

    compiled: int = 0
    read: int = 0
    announcement: str = ""
    _hit: bool = False

    def on_event(self, event: str, **_: Any) -> None:
        self._hit |= event == _CACHE_HIT

    def on_duration(self, event: str, duration_secs: float, **_: Any) -> None:
        if event != BACKEND_COMPILE:
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
    """Counts the programs that this process compiles or reads from disk, until the context ends.

    The announcement is a line for stderr when the first program has been compiled.
    """
    counts = Compilations(announcement=announcement)
    jax.monitoring.register_event_listener(counts.on_event)
    jax.monitoring.register_event_duration_secs_listener(counts.on_duration)
    try:
        yield counts
    finally:
        jax.monitoring.unregister_event_listener(counts.on_event)
        jax.monitoring.unregister_event_duration_listener(counts.on_duration)
