"""Named meshes of devices: which there are, and how they are arranged.

The user's axes are `data`, `fsdp` and `tensor`. Where a model has fewer
key/value heads than `tensor` has devices, the mesh splits `tensor` in two:
key/value heads are sharded over `tensor` and each is copied over `kv_copy`,
while everything else is sharded over both (`TENSOR`). Otherwise `kv_copy` is 1.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh

from tpjax.config import ConfigError, MeshConfig, ModelConfig, PoolConfig
from tpjax.pool import runs_on_cpu, set_pool

BATCH = ("data", "fsdp")
TENSOR = ("tensor", "kv_copy")


def make_mesh(config: MeshConfig, model: ModelConfig, devices: Sequence) -> Mesh:
    """A mesh with explicit axes over `devices` (real, simulated or compile-only).

    Neighbours in `devices` become neighbours on `tensor`, which talks the most.
    """
    if len(devices) != config.num_devices:
        raise ConfigError(f"mesh {config} needs {config.num_devices} devices, got {len(devices)}.")
    grid = np.asarray(devices, dtype=object).reshape(_shape(config, model))
    return Mesh(grid, BATCH + TENSOR, axis_types=(AxisType.Explicit,) * 4)


def abstract_mesh(config: MeshConfig, model: ModelConfig) -> AbstractMesh:
    """As `make_mesh`, of no devices: to trace under."""
    return AbstractMesh(_shape(config, model), BATCH + TENSOR, (AxisType.Explicit,) * 4)


def _shape(config: MeshConfig, model: ModelConfig) -> tuple[int, int, int, int]:
    kv_copy = max(1, config.tensor // model.num_kv_heads)
    return config.data, config.fsdp, config.tensor // kv_copy, kv_copy


def gpu_driver_present() -> bool:
    """Whether the CUDA driver finds a GPU. Asks the driver, not JAX."""
    return _driver() is not None


def _driver() -> ctypes.CDLL | None:
    """The CUDA driver, if it finds a GPU."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count = ctypes.c_int(0)
    ready = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return driver if ready and count.value > 0 else None


def gpu_memory_bytes(device) -> int | None:
    """All the memory of a GPU of this process as its driver says; None where it does not."""
    driver, handle, size = _driver(), ctypes.c_int(0), ctypes.c_size_t(0)
    if driver is None or driver.cuDeviceGet(ctypes.byref(handle), device.local_hardware_id) != 0:
        return None
    return size.value if driver.cuDeviceTotalMem_v2(ctypes.byref(size), handle) == 0 else None


def stay_off_missing_gpus() -> None:
    """Without a driver, has JAX start on the CPU: its CUDA plugin would print a traceback,
    and not give its compiler either."""
    if not gpu_driver_present() and "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")


def start_devices(num_simulated: int, pool: PoolConfig | None = None) -> list:
    """The devices to run on: all GPUs, or `num_simulated` simulated CPU devices.

    Call it before JAX is used: neither the number of simulated devices nor the GPUs'
    pool can change afterwards (if enough devices are there already, the first are
    taken). What JAX compiles is kept on disk from here on, so that the next run
    starts fast.

    Args:
        pool: how XLA takes memory from GPUs; simulated devices have no such pool.

    Raises:
        ConfigError: JAX has started with fewer CPU devices, on other accelerators or with
            another pool, or the environment contradicts the pool.
    """
    stay_off_missing_gpus()
    if jax.config.values.get("jax_compilation_cache_dir") is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
        jax.config.update("jax_compilation_cache_dir", str(cache / "tpjax"))
    with contextlib.suppress(RuntimeError):  # JAX has started: checked below
        jax.config.update("jax_num_cpu_devices", num_simulated)
    if pool is not None and not runs_on_cpu():
        set_pool(pool)
    devices = jax.devices()
    if devices[0].platform not in ("cpu", "gpu"):
        raise ConfigError(f"tpjax trains on GPUs and CPUs, not on {devices[0].platform}.")
    if devices[0].platform != "cpu" or jax.process_count() > 1:
        return devices
    if len(devices) < num_simulated:
        raise ConfigError(
            f"JAX has already started with {len(devices)} CPU device(s) where {num_simulated} are "
            "asked for; call tpjax.start_devices() before any other use of JAX (in a notebook: "
            "restart the kernel), or set devices to what there is."
        )
    return devices[:num_simulated]


def is_absent(device) -> bool:
    """Whether a device can only be compiled for."""
    return type(device.client).__name__.startswith("CompileOnly")
