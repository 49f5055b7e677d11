"""Strict settings for every test; they must be in place before jax starts its backends."""

import os
import tempfile

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most tests compile small programs and run them once: LLVM's optimisations would take a fifth of
# the time of all tests.
_FLAGS = {"xla_force_host_platform_device_count": 8, "xla_backend_optimization_level": 0}
_flags = os.environ.get("XLA_FLAGS", "")
_own = [f"--{name}={value}" for name, value in _FLAGS.items() if name not in _flags]
os.environ["XLA_FLAGS"] = " ".join([_flags, *_own]).strip()

# What several tests, their subprocesses and the other workers compile or write is made once. The
# directory is this run's own: no test reads or leaves programs in the user's cache.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _shared = tempfile.TemporaryDirectory(prefix="specjax-tests-")
    os.environ["SPECJAX_TESTS_SHARED"] = _shared.name
    os.environ["JAX_COMPILATION_CACHE_DIR"] = os.path.join(_shared.name, "programs")
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "true"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"

import jax

from specjax.runs.compilation_cache import enable_compilation_cache

enable_compilation_cache()  # its entries are whole when another process reads them

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

from collections.abc import Iterator

import pytest

from specjax.memory import spare_maps


@pytest.fixture(autouse=True, scope="module")
def _free_compiled_programs() -> Iterator[None]:
    """XLA maps some 10 pieces of memory per program; Linux ends a process that holds 65,530."""
    yield
    spare_maps()
