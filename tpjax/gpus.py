"""The one table of GPU kinds: enough to compile for one that is not here, and to judge it.

Three kinds of figures, and each entry's `sources` say which came from where:
what the CUDA driver reports of a card (memory, caches, multiprocessors, clock),
what the maker publishes (rates and links: peaks, which no real program reaches),
and estimates, always called so. What memory lies outside XLA's pool is an
estimate throughout: see `outside_pool`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from tpjax.config import ConfigError, nearest


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One kind of GPU. Sizes in bytes, bandwidths in bytes per second.

    Attributes:
        name: what the driver calls it.
        memory_bytes: what the driver says there is, which is less than on the box.
        shared_bytes_per_block: the most a kernel can ask for.
        rates: peak FLOP/s without sparsity by type; "fp32" is that of the plain cores,
            the others are matrix units', adding up in float32 (in int32 for "int8").
            None where the card cannot.
        link: how GPUs of one node reach each other; NVLink that joins only pairs is left out.
        link_bandwidth: between GPUs of one node, per GPU and direction.
        network_bandwidth: between nodes, alike, in the maker's own system of eight, or None.
        sources: where the figures are from.
    """

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]
    multiprocessors: int
    memory_bandwidth: float
    l2_bytes: int
    clock_ghz: float
    shared_bytes_per_multiprocessor: int
    shared_bytes_per_block: int
    threads_per_multiprocessor: int
    fp32_units_per_multiprocessor: int
    rates: Mapping[str, float | None] = field(hash=False)
    link: Literal["NVLink", "PCIe"]
    link_bandwidth: float
    network_bandwidth: float | None = None
    sources: str

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
  fpus_per_core: {self.fp32_units_per_multiprocessor}
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


@dataclass(frozen=True, kw_only=True)
class Outside:
    """Memory of a GPU that XLA's pool cannot have. Always an estimate; `source` says whose."""

    what: str
    bytes: int
    source: str


def _rates(
    *, fp32: float, tf32: float, half: float, fp8: float | None, int8: float
) -> dict[str, float | None]:
    """From 10^12 FLOP/s; bf16 and fp16 are equally fast everywhere."""
    tera = {"fp32": fp32, "tf32": tf32, "bf16": half, "fp16": half, "fp8": fp8, "int8": int8}
    return {dtype: rate and rate * 1e12 for dtype, rate in tera.items()}


# What a multiprocessor holds goes by compute capability (CUDA programming guide,
# "Technical specifications per compute capability").
_small = partial(
    Gpu,
    shared_bytes_per_multiprocessor=102_400,
    shared_bytes_per_block=101_376,
    threads_per_multiprocessor=1536,
    fp32_units_per_multiprocessor=128,
    link="PCIe",
)
_sm_86 = partial(_small, compute_capability=(8, 6))
_sm_89 = partial(_small, compute_capability=(8, 9))
_sm_120 = partial(_small, compute_capability=(12, 0))
_sm_80 = partial(
    Gpu,
    compute_capability=(8, 0),
    shared_bytes_per_multiprocessor=167_936,
    shared_bytes_per_block=166_912,
    threads_per_multiprocessor=2048,
    fp32_units_per_multiprocessor=64,
)
_large = partial(
    Gpu,
    shared_bytes_per_multiprocessor=233_472,
    shared_bytes_per_block=232_448,
    threads_per_multiprocessor=2048,
    fp32_units_per_multiprocessor=128,
)
_sm_90 = partial(_large, compute_capability=(9, 0))
_sm_100 = partial(_large, compute_capability=(10, 0))

_XLA = "device: openxla/xla, xla/backends/gpu/target_config/specs/"
_QUERY = "device: deviceQuery of a real card under Linux, as published"
_PCIE = "link: nominal rate of its PCIe slot"
_HOST = f"{_PCIE}, which the driver leads through the host (no peer access)"
_A100_RATES = _rates(fp32=19.5, tf32=156, half=312, fp8=None, int8=624)
_H100_RATES = _rates(fp32=66.9, tf32=494.7, half=989.4, fp8=1978.9, int8=1978.9)

# fmt: off
GPUS = {
    "a100-40g": _sm_80(
        name="NVIDIA A100-SXM4-40GB",
        memory_bytes=42_298_834_944, memory_bandwidth=1.5552e12, l2_bytes=41_943_040,
        multiprocessors=108, clock_ghz=1.41, link="NVLink", link_bandwidth=300e9,
        rates=_A100_RATES, network_bandwidth=25e9,
        sources=f"{_XLA}a100_sxm_40; rates, link: A100 datasheet; network: DGX A100 datasheet",
    ),
    "a100-80g": _sm_80(
        name="NVIDIA A100-SXM4-80GB",
        memory_bytes=85_100_068_864, memory_bandwidth=2.03904e12, l2_bytes=41_943_040,
        multiprocessors=108, clock_ghz=1.41, link="NVLink", link_bandwidth=300e9,
        rates=_A100_RATES, network_bandwidth=25e9,
        sources=f"{_XLA}a100_sxm_80; rates, link: A100 datasheet; network: DGX A100 datasheet",
    ),
    "h100": _sm_90(
        name="NVIDIA H100 80GB HBM3",
        memory_bytes=84_942_979_072, memory_bandwidth=3.35232e12, l2_bytes=52_428_800,
        multiprocessors=132, clock_ghz=1.98, link="NVLink", link_bandwidth=450e9,
        rates=_H100_RATES, network_bandwidth=50e9,
        sources=f"{_XLA}h100_sxm; rates, link: H100 white paper; network: DGX H100 datasheet",
    ),
    "h100-pcie": _sm_90(
        name="NVIDIA H100 PCIe",
        memory_bytes=84_942_979_072, memory_bandwidth=2.03904e12, l2_bytes=52_428_800,
        multiprocessors=114, clock_ghz=1.755, link="PCIe", link_bandwidth=63e9,
        rates=_rates(fp32=51.2, tf32=378, half=756, fp8=1513, int8=1513),
        sources=f"{_XLA}h100_pcie; rates: H100 white paper; {_PCIE} 5.0 x16",
    ),
    "h200": _sm_90(
        name="NVIDIA H200",
        memory_bytes=150_109_945_856, memory_bandwidth=4.8e12, l2_bytes=62_914_560,
        multiprocessors=132, clock_ghz=1.98, link="NVLink", link_bandwidth=450e9,
        rates=_H100_RATES, network_bandwidth=50e9,
        sources=f"{_XLA}h200, but memory and L2 as PyTorch reports of a real card (143,156 MiB, "
        "60 MB); rates, link: H200 datasheet; network: DGX H200 datasheet",
    ),
    "b200": _sm_100(
        name="NVIDIA B200",
        memory_bytes=191_514_411_008, memory_bandwidth=7.67232e12, l2_bytes=132_644_864,
        multiprocessors=148, clock_ghz=1.965, link="NVLink", link_bandwidth=900e9,
        rates=_rates(fp32=75, tf32=1125, half=2250, fp8=4500, int8=4500), network_bandwidth=50e9,
        sources=f"{_XLA}b200; rates, link: HGX B200 datasheet; network: DGX B200 datasheet",
    ),
    "l4": _sm_89(
        name="NVIDIA L4",
        memory_bytes=23_612_293_120, memory_bandwidth=3e11, l2_bytes=50_331_648,
        multiprocessors=58, clock_ghz=2.04, link_bandwidth=31.5e9,
        rates=_rates(fp32=30.3, tf32=60, half=121, fp8=242.5, int8=242.5),
        sources=f"{_QUERY}; rates, bandwidth: L4 datasheet; {_PCIE} 4.0 x16",
    ),
    "l40s": _sm_89(
        name="NVIDIA L40S",
        memory_bytes=47_576_711_168, memory_bandwidth=8.64e11, l2_bytes=100_663_296,
        multiprocessors=142, clock_ghz=2.52, link_bandwidth=31.5e9,
        rates=_rates(fp32=91.6, tf32=183, half=362, fp8=733, int8=733),
        sources=f"{_QUERY}; rates, bandwidth: L40S datasheet; {_PCIE} 4.0 x16",
    ),
    "rtx3090": _sm_86(
        name="NVIDIA GeForce RTX 3090",
        memory_bytes=25_414_860_800, memory_bandwidth=9.36e11, l2_bytes=6_291_456,
        multiprocessors=82, clock_ghz=1.695, link_bandwidth=31.5e9,
        rates=_rates(fp32=35.6, tf32=35.6, half=71, fp8=None, int8=284),
        sources=f"{_QUERY}; rates, bandwidth: GA102 white paper; {_HOST} 4.0 x16",
    ),
    "rtx4060": _sm_89(
        name="NVIDIA GeForce RTX 4060",
        memory_bytes=8_166_309_888, memory_bandwidth=2.72e11, l2_bytes=25_165_824,
        multiprocessors=24, clock_ghz=2.46, link_bandwidth=15.75e9,
        rates=_rates(fp32=15.1, tf32=15.1, half=30.2, fp8=60.5, int8=121),
        sources="memory: estimate, the 8,188 MiB of nvidia-smi less 400 MiB that its like keep "
        "back; rates: estimate, the RTX 4090's per multiprocessor and clock; else: NVIDIA's "
        f"product page; {_HOST} 4.0 x8",
    ),
    "rtx4090": _sm_89(
        name="NVIDIA GeForce RTX 4090",
        memory_bytes=25_250_627_584, memory_bandwidth=1.008e12, l2_bytes=75_497_472,
        multiprocessors=128, clock_ghz=2.52, link_bandwidth=31.5e9,
        rates=_rates(fp32=82.6, tf32=82.6, half=165.2, fp8=330.3, int8=660.6),
        sources=f"{_QUERY}; rates, bandwidth: Ada white paper; {_HOST} 4.0 x16",
    ),
    "rtx5090": _sm_120(
        name="NVIDIA GeForce RTX 5090",
        memory_bytes=33_660_534_784, memory_bandwidth=1.792e12, l2_bytes=100_663_296,
        multiprocessors=170, clock_ghz=2.407, link_bandwidth=63e9,
        rates=_rates(fp32=104.8, tf32=104.8, half=209.5, fp8=419, int8=838),
        sources=f"{_QUERY}; rates, bandwidth: RTX Blackwell white paper; {_HOST} 5.0 x16",
    ),
    "rtxa6000": _sm_86(
        name="NVIDIA RTX A6000",
        memory_bytes=51_041_271_808, memory_bandwidth=7.68096e11, l2_bytes=6_291_456,
        multiprocessors=84, clock_ghz=1.8, link_bandwidth=31.5e9,
        rates=_rates(fp32=38.7, tf32=77.4, half=154.8, fp8=None, int8=309.7),
        sources=f"{_XLA}a6000; rates: GA102 white paper; {_PCIE} 4.0 x16",
    ),
    "rtxpro6000": _sm_120(
        name="NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
        memory_bytes=101_970_870_272, memory_bandwidth=1.792e12, l2_bytes=134_217_728,
        multiprocessors=188, clock_ghz=2.6, link_bandwidth=63e9,
        rates=_rates(fp32=126, tf32=251.9, half=503.8, fp8=1007.6, int8=1007.6),
        sources=f"{_XLA}rtx6000pro, but memory as CUDA reports of a real card (97,247 MiB); "
        f"rates: RTX PRO Blackwell white paper; {_PCIE} 5.0 x16",
    ),
}
# fmt: on


def gpu(name: str) -> Gpu:
    """The kind called `name`.

    Raises:
        ConfigError: no such kind; names the nearest ones.
    """
    name = name.lower()
    if name not in GPUS:
        raise ConfigError(f"gpu {name!r} is unknown.{nearest(name, GPUS)}")
    return GPUS[name]


def kind_of(device_kind: str) -> str | None:
    """The name of the kind that the driver calls so, or None where it is unknown."""
    words = device_kind.lower().split()
    return next((name for name, gpu in GPUS.items() if gpu.name.lower().split() == words), None)


def outside_pool(gpu: Gpu, *, num_devices: int, communicators: int = 1) -> list[Outside]:
    """Estimates, per GPU, of what a training run holds outside XLA's pool.

    The scratch space of matmuls and the program's own buffers are inside it.

    Args:
        gpu: the kind of GPU.
        num_devices: how many take part, over all nodes.
        communicators: different groups of devices that one GPU talks in; one for each
            mesh axis, or set of axes, that collectives run over.
    """
    mib = 2**20
    modern = gpu.compute_capability >= (9, 0)
    parts = [
        Outside(
            what="CUDA context",
            bytes=2150 * gpu.multiprocessors * gpu.threads_per_multiprocessor,
            source="estimate: 2,150 bytes per resident thread, after contexts measured on RTX "
            "4060 Ti, RTX PRO 6000 (llama.cpp #23604) and B200 (unsloth #8669)",
        ),
        Outside(
            what="cuBLAS handle",
            bytes=(32 if modern else 4) * mib,
            source="estimate: the default workspace by cuBLAS's documentation",
        ),
        Outside(
            what="code of the program and of cuBLAS, cuDNN",
            bytes=128 * mib,
            source="assumption: kernels are loaded when first used; never measured here",
        ),
    ]
    if num_devices == 1:
        return parts
    nvlink = gpu.link == "NVLink"
    blackwell = gpu.compute_capability >= (10, 0)
    channels = (32 if blackwell else 24) if nvlink else 4
    parts.append(
        Outside(
            what="NCCL buffers",
            bytes=communicators * channels * 2 * 12 * mib,
            source="estimate: channels (24 over NVLink, 32 on Blackwell, 4 over PCIe) × ring and "
            "tree × 12 MiB (buffers of three protocols by NCCL's source); 4 A100 were measured "
            "at 688 MB (NCCL #964)",
        )
    )
    if nvlink and modern and num_devices > 2:
        parts.append(
            Outside(
                what="NCCL buffers in the switch's reach (NVLS)",
                bytes=communicators * (24 if blackwell else 16) * 2 * min(num_devices, 8) * mib,
                source="estimate: channels × 2 × GPUs of a node × 1 MiB, by NCCL's source; "
                "NCCL_NVLS_ENABLE=0 does without",
            )
        )
    return parts
