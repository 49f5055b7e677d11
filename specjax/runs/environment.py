"""Compiled programs: kept on disk and announced; and what results hang on besides all settings.

Nothing happens at import: the first decoding of a process does it.
"""

import functools
import importlib.metadata
import os
import sys
from pathlib import Path
from typing import Any

import jax
import jaxlib


def cache_directory() -> Path:
    """Where compiled programs are kept unless JAX_COMPILATION_CACHE_DIR says otherwise."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "specjax" / "programs"


@functools.cache
def enable_cache() -> str | None:
    """Lets JAX keep compiled programs on disk, once per process.

    JAX's own settings come first: JAX_COMPILATION_CACHE_DIR names another directory,
    JAX_ENABLE_COMPILATION_CACHE=false keeps nothing.

    Returns:
      The directory, or None where nothing is kept (it cannot be written, or JAX is told not to).
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
    except (OSError, RuntimeError):  # RuntimeError: there is no home
        return None
    jax.config.update("jax_compilation_cache_dir", str(directory))
    # Decoding also runs many small programs, which together take seconds to compile.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    return str(directory)


@functools.cache
def announce() -> None:
    """Says once per process, on stderr, that the first programs are being compiled."""
    directory = enable_cache()
    kept = f"; later runs read them from {directory}" if directory else ""
    print(f"specjax: compiling, once per model and shape{kept}", file=sys.stderr, flush=True)


def environment() -> dict[str, Any]:
    """What changes results though every model and setting stays: versions, device, JAX's settings.

    Returns:
      JSON values.
    """
    config: Any = jax.config
    try:
        version = importlib.metadata.version("specjax")
    except importlib.metadata.PackageNotFoundError:  # run from its source tree
        version = None
    return {
        "device": f"{jax.default_backend()}: {jax.devices()[0].device_kind}",
        "versions": {"specjax": version, "jax": jax.__version__, "jaxlib": jaxlib.__version__},
        "jax_settings": {
            "threefry_partitionable": config.jax_threefry_partitionable,
            "matmul_precision": config.jax_default_matmul_precision,
        },
    }
