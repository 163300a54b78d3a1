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

from tpjax.config import ConfigError, MeshConfig, ModelConfig

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
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return (
        driver.cuInit(0) == 0
        and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
        and count.value > 0
    )


def stay_off_missing_gpus() -> None:
    """Without a driver, has JAX start on the CPU: its CUDA plugin would print a traceback,
    and not give its compiler either."""
    if not gpu_driver_present() and "JAX_PLATFORMS" not in os.environ:
        jax.config.update("jax_platforms", "cpu")


def start_devices(num_simulated: int) -> list:
    """The devices to run on: all GPUs, or `num_simulated` simulated CPU devices.

    Call it before JAX is used: the number of simulated devices cannot change
    afterwards (if enough of them are there already, the first are taken). What
    JAX compiles is kept on disk from here on, so that the next run starts fast.

    Raises:
        ConfigError: JAX has started with fewer CPU devices, or on other accelerators.
    """
    stay_off_missing_gpus()
    if jax.config.values.get("jax_compilation_cache_dir") is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
        jax.config.update("jax_compilation_cache_dir", str(cache / "tpjax"))
    with contextlib.suppress(RuntimeError):  # JAX has started: checked below
        jax.config.update("jax_num_cpu_devices", num_simulated)
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
