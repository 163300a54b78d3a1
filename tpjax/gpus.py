"""What is known of each GPU kind: enough for XLA's compiler to target one that is not here.

Figures are those that the CUDA driver reports for the card.
"""

from __future__ import annotations

from dataclasses import dataclass

from tpjax.config import ConfigError, nearest


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU. Sizes in bytes, bandwidth in bytes per second."""

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    multiprocessors: int
    memory_bandwidth: float
    l2_bytes: int
    clock_ghz: float
    shared_bytes_per_multiprocessor: int
    shared_bytes_per_block: int  # the most a kernel can ask for
    threads_per_multiprocessor: int

    def target_description(self) -> str:
        """The text proto in which XLA takes its compilation target."""
        major, minor = self.compute_capability
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {self.shared_bytes_per_multiprocessor}
  shared_memory_per_block_optin: {self.shared_bytes_per_block}
  threads_per_core_limit: {self.threads_per_multiprocessor}
  core_count: {self.multiprocessors}
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {int(self.memory_bandwidth)}
  l2_cache_size: {self.l2_bytes}
  clock_rate_ghz: {self.clock_ghz}
  device_memory_size: {self.memory_bytes}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  cuda_compute_capability {{ major: {major} minor: {minor} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 12 minor: 9 }}
device_description_str: "{self.name}"
"""


GPUS = {
    "h100": Gpu(
        name="NVIDIA H100 80GB HBM3",
        memory_bytes=84_942_979_072,
        compute_capability=(9, 0),
        multiprocessors=132,
        memory_bandwidth=3.35232e12,
        l2_bytes=52_428_800,
        clock_ghz=1.98,
        shared_bytes_per_multiprocessor=233_472,
        shared_bytes_per_block=232_448,
        threads_per_multiprocessor=2048,
    ),
}


def gpu(name: str) -> Gpu:
    """The kind called `name`.

    Raises:
        ConfigError: no such kind; names the nearest ones.
    """
    if name not in GPUS:
        raise ConfigError(f"gpu {name!r} is unknown.{nearest(name, GPUS)}")
    return GPUS[name]
