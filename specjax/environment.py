"""The environment of a run: the versions, the device and JAX's settings."""

import functools
import importlib.metadata
import os
import platform
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib

from specjax import cpu_kernels
from specjax.compilation import cpu_options, product_precision, step_options
from specjax.errors import UserError


def specjax_version() -> str | None:
    """Returns the installed version of specjax; None if it is not installed."""
    try:
        return importlib.metadata.version("specjax")
    except importlib.metadata.PackageNotFoundError:
        return None


@functools.cache
def device() -> str:
    """Returns the platform and the kind of the first device; for a CPU its model."""
    backend = jax.default_backend()
    if backend != "cpu":
        return f"{backend}: {jax.devices()[0].device_kind}"
    try:
        model = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    except OSError:  # not Linux
        model = None
    return f"cpu: {model[1] if model else platform.processor() or platform.machine()}"


def machine() -> str:
    """Returns the device and the number of devices; for a CPU the number of cores."""
    if jax.default_backend() != "cpu":
        return f"{device()}, {jax.device_count()} devices"
    affinity = getattr(os, "sched_getaffinity", None)  # only on Linux
    cores = len(affinity(0)) if affinity else os.cpu_count()
    return f"{device()}, {cores} cores, {_kernels()}"


def _kernels() -> str:
    if not cpu_kernels.available():
        return "no cpu_kernels"
    return "cpu_kernels with VNNI" if cpu_kernels.has_bytes() else "cpu_kernels"


def products() -> list[str]:
    """A line that says who multiplied few tokens; empty for devices other than CPUs."""
    if jax.default_backend() != "cpu":
        return []
    if obstacle := cpu_kernels.obstacle():
        return [f"XLA multiplied; the faster kernels for few tokens are not here: {obstacle}."]
    more = ", and all of matrices of 8 or 4 bits," * cpu_kernels.has_bytes()
    return [f"Passes of up to {cpu_kernels.MOST_ROWS} tokens{more} were multiplied by cpu_kernels."]


def check_devices() -> None:
    """Starts JAX's backends."""
    config: Any = jax.config
    try:
        jax.devices()
    except Exception as error:  # jaxlib raises many types, some without a message
        reason = " ".join(str(error).split()) or "it is not installed"
        platforms = config.jax_platforms or "(not set)"
        raise UserError(
            f"JAX_PLATFORMS={platforms}: JAX cannot start this platform ({reason}): set "
            "JAX_PLATFORMS=cpu, or install JAX for the device"
        ) from None


def xla_flags() -> str:
    """Returns the flags of XLA_FLAGS that may change results, sorted."""
    harmless = ("--xla_dump", "--xla_force_host_platform_device_count")
    flags = os.environ.get("XLA_FLAGS", "").split()
    return " ".join(sorted(flag for flag in flags if not flag.startswith(harmless)))


def compiling(*, float32: bool = True) -> dict[str, Any]:
    """The compiler settings of specjax that change results, as JSON values.

    On a CPU they are the options of programs and of steps; on other devices the precision of
    float32 products, if a float32 network takes part.
    """
    backend = jax.default_backend()
    if backend == "cpu":
        return {
            "compiler_options": [cpu_options(backend), step_options(backend)],
            "cpu_kernels": _kernels(),
        }
    config: Any = jax.config
    precision = product_precision(jnp.float32)
    name = config.jax_default_matmul_precision if precision is None else precision.name
    return {"float32_products": name} if float32 else {}


def environment(*, float32: bool = True) -> dict[str, Any]:
    """The versions, the device and the settings that results depend on, as JSON values."""
    config: Any = jax.config
    return {
        **compiling(float32=float32),
        "device": device(),
        "xla_flags": xla_flags(),
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
