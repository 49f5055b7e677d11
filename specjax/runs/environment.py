"""What results depend on besides all models and settings: versions, device, JAX's settings."""

import importlib.metadata
from typing import Any

import jax
import jaxlib


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
