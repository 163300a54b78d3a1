"""Peak memory and traffic of Llama-3.2-1B's training step on four H100s, compiled.

    python -m benchmarks.gpu_memory          every mesh and policy of the ordinary step
    python -m benchmarks.gpu_memory lean     the memory techniques, one after the other

8 sequences of 2048 tokens, bf16 compute, state updated in place. No GPU is
needed: XLA's compiler for them runs here. Peak is of XLA's pool, per device; host is
pinned memory of the host, per device; wire is what one device sends per step; floor is the
state and what the layers keep, without which there is no step.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from tpjax.config import DataConfig, MemoryConfig, MeshConfig, TrainConfig
from tpjax.flops import model_flops, step_flops
from tpjax.memory.compiled import compile_for
from tpjax.memory.policies import kept_bytes
from tpjax.mesh import start_devices
from tpjax.presets import preset_run
from tpjax.resolve import resolve

MESHES = ("tensor=4", "fsdp=4", "fsdp=2,tensor=2")
STATES = {
    "float32": MemoryConfig(),
    "bf16": MemoryConfig(params="bf16", moments="bf16"),
}
REMAT = ("none", "dots", "attention", "full")

_BF16: dict[str, Any] = {"params": "bf16", "moments": "int8", "remat": "full"}
_LAYERWISE = _BF16 | {"update": "layerwise"}
_INT8 = _LAYERWISE | {"params": "int8"}
LEAN = {
    "bf16 parameters and moments, remat full": _BF16 | {"moments": "bf16"},
    "int8 moments": _BF16,
    "layerwise": _LAYERWISE,
    "layerwise, residuals offloaded": _LAYERWISE | {"offload": "residuals"},
    "layerwise, moments offloaded": _LAYERWISE | {"offload": "moments"},
    "layerwise, both offloaded": _LAYERWISE | {"offload": "residuals,moments"},
    "layerwise, int8 parameters": _INT8,
    "layerwise, int8 parameters, nested": _INT8 | {"remat": "nested"},
    "layerwise, int8 parameters, nested, factored": _INT8
    | {"remat": "nested", "moments": "factored"},
    "the last, both offloaded": _INT8
    | {"remat": "nested", "moments": "factored", "offload": "residuals,moments"},
}


def main() -> None:
    start_devices(1)
    Console().print(lean() if sys.argv[1:] == ["lean"] else meshes())


def meshes() -> Table:
    """Every mesh, state and remat policy of the ordinary step."""
    table = Table("state", "mesh", "remat", "peak GiB", "wire GiB", title="llama3.2-1b, 4 × H100")
    for (state, memory), mesh, remat in itertools.product(STATES.items(), MESHES, REMAT):
        config = _run(mesh, dataclasses.replace(memory, remat=remat))
        table.add_row(state, mesh, remat, *_figures(config)[::2])
    return table


def lean() -> Table:
    """The memory techniques on tensor=4."""
    columns = ("techniques", "peak GiB", "host GiB", "wire GiB", "floor GiB", "operations")
    table = Table(*columns, title="llama3.2-1b, tensor=4, H100")
    for name, changes in LEAN.items():
        table.add_row(name, *_figures(_run("tensor=4", MemoryConfig(**changes))))
    return table


def _run(mesh: str, memory: MemoryConfig) -> TrainConfig:
    return dataclasses.replace(
        preset_run("llama3.2-1b"),
        mesh=MeshConfig.parse(mesh),
        memory=memory,
        data=DataConfig(batch_size=8, seq_len=2048),
    )


def _figures(config: TrainConfig) -> tuple[str, ...]:
    """Peak, host, wire and floor in GiB; operations, times the model's own."""
    step = compile_for(config, gpu="h100")
    sizes = step.executable.memory_analysis()
    assert sizes is not None
    config = resolve(config, num_devices=4, platform="gpu")
    on_device = 0 if config.memory.offloads_residuals else kept_bytes(config)
    wire_bytes = sum(c.wire_bytes or 0 for c in step.collectives)
    floor_bytes = sizes.argument_size_in_bytes + on_device
    found = (step.peak_bytes, step.host_bytes, wire_bytes, floor_bytes)
    operations = f"{step_flops(config) / model_flops(config):.2f} ×"
    return (*(f"{size / 1024**3:.2f}" for size in found), operations)


if __name__ == "__main__":
    main()
