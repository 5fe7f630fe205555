"""Devices to compile for, on a machine without one: H100 and TPU v5p.

XLA compiles for a described target: `jax.jit(f).lower(...).compile()` over a mesh of these devices gives the scheduled program
(`as_text()`) and what it needs of each device (`memory_analysis()`), but no speed and no numbers. It takes no GPU or TPU, no
driver: only XLA's CUDA plugin, ptxas and libdevice, `pip install -e '.[aot]'`, or libtpu, `pip install -e '.[tpu]'`;
JAX_PLATFORMS=cpu keeps jax from seeking a device.
"""

import importlib.util
import itertools
import math
import os
import shutil
from pathlib import Path

import jax
from jax.experimental import topologies

# The fields that XLA's cost models, limits and code generation read. Sources: [H] NVIDIA's H100 data sheet and white paper, SXM
# module with 80 GB; [C] CUDA C++ programming guide, technical specifications of compute capability 9.0.
H100_SXM = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"  # the name the driver gives it
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }  # sm_90a: wgmma and TMA
  core_count: 132                        # [H] streaming multiprocessors
  fpus_per_core: 128                     # [H] FP32 units a multiprocessor
  clock_rate_ghz: 1.98                   # [H] boost
  memory_bandwidth: 3350000000000        # [H] 3.35 TB/s
  device_memory_size: 80000000000        # [H] 80 GB
  l2_cache_size: 52428800                # [H] 50 MB
  threads_per_warp: 32                   # [C] this line and the rest
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  shared_memory_per_core: 233472         # 228 KB
  shared_memory_per_block: 49152         # 48 KB without opting in
  shared_memory_per_block_optin: 232448  # 227 KB
  block_dim_limit_x: 2147483647          # blocks of a grid
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
}
"""


# What exchanges need to run beside compute. They are asynchronous by default; this moves their starts up and their ends down.
# XLA also turns it on by itself where its analytical cost model knows the GPU. One collective is under way at a time.
OVERLAP = {"xla_gpu_enable_latency_hiding_scheduler": True}

# What a program needs that keeps activations on the host. XLA counts those as if they lay on the device, and to make room there
# it would compute products again that were to be kept, and say so in a warning alone: percent of a device's memory to go by.
# And with the two copies under way that it allows, a tick would begin by waiting for most of them, with nothing beside: as many
# as a tick has.
HOST = {"xla_gpu_memory_limit_slop_factor": 400, "xla_gpu_experimental_parallel_async_compute_limit": 64}


def h100(n_devices: int, per_node: int = 8) -> list[jax.Device]:
    """Compile-only H100 devices, `per_node` to a host, host by host.

    Raises ValueError if they do not fill their hosts, RuntimeError if XLA's CUDA plugin or ptxas is missing.
    """
    hosts, left = divmod(n_devices, per_node) if n_devices > per_node else (1, 0)
    if left or n_devices < 1:
        raise ValueError(f"n_devices must be a multiple of per_node, or 1 to per_node; got {n_devices=}, {per_node=}")
    if not ptxas():
        raise RuntimeError("compiling for H100 needs ptxas, and none was found; run: pip install -e '.[aot]'")
    topology = f"1x{hosts}x{min(n_devices, per_node)}"  # one partition: every host reaches every other
    try:
        return topologies.get_topology_desc(platform="cuda", target_config=H100_SXM, topology=topology).devices
    except NotImplementedError as error:
        raise RuntimeError(
            "compiling for H100 needs XLA's CUDA plugin, from pip install -e '.[aot]', and, without a GPU, JAX_PLATFORMS=cpu"
        ) from error


def v5p(n_devices: int) -> list[jax.Device]:
    """Compile-only TPU v5p chips in the torus of so many whose sides differ least.

    Raises ValueError if there is no such torus, RuntimeError if libtpu is missing.
    """
    sides = [2, *range(4, 25, 4)]  # of cubes of 4 x 4 x 4, or fewer chips than one has
    tori = [torus for torus in itertools.combinations_with_replacement(sides, 3) if math.prod(torus) == n_devices]
    if not tori:
        raise ValueError(f"n_devices must fill a torus with sides of 2, 4, 8, ... or 24 chips; got {n_devices=}")
    if not importlib.util.find_spec("libtpu"):
        raise RuntimeError("compiling for TPU v5p needs libtpu, and none was found; run: pip install -e '.[tpu]'")
    # Read when libtpu starts: there is no metadata server to ask, and other processes may compile as well.
    alone = {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    for name, value in alone.items():
        os.environ.setdefault(name, value)
    return topologies.get_topology_desc("v5p:" + "x".join(map(str, min(tori, key=sum))), platform="tpu").devices


def ptxas() -> Path | None:
    """The PTX assembler that XLA will find: CUDA_ROOT's, the installed package's, the search path's or the system's."""
    package = importlib.util.find_spec("nvidia.cu13") if importlib.util.find_spec("nvidia") else None
    roots = [os.environ.get("CUDA_ROOT"), *(package.submodule_search_locations if package else []), "/usr/local/cuda"]
    found = [path for root in roots if root and (path := Path(root, "bin", "ptxas")).exists()]
    on_path = shutil.which("ptxas")
    return found[0] if found else Path(on_path) if on_path else None
