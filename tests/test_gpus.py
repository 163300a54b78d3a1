"""The table of GPU kinds: figures that bear each other out, and XLA targets every one."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tpjax.config import ConfigError
from tpjax.gpus import GPUS, Gpu, gpu, outside_pool

GIB, MIB = 2**30, 2**20

# What is on the box, and the bf16 operations of one multiprocessor per clock.
NOMINAL = {
    "a100-40g": (40, 2048),
    "a100-80g": (80, 2048),
    "h100": (80, 4096),
    "h100-pcie": (80, 4096),
    "h200": (141, 4096),
    "b200": (180, 8192),
    "l4": (24, 1024),
    "l40s": (48, 1024),
    "rtx3090": (24, 512),
    "rtx4060": (8, 512),
    "rtx4090": (24, 512),
    "rtx5090": (32, 512),
    "rtxa6000": (48, 1024),
    "rtxpro6000": (96, 1024),
}
each_kind = pytest.mark.parametrize("name", GPUS)


def compile_square(kind: Gpu) -> jax.stages.Compiled:
    topology = topologies.get_topology_desc(
        kind.name, "cuda", topology="1x1x1", target_config=kind.target_description()
    )
    mesh = Mesh(np.array(topology.devices), ("data",))
    (device,) = topology.devices
    assert device.device_kind == kind.name
    assert device.compute_capability == ".".join(map(str, kind.compute_capability))
    assert device.core_count == kind.multiprocessors
    x = jax.ShapeDtypeStruct(
        (256, 256), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec())
    )
    options = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}
    return jax.jit(lambda x: jnp.tanh(x @ x)).lower(x).compile(compiler_options=options)


@each_kind
def test_sizes_and_bandwidths_are_plausible(name):
    kind = gpu(name)
    assert 0.9 < kind.memory_bytes / (NOMINAL[name][0] * GIB) < 1
    assert 1e11 < kind.memory_bandwidth < 2e13
    assert 1.2 < kind.clock_ghz < 3
    assert 4 * MIB <= kind.l2_bytes < 256 * MIB
    assert kind.shared_bytes_per_block == kind.shared_bytes_per_multiprocessor - 1024
    assert kind.threads_per_multiprocessor in (1536, 2048)
    # Nothing between GPUs is faster than their own memory, nor the network than the node.
    assert 1e10 < (kind.network_bandwidth or kind.link_bandwidth) <= kind.link_bandwidth
    assert kind.link_bandwidth < kind.memory_bandwidth / 4
    assert (kind.link_bandwidth > 1e11) == (kind.link == "NVLink")
    assert kind.name.startswith("NVIDIA ")
    assert kind.sources.count(";") >= 2


@each_kind
def test_peak_rates_follow_from_clock_and_multiprocessors(name):
    """Within 10 %: boards are published at a boost clock a little off the driver's greatest."""
    kind, (_, operations) = gpu(name), NOMINAL[name]
    clock = kind.clock_ghz * 1e9 * kind.multiprocessors
    assert set(kind.rates) == {"fp32", "tf32", "bf16", "fp16", "fp8", "int8"}
    bf16 = kind.rates["bf16"]
    assert kind.rates["fp32"] == pytest.approx(
        clock * 2 * kind.fp32_units_per_multiprocessor, rel=0.1
    )
    assert bf16 == pytest.approx(clock * operations, rel=0.1)
    assert bf16 is not None
    assert kind.rates["fp16"] == bf16
    assert kind.rates["tf32"] == pytest.approx(bf16 / 2, rel=0.02)
    # Ampere has no fp8; GeForce halves what adds up in float32, so not int8.
    has_fp8 = kind.compute_capability >= (8, 9)
    assert kind.rates["fp8"] == (pytest.approx(bf16 * 2, rel=0.02) if has_fp8 else None)
    int8 = 4 if "GeForce" in kind.name else 2
    assert kind.rates["int8"] == pytest.approx(bf16 * int8, rel=0.02)


def test_names_are_the_drivers_and_unique():
    assert len({kind.name for kind in GPUS.values()}) == len(GPUS)
    assert len(set(GPUS.values())) == len(GPUS)  # hashable too


def test_an_unknown_kind_names_the_nearest():
    with pytest.raises(ConfigError, match=r"gpu 'rtx-4090' is unknown\. Did you mean rtx4090"):
        gpu("rtx-4090")
    with pytest.raises(ConfigError, match=r"Known: a100-40g, "):
        gpu("tpu")


@each_kind
def test_xla_targets_every_kind(name):
    sizes = compile_square(gpu(name)).memory_analysis()
    assert sizes is not None
    square = 256 * 256 * 2
    assert sizes.argument_size_in_bytes == sizes.output_size_in_bytes == square
    assert 2 * square <= sizes.peak_memory_in_bytes < 64 * MIB


@pytest.mark.parametrize("change", [{"compute_capability": (3, 0)}, {"name": 'a "quoted" name'}])
def test_a_target_that_cannot_be_is_noticed(change):
    with pytest.raises(Exception, match=r"ptxas|[Pp]arse|target_config"):
        compile_square(dataclasses.replace(gpu("h100"), **change))


def test_outside_the_pool():
    def total(name: str, **kwargs) -> float:
        return sum(part.bytes for part in outside_pool(gpu(name), **kwargs)) / MIB

    for name in GPUS:
        parts = outside_pool(gpu(name), num_devices=8, communicators=2)
        assert all(part.bytes > 0 for part in parts)
        assert all(part.source.startswith(("estimate: ", "assumption: ")) for part in parts)
        alone = outside_pool(gpu(name), num_devices=1)
        assert alone == parts[: len(alone)]
        assert not any("NCCL" in part.what for part in alone)
        assert 200 < total(name, num_devices=1) < 900
        assert total(name, num_devices=8) < 0.15 * gpu(name).memory_bytes / MIB
    # Contexts as measured: B200 612 MiB, RTX PRO 6000 555 MiB.
    for name, measured in {"b200": 612, "rtxpro6000": 555}.items():
        context = outside_pool(gpu(name), num_devices=1)[0]
        assert context.bytes / MIB == pytest.approx(measured, rel=0.1)
    # One communicator of four A100: 688 MB as measured.
    nccl = [part.bytes for part in outside_pool(gpu("a100-80g"), num_devices=4)][-1]
    assert nccl == pytest.approx(688e6, rel=0.2)
    two = total("h100", num_devices=8, communicators=2)
    one, none = total("h100", num_devices=8), total("h100", num_devices=1)
    assert two - one == pytest.approx(one - none)
