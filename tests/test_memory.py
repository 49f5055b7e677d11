"""Estimates of memory, and what is refused by them."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import spare_maps
from specjax import memory


class Accelerator:
    """A device with a memory of its own."""

    platform, process_index = "gpu", 0

    def __init__(self, size):
        self.size = size

    def memory_stats(self):
        return {"bytes_limit": self.size}


def test_a_container_has_what_its_control_group_allows(tmp_path, monkeypatch):
    assert 2**28 < memory.host_bytes() < sys.maxsize
    for text, expected in (("12345\n", 12345), ("max\n", None)):
        (tmp_path / "max").write_text(text)
        monkeypatch.setattr(memory, "_LIMITS", (str(tmp_path / "max"), "/absent"))
        assert (memory.host_bytes() == 12345) == (expected is not None)


def test_bytes_are_counted_per_device_and_without_overflow():
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()).reshape(8), ("data",))
    rows, whole = (jax.NamedSharding(mesh, jax.P(*axes)) for axes in (("data",), ()))
    shape = jax.ShapeDtypeStruct((2**40, 2**40), np.float32)
    assert memory.nbytes({"a": shape, "b": shape}) == 2**83
    assert memory.nbytes({"a": shape, "b": shape}, {"a": rows, "b": whole}) == 2**79 + 2**82


def test_an_array_that_is_there_twice_is_counted_once():
    one, other = jnp.zeros(10), jnp.zeros(10)
    assert memory.nbytes([one, one, other]) == 80


def dispatched():
    """What XLA raises where a program on the CPU needs too much."""
    failed = "Error dispatching computation: Out of memory allocating 480000000064 bytes."
    raise jax.errors.JaxRuntimeError(f"INTERNAL: {failed}")


@pytest.mark.parametrize(
    "allocate",
    [
        lambda: jnp.zeros((2**20, 2**30), jnp.int8).block_until_ready(),
        lambda: np.empty(2**56, np.uint8),
        dispatched,
    ],
)
def test_a_failed_allocation_is_told_in_one_line(allocate):
    message = r"^arrays: out of memory \(.+\): shrink them$"
    told = memory.explain_full_memory("arrays", "shrink them")
    with pytest.raises(ValueError, match=message), told:
        allocate()


def test_other_errors_of_xla_stay_as_they_are():
    told = memory.explain_full_memory("arrays", "shrink them")
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL: broken"), told:
        raise jax.errors.JaxRuntimeError("INTERNAL: broken")


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (5_123_456_789_012, "5.12 TB"),
        (999_999, "1 MB"),
        (10**400, "1e+282 EB"),
    ],
)
def test_sizes_in_words(size, words):
    assert memory.in_words(size) == words


@pytest.mark.parametrize(
    ("devices", "needed", "message"),
    [
        (None, 100, None),
        (None, 101, "arrays: this needs at least 101 bytes of memory, but the machine has 100 by"),
        (jax.devices(), 12, None),
        (jax.devices(), 13, "104 bytes of memory, but the machine has 100 bytes: shrink them"),
        ([Accelerator(200), Accelerator(70)], 70, None),
        ([Accelerator(200), Accelerator(70)], 71, "71 bytes of memory, but a device has 70 bytes"),
    ],
)
def test_what_cannot_fit_is_refused(monkeypatch, devices, needed, message):
    monkeypatch.setattr(memory, "host_bytes", lambda: 100)
    if message is None:
        return memory.check_fits("arrays", needed, "shrink them", devices)
    with pytest.raises(ValueError, match=message):
        memory.check_fits("arrays", needed, "shrink them", devices)


def test_programs_are_forgotten_before_the_system_ends_the_process(tmp_path, monkeypatch):
    maps, most = tmp_path / "maps", tmp_path / "most"
    maps.write_text("a piece\n" * 40)
    monkeypatch.setattr(spare_maps, "_MAPS", maps)
    monkeypatch.setattr(spare_maps, "_MOST_MAPS", most)
    double = jax.jit(lambda x: 2 * x)
    double(jnp.ones(3))
    most.write_text("101\n")
    assert not spare_maps.spare_maps() and double._cache_size() == 1
    most.write_text("100\n")
    assert spare_maps.spare_maps() and double._cache_size() == 0
    monkeypatch.setattr(spare_maps, "_MAPS", tmp_path / "absent")
    assert not spare_maps.spare_maps()
