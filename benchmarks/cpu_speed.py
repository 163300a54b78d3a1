"""Milliseconds per training step on this machine's CPU, one device, float32.

    python -m benchmarks.cpu_speed

Prints our side of two set-ups in which nanoGPT can be timed too: the model of
`nanogpt-shakespeare` (4 layers, 4 heads, D 128, T 64, batch 12) and a wider one
(6 layers, 12 heads, D 768, T 256, batch 4, V 32,000). nanoGPT's side, on the
same threads: its `GPT` with `dropout=0.0` on random tokens, without
torch.compile; forward, backward, `clip_grad_norm_`, `configure_optimizers`'
AdamW step, `zero_grad(set_to_none=True)`, and the loss read back each step;
the median of the steps after the first five. Machines drift: run the two in
turn, several times, and compare the ratios of the pairs, never one absolute time.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import time

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from tpjax.config import DataConfig, MeshConfig, TrainConfig
from tpjax.data import place
from tpjax.mesh import make_mesh, start_devices
from tpjax.presets import preset_run
from tpjax.resolve import resolve
from tpjax.state import create_state
from tpjax.step import lower_train_step

WARM_UP_STEPS = 5


def setups(devices: int) -> dict[str, TrainConfig]:
    """Name → run, with the default `--remat dots`."""
    small = dataclasses.replace(preset_run("nanogpt-shakespeare"), mesh=MeshConfig(tensor=devices))
    wide = dataclasses.replace(
        small.model,
        name="wide",
        vocab_size=32_000,
        num_layers=6,
        embed_dim=768,
        num_heads=12,
        num_kv_heads=12,
        head_dim=64,
        mlp_dim=3072,
        max_seq_len=256,
    )
    data = DataConfig(batch_size=4, seq_len=256)
    return {"small": small, "wide": dataclasses.replace(small, model=wide, data=data)}


def step_ms(config: TrainConfig, steps: int) -> float:
    """Median milliseconds of a step, its loss read back each time."""
    assert config.mesh is not None
    devices = start_devices(config.mesh.num_devices)
    config = resolve(config, num_devices=len(devices), platform=devices[0].platform)
    assert config.mesh is not None
    mesh = make_mesh(config.mesh, config.model, devices)
    state, step = create_state(config, mesh), lower_train_step(config, mesh).compile()
    shape = (config.data.batch_size, config.data.seq_len)
    rng, times = np.random.default_rng(0), []
    for _ in range(WARM_UP_STEPS + steps):
        tokens = rng.integers(0, config.model.vocab_size, (2, *shape), np.int32)
        start = time.perf_counter()
        batch = place((tokens[0], tokens[1], np.ones(shape, bool)), mesh)
        state, metrics = step(state, batch)
        float(metrics["loss"])
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times[WARM_UP_STEPS:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setup", choices=["small", "wide", "both"], default="both")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--devices", type=int, default=1)
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    table = Table("set-up", "devices", "ms per step (median)")
    for name, config in setups(args.devices).items():
        if args.setup in (name, "both"):
            table.add_row(name, str(args.devices), f"{step_ms(config, args.steps):.1f}")
    Console().print(table)


if __name__ == "__main__":
    main()
