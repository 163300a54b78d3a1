"""What the memory techniques do to the loss: the same model, text and steps with each.

    python -m benchmarks.convergence --corpus tinyshakespeare.txt --steps 1000

Trains nanoGPT's small Shakespeare set-up on one CPU device and prints, for each
technique, the loss per byte over the whole validation split, averaged over the
seeds, and its distance from float32. Blocks in int8 are of 128 elements, as large
models have them (and not of the 8 that this model's width would give).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import statistics
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tpjax import quant
from tpjax.config import DataConfig, MemoryConfig, MeshConfig, RecoveryConfig
from tpjax.loop import train
from tpjax.presets import preset_run

LAYERWISE = {"update": "layerwise", "remat": "full"}
TECHNIQUES = {
    "fp32": {},
    "bf16 parameters": {"params": "bf16"},
    "bf16 parameters, int8 moments": {"params": "bf16", "moments": "int8"},
    "int8 parameters and moments": {"params": "int8", "moments": "int8"},
    "int8 parameters, factored moments": {"params": "int8", "moments": "factored"},
    "fp16 compute": {"compute": "fp16"},
    "layerwise": LAYERWISE,
    "layerwise, bf16 parameters, int8 moments": LAYERWISE | {"params": "bf16", "moments": "int8"},
    "layerwise, int8 parameters, factored moments": LAYERWISE
    | {"params": "int8", "moments": "factored"},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--corpus", default="stdlib", help="a text file, or stdlib")
    parser.add_argument("--steps", type=int, default=1000, help="of each run (1000)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each technique (3)")
    parser.add_argument("--json", default="", help="file for the figures")
    flags = parser.parse_args()
    quant.MAX_SHARDS = 1
    losses: dict[str, list[float]] = {name: [] for name in TECHNIQUES}
    for seed in range(flags.seeds):
        for name, memory in TECHNIQUES.items():
            losses[name].append(validation_loss(flags.corpus, flags.steps, seed, memory))
            print(f"seed {seed}, {name}: {losses[name][-1]:.4f}", flush=True)
            if flags.json:
                found = {"corpus": Path(flags.corpus).name, "steps": flags.steps, "losses": losses}
                Path(flags.json).write_text(json.dumps(found, indent=1) + "\n")
    Console().print(table(losses))


def validation_loss(corpus: str, steps: int, seed: int, memory: dict) -> float:
    """Of one run, per byte."""
    run = preset_run("nanogpt-shakespeare")
    with tempfile.TemporaryDirectory() as out, contextlib.redirect_stdout(io.StringIO()):
        config = dataclasses.replace(
            run,
            mesh=MeshConfig(),
            devices=1,
            memory=MemoryConfig(**{"compute": "fp32", **memory}),
            data=DataConfig(corpus=(corpus,), batch_size=12, seq_len=64),
            steps=steps,
            eval_every=0,
            seed=seed,
            recovery=RecoveryConfig(checkpoint_every=0),
            out=out,
        )
        loss = train(config).eval_loss
    assert loss is not None
    return loss


def table(losses: dict[str, list[float]]) -> Table:
    """Mean loss, each seed's, and the distance of the mean from that of float32."""
    found = Table("technique", "loss", "by seed", "gap to fp32")
    for name, values in losses.items():
        mean = statistics.mean(values)
        gap = 100 * (mean / statistics.mean(losses["fp32"]) - 1)
        by_seed = ", ".join(f"{value:.4f}" for value in values)
        found.add_row(name, f"{mean:.4f}", by_seed, f"{gap:+.2f} %")
    return found


if __name__ == "__main__":
    main()
