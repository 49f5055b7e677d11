"""Strict settings for every test; they must be in place before jax starts its backends."""

import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
_flags = os.environ.get("XLA_FLAGS", "")
if "xla_force_host_platform_device_count" not in _flags:
    os.environ["XLA_FLAGS"] = f"{_flags} --xla_force_host_platform_device_count=8".strip()

# What several tests and their subprocesses compile is compiled once. The directory is this
# process's own: no test reads or leaves programs in the user's cache.
_programs = tempfile.TemporaryDirectory(prefix="specjax-tests-")
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "true"
os.environ["JAX_COMPILATION_CACHE_DIR"] = _programs.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"

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
