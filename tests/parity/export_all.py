"""Imports every case of the goldens onto two devices and exports it again; of some also adapters,
by themselves and merged.

    .venv/bin/python tests/parity/export_all.py FOLDER

Run by tpjax's own environment; `check.py` then loads each folder with transformers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh

from tpjax import lora
from tpjax.config import DataConfig, LoraConfig, MeshConfig, TrainConfig
from tpjax.hf.load import Weights
from tpjax.hf.model import read_model
from tpjax.hf.save import save
from tpjax.mesh import make_mesh, start_devices
from tpjax.resolve import resolve
from tpjax.state import abstract_state, leaf_name

GOLDENS = Path(__file__).parent / "goldens"
ADAPTED = ("llama-bias", "mistral-head-dim", "qwen3")


def main(folder: Path) -> None:
    start_devices(3)
    for case in sorted(GOLDENS.iterdir()):
        export(case, folder / case.name)
    for name in ADAPTED:
        export_adapted(GOLDENS / name, folder)


def imported(case: Path, adapters: LoraConfig) -> tuple[TrainConfig, Mesh, Weights]:
    model = read_model(str(case))
    mesh = MeshConfig(tensor=3 if model.num_heads == 9 else 2)
    data = DataConfig(batch_size=2, seq_len=6)
    run = TrainConfig(model=model, mesh=mesh, data=data, lora=adapters)
    config = resolve(run, num_devices=mesh.tensor, platform="cpu")
    devices = make_mesh(mesh, model, jax.devices()[: mesh.tensor])
    return config, devices, Weights(config, devices)


def export(case: Path, folder: Path) -> None:
    config, mesh, weights = imported(case, LoraConfig())
    save(config.model, mesh, weights.units(), folder, "fp32", max_file_bytes=40_000)


def export_adapted(case: Path, folder: Path) -> None:
    """Random adapters of a case, as PEFT reads them, and the case with them in its weights."""
    config, mesh, weights = imported(case, LoraConfig(lora_rank=3, lora_alpha=5.0))
    rng, adapters = np.random.default_rng(0), {}
    for keys, like in jax.tree.leaves_with_path(abstract_state(config, mesh).params):
        value = rng.normal(0, 0.2, like.shape).astype(np.float32)
        adapters[leaf_name(keys)] = jax.device_put(value, like.sharding)
    lora.save_adapters(config.model, adapters, folder / f"{case.name}.adapters")
    merged = lora.merged(config.model, mesh, adapters, weights.units())
    save(config.model, mesh, merged, folder / f"{case.name}.merged", "fp32")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
