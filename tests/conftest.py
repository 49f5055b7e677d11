"""Strict settings for every test; they must be in place before jax starts its backends."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_flags = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in _flags:
    os.environ["XLA_FLAGS"] = f"{_flags} --xla_force_host_platform_device_count=8".strip()

# No test reads or leaves programs in the user's cache.
os.environ.setdefault("JAX_ENABLE_COMPILATION_CACHE", "false")

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="module")
def _free_compiled_programs() -> Iterator[None]:
    """XLA maps some 10 pieces of memory per program; Linux ends a process that holds 65,530."""
    yield
    jax.clear_caches()
    gc.collect()
