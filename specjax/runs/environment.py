"""The environment of a run: versions, device and JAX's settings, on which results depend."""

import importlib.metadata
from typing import Any

import jax
import jaxlib


def specjax_version() -> str | None:
    """The installed version of specjax, or None if its source tree runs without installation."""
    try:
        return importlib.metadata.version("specjax")
    except importlib.metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    """The versions, device and JAX settings that results depend on besides models and settings.

    Returns:
      JSON values: the device, the versions, and JAX's settings for random numbers and products.
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
