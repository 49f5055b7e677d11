"""Descriptions of TPUs and GPUs, for compilation on a machine without one."""

import dataclasses
import importlib.util
import os
from typing import Any

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


# What XLA's compiler asks of an H100 SXM: the limits of the CUDA programming guide for compute
# capability 9.0, and the sizes and rates of NVIDIA's data sheet.
_H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  memory_bandwidth: 3352320000000
  device_memory_size: 84942979072
  l2_cache_size: 52428800
  shared_memory_per_core: 233472
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  device_address_bits: 64
  device_vendor: "NVIDIA Corporation"
  platform_version: "Compute Capability 9.0a"
  name: "NVIDIA H100 80GB HBM3"
  driver_version: "13.0.0"
  runtime_version: "12.9.0"
  compile_time_toolkit_version: "12.9.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
GPUS = {"h100": _H100}
# Kernels cannot be tried without a GPU.
GPU_OPTIONS: dict[str, Any] = {"xla_gpu_autotune_level": 0}


def mesh_of(chip: str, data: int, ways: int) -> Mesh:
    """A mesh of chips that are not there: programs can be compiled for it, but not run.

    `data` chips split the rows, and `ways` each model; a GPU has one of both.
    """
    if chip in GPUS:
        return _gpu(chip)
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError(
            "libtpu, the TPU's compiler, is needed: python -m pip install -c constraints.txt "
            "-e '.[tpu-compile]'"
        )
    _prepare()
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    names = TPUS[chip].topologies
    chips = next((chips for chips in sorted(names) if chips >= data * ways), None)
    if chips is None:
        raise ValueError(f"a mesh has at most {max(names)} chips, got {data} x {ways}")
    name = f"{chip}:{names[chips]}"
    described = topologies.get_topology_desc(platform="tpu", topology_name=name)
    return make_mesh(data, ways, devices=described.devices)


def _gpu(chip: str) -> Mesh:
    if importlib.util.find_spec("jax_cuda12_plugin") is None:
        raise ValueError(
            "jax[cuda12], XLA's compiler for GPUs, is needed: python -m pip install "
            "-c constraints.txt -e '.[gpu-compile]'"
        )
    _prepare()
    described = topologies.get_topology_desc(
        platform="cuda", topology_name=chip, topology="1x1x1", target_config=GPUS[chip]
    )
    return make_mesh(1, 1, devices=described.devices)


def _prepare() -> None:
    """Keeps JAX off accelerators of this machine."""
    jax.config.update("jax_platforms", "cpu")  # does nothing if JAX has started
    if jax.default_backend() != "cpu":
        raise ValueError(
            f"JAX has started on {jax.default_backend()}: start the program with JAX_PLATFORMS=cpu"
        )
