"""Strict settings for every test; they must be in place before jax starts its backends."""

import gc
import os
import pathlib
import tempfile

from tests.xla_flags import quick_flags

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = quick_flags(8, os.environ.get("XLA_FLAGS", ""))

# What several tests, their subprocesses and the other workers write is made once in a run. What
# they compile is kept for the next run: a key holds the whole program, the compiler's options and
# its version, so what has changed is compiled again. SPECJAX_TESTS_CACHE names another directory.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _shared = tempfile.TemporaryDirectory(prefix="specjax-tests-")
    os.environ["SPECJAX_TESTS_SHARED"] = _shared.name
    _caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    _programs = os.environ.get("SPECJAX_TESTS_CACHE") or os.path.join(_caches, "specjax-tests")
    try:
        os.makedirs(_programs, exist_ok=True)
    except OSError:  # no home, as on some CI machines
        _programs = os.path.join(_shared.name, "programs")
    # A run that was killed may leave a program without its time, and no other can then be written.
    for _program in pathlib.Path(_programs).glob("*-cache"):
        if not _program.with_name(_program.name.removesuffix("cache") + "atime").exists():
            _program.unlink(missing_ok=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _programs
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "true"
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
# With a limit, in bytes, JAX locks the directory: no worker reads what another has half written.
os.environ["JAX_COMPILATION_CACHE_MAX_SIZE"] = str(1 << 32)

from tests import shape_checks

shape_checks.install()

import jax

from specjax.compilation import enable_compilation_cache

enable_compilation_cache()

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Traces make millions of objects that live long: collecting as often as by default takes 7 % more.
gc.freeze()
gc.set_threshold(100_000, 20, 20)

from collections.abc import Iterator

import pytest

from benchmarks.spare_maps import spare_maps


@pytest.fixture
def patched(monkeypatch) -> Iterator[pytest.MonkeyPatch]:
    """A monkeypatch for the code of layers, which keep their traces."""
    jax.clear_caches()
    yield monkeypatch
    monkeypatch.undo()
    jax.clear_caches()


@pytest.fixture(autouse=True, scope="module")
def _free_compiled_programs() -> Iterator[None]:
    """XLA maps some 10 pieces of memory per program; Linux ends a process that holds 65,530."""
    yield
    spare_maps()
