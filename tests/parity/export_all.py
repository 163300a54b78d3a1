"""Imports every case of the goldens onto two devices and exports it again.

    .venv/bin/python tests/parity/export_all.py FOLDER

Run by tpjax's own environment; `check.py` then loads each folder with transformers.
"""

from __future__ import annotations

import sys
from pathlib import Path

import jax

from tpjax.config import DataConfig, MeshConfig, TrainConfig
from tpjax.hf.load import Weights
from tpjax.hf.model import read_model
from tpjax.hf.save import save
from tpjax.mesh import make_mesh, start_devices
from tpjax.resolve import resolve
from tpjax.state import leaf_name

GOLDENS = Path(__file__).parent / "goldens"


def main(folder: Path) -> None:
    start_devices(3)
    for case in sorted(GOLDENS.iterdir()):
        export(case, folder / case.name)


def export(case: Path, folder: Path) -> None:
    model = read_model(str(case))
    mesh = MeshConfig(tensor=3 if model.num_heads == 9 else 2)
    data = DataConfig(batch_size=2, seq_len=6)
    run = TrainConfig(model=model, mesh=mesh, data=data)
    config = resolve(run, num_devices=mesh.tensor, platform="cpu")
    devices = make_mesh(mesh, model, jax.devices()[: mesh.tensor])
    params = Weights(config, devices).params()
    named = ((leaf_name(keys), value) for keys, value in jax.tree.leaves_with_path(params))
    save(model, devices, named, folder, "fp32", max_file_bytes=40_000)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
