"""tpjax: tensor-parallel transformer training in JAX, built around memory."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpjax import memory
    from tpjax.config import (
        ConfigError,
        DataConfig,
        MemoryConfig,
        MeshConfig,
        ModelConfig,
        OptimConfig,
        PoolConfig,
        TrainConfig,
    )
    from tpjax.loop import train
    from tpjax.mesh import start_devices
    from tpjax.presets import preset, preset_run

_HOMES = {
    "ConfigError": "config",
    "DataConfig": "config",
    "MemoryConfig": "config",
    "MeshConfig": "config",
    "ModelConfig": "config",
    "OptimConfig": "config",
    "PoolConfig": "config",
    "TrainConfig": "config",
    "preset": "presets",
    "preset_run": "presets",
    "start_devices": "mesh",
    "train": "loop",
}

__all__ = [
    "ConfigError",
    "DataConfig",
    "MemoryConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimConfig",
    "PoolConfig",
    "TrainConfig",
    "memory",
    "preset",
    "preset_run",
    "start_devices",
    "train",
]


def __getattr__(name: str):
    """Imports what is asked for, so that `import tpjax` starts neither JAX nor the screen."""
    if name == "memory":
        return importlib.import_module("tpjax.memory")
    if name not in _HOMES:
        raise AttributeError(f"module 'tpjax' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tpjax.{_HOMES[name]}"), name)
