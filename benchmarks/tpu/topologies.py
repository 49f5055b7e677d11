"""Descriptions of TPUs, for compilation on a machine without a TPU."""

import dataclasses
import importlib.util
import os

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from specjax.partitioning import make_mesh

# libtpu needs these without a TPU; any type of TPU will do.
_ENVIRONMENT = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    # No chip is opened, so other processes may use libtpu at the same time.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclasses.dataclass(frozen=True)
class Tpu:
    """Figures of a TPU besides `benchmarks.predicted.CHIPS`.

    Attributes:
      topologies: number of chips -> the name of such a slice.
      hertz: cycles a second. The maker publishes operations per second, and the number of matrix
        units: v5e 197e12 = 4 units * 128 * 128 * 2 * 1.5e9, v5p 459e12 = 8 units * 128 * 128 * 2 *
        1.75e9. For v6e the maker's numbers (2 units of 256 * 256) do not determine the clock: v5p's
        is assumed.
    """

    topologies: dict[int, str]
    hertz: float


_FLAT = {4: "2x2", 8: "2x4", 16: "4x4", 32: "4x8", 64: "8x8"}
TPUS = {
    "v5e": Tpu(_FLAT, 1.5e9),
    "v5p": Tpu({4: "2x2x1", 8: "2x2x2", 16: "2x2x4", 32: "2x4x4", 64: "4x4x4"}, 1.75e9),
    "v6e": Tpu(_FLAT, 1.75e9),
}


def mesh_of(chip: str, data: int, ways: int) -> Mesh:
    """A mesh of chips that are not there: programs can be compiled for it, but not run.

    Args:
      chip: one of `TPUS`.
      data: the number of chips that split the rows.
      ways: the number of chips that split each model.

    Raises:
      ValueError: there is no libtpu, JAX has already started on another platform than the CPU, or
        there is no slice of this size.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            "libtpu, the TPU's compiler, is needed: python -m pip install -c constraints.txt "
            "-e '.[tpu-compile]'"
        )
    _prepare()
    names = TPUS[chip].topologies
    chips = next((chips for chips in sorted(names) if chips >= data * ways), None)
    if chips is None:
        raise ValueError(f"a mesh has at most {max(names)} chips, got {data} x {ways}")
    name = f"{chip}:{names[chips]}"
    described = topologies.get_topology_desc(platform="tpu", topology_name=name)
    return make_mesh(data, ways, devices=described.devices)


def _prepare() -> None:
    """Keeps JAX off accelerators of this machine, and sets the variables that libtpu needs."""
    jax.config.update("jax_platforms", "cpu")  # does nothing if JAX has started
    if jax.default_backend() != "cpu":
        raise ValueError(
            f"JAX has started on {jax.default_backend()}: start the program with JAX_PLATFORMS=cpu"
        )
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
