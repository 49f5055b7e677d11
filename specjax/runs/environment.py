"""What results depend on besides all models and settings: versions, device, JAX's settings."""

import functools
import importlib.metadata
import sys
from typing import Any

import jax
import jaxlib

from specjax.runs.compilation_cache import enable_compilation_cache

# `Decoder` still calls these two; they go with the calls.
enable_cache = functools.cache(enable_compilation_cache)


@functools.cache
def announce() -> None:
    """Says once per process, on stderr, that the first programs are being compiled."""
    directory = enable_cache()
    kept = f"; later runs read them from {directory}" if directory else ""
    print(f"specjax: compiling, once per model and shape{kept}", file=sys.stderr, flush=True)


def specjax_version() -> str | None:
    """The installed version of specjax, or None where its source tree is run uninstalled."""
    try:
        return importlib.metadata.version("specjax")
    except importlib.metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    """What changes results though every model and setting stays.

    Returns:
      JSON values: the device, the versions, and JAX's settings of random numbers and products.
    """
    config: Any = jax.config
    return {
        "device": f"{jax.default_backend()}: {jax.devices()[0].device_kind}",
        "versions": {
            "specjax": specjax_version(),
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
        },
        "jax_settings": {
            "threefry_partitionable": config.jax_threefry_partitionable,
            "matmul_precision": config.jax_default_matmul_precision,
        },
    }
