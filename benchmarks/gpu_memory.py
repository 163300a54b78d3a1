"""Peak memory and traffic of Llama-3.2-1B's training step on four H100s, compiled.

    python -m benchmarks.gpu_memory

8 sequences of 2048 tokens, bf16 compute, state updated in place. No GPU is
needed: XLA's compiler for them runs here. Peak is of XLA's pool, per device;
wire is what one device sends per step.
"""

from __future__ import annotations

import dataclasses
import itertools

from rich.console import Console
from rich.table import Table

from tpjax.config import DataConfig, MemoryConfig, MeshConfig
from tpjax.memory.compiled import compile_for
from tpjax.mesh import start_devices
from tpjax.presets import preset_run

MESHES = ("tensor=4", "fsdp=4", "fsdp=2,tensor=2")
STATES = {
    "float32": MemoryConfig(),
    "bf16": MemoryConfig(params="bf16", moments="bf16"),
}
REMAT = ("none", "dots", "attention", "full")


def main() -> None:
    start_devices(1)
    table = Table("state", "mesh", "remat", "peak GiB", "wire GiB", title="llama3.2-1b, 4 × H100")
    for (state, memory), mesh, remat in itertools.product(STATES.items(), MESHES, REMAT):
        config = dataclasses.replace(
            preset_run("llama3.2-1b"),
            mesh=MeshConfig.parse(mesh),
            memory=dataclasses.replace(memory, remat=remat),
            data=DataConfig(batch_size=8, seq_len=2048),
        )
        step = compile_for(config, gpu="h100")
        wire_bytes = sum(c.wire_bytes or 0 for c in step.collectives)
        peak, wire = (f"{size / 1024**3:.2f}" for size in (step.peak_bytes, wire_bytes))
        table.add_row(state, mesh, remat, peak, wire)
    Console().print(table)


if __name__ == "__main__":
    main()
