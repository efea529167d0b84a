"""Accelerators by name, as their compilers know them: devices that nobody has at hand."""

import importlib.util
import os
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh


class Machine(NamedTuple):
    """A slice of a pod, or nodes of GPUs.

    Attributes:
      platform: "tpu" or "cuda".
      topology: of TPUs "v5e:2x4"; of GPUs "slices x nodes x devices of a node".
      devices: how many.
      matrix_rate: matrix work a second at its peak: bfloat16 operations of a GPU by its data sheet, XLA's
        cycles of a TPU, whose data sheet has 197 TFLOP/s by four units of 128 x 128.
      accelerator: what libtpu calls it; None for GPUs.
    """

    platform: str
    topology: str
    devices: int
    matrix_rate: float
    accelerator: str | None = None


_V5E_CYCLES = 197e12 / (4 * 128 * 128 * 2)
_H100_OPERATIONS = 989e12
MACHINES = {
    "v5e-8": Machine("tpu", "v5e:2x4", 8, _V5E_CYCLES, "v5litepod-8"),
    "v5e-256": Machine("tpu", "v5e:16x16", 256, _V5E_CYCLES, "v5litepod-256"),
    "h100-8": Machine("cuda", "1x1x8", 8, _H100_OPERATIONS),
    "h100-64": Machine("cuda", "1x8x8", 64, _H100_OPERATIONS),
}

# What XLA asks a GPU about itself, of an H100 SXM, as NVIDIA's data sheet and CUDA's guide have it.
_H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84929347584
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 8 patch: 0 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""

# A description cannot be timed, so no kernel is chosen by trying.
_GPU_FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"


def environment(machine: Machine) -> dict[str, str]:
    """Variables that must be set before JAX starts."""
    if machine.platform == "cuda":
        flags = f"{os.environ.get('XLA_FLAGS', '')} {_GPU_FLAGS}".strip()
        return {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    return {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_ACCELERATOR_TYPE": str(machine.accelerator),
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def mesh_of(name: str, sizes: dict[str, int]) -> Mesh:
    """A mesh of devices that are described and not there.

    Raises:
      ValueError: for a mesh that does not use up its devices.
      ModuleNotFoundError: without the compiler, with how to get it.
    """
    machine = MACHINES[name]
    wanted = int(np.prod(list(sizes.values())))
    if wanted != machine.devices:
        raise ValueError(f"mesh {sizes}: {wanted} devices, and {name} has {machine.devices}")
    devices = np.array(_devices(machine)).reshape(tuple(sizes.values()))
    return Mesh(devices, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def _devices(machine: Machine) -> list[Any]:
    module, extra, options = {
        "tpu": ("libtpu", "tpu", {"topology_name": machine.topology}),
        "cuda": (
            "jax_cuda12_plugin",
            "cuda",
            {"target_config": _H100, "topology": machine.topology},
        ),
    }[machine.platform]
    if importlib.util.find_spec(module) is None:
        raise ModuleNotFoundError(
            f"{module} is not installed, the compiler for {machine.topology}: "
            f"pip install -e '.[{extra}]' (jax {jax.__version__} chooses its version)"
        )
    # libtpu is for one process at a time, unless ALLOW_MULTIPLE_LIBTPU_LOAD is set.
    return list(topologies.get_topology_desc(platform=machine.platform, **options).devices)
