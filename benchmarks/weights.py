"""What bringing a model folder's weights in and out costs: host memory beside them, and time.

    python -m benchmarks.weights --model llama3.1-8b --mesh tensor=8 --params int8

Random weights of the model's shape are written first, a file a layer, in bfloat16. Then, in a
process of its own on simulated devices, whose memory is the host's too, they are imported and
written to a folder again: anonymous resident memory, sampled each millisecond, less what was
there before and less the parameters themselves. The mapped files are not part of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, get_args

import jax
import numpy as np
from rich.console import Console
from rich.table import Table
from safetensors.numpy import save_file

from benchmarks.checkpoint import Peak
from tpjax.architecture import ModelConfig
from tpjax.config import MemoryConfig, MeshConfig
from tpjax.hf.families import write_config
from tpjax.hf.load import Weights
from tpjax.hf.model import read_model
from tpjax.hf.names import table
from tpjax.hf.save import save
from tpjax.memory.records import gib
from tpjax.mesh import make_mesh, start_devices
from tpjax.precision import DTYPES
from tpjax.presets import preset, preset_run
from tpjax.quant import is_quantised
from tpjax.resolve import resolve
from tpjax.sharding import bytes_per_device
from tpjax.state import abstract_state, leaf_name

Params = Literal["fp32", "bf16", "int8"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--mesh", default="tensor=3")
    parser.add_argument("--params", default="int8", choices=get_args(Params))
    parser.add_argument("--json", default="")
    parser.add_argument("--folder", type=Path, help="measures this one, as JSON")
    args = parser.parse_args()
    if args.folder:
        print(json.dumps(measure(args.folder, args.mesh, args.params)))
        return
    with tempfile.TemporaryDirectory(prefix="tpjax-weights-") as parent:
        folder = Path(parent) / "model"
        write_random(preset(args.model), folder)
        flags = ["--mesh", args.mesh, "--params", args.params, "--folder", str(folder)]
        command = [sys.executable, "-m", "benchmarks.weights", *flags]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    found = {"model": args.model, **json.loads(done.stdout.splitlines()[-1])}
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=2) + "\n")
    Console().print(shown(found))


def tensors_of(model: ModelConfig, layer: int | None) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each tensor of a layer, or of what belongs to none, of a Llama."""
    for path, stored in table("llama").items():
        optional = path.endswith(("_bias", "_gain")) or (path == "head" and model.tie_embeddings)
        if path.startswith("blocks.") == (layer is not None) and not optional:
            yield stored.name.format(layer), stored.shape(model)


def write_random(model: ModelConfig, folder: Path) -> None:
    """A folder with random weights of a Llama's shape, a file a layer."""
    folder.mkdir(parents=True)
    rng, where = np.random.default_rng(0), {}
    for layer in (None, *range(model.num_layers)):
        tensors = {
            name: rng.standard_normal(shape, np.float32).astype(DTYPES["bf16"])
            for name, shape in tensors_of(model, layer)
        }
        file = f"model-{layer}.safetensors"
        save_file(tensors, folder / file)
        where |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text(json.dumps(write_config(model)))


def measure(folder: Path, mesh_name: str, params: Params) -> dict:
    """Bytes of the folder, of the parameters and of the largest tensor; bytes beside and seconds
    of an import, and of writing a folder from the parameters."""
    sizes = MeshConfig.parse(mesh_name)
    devices = start_devices(sizes.num_devices)
    run = dataclasses.replace(preset_run("nano"), model=read_model(str(folder)), mesh=sizes)
    data = dataclasses.replace(run.data, batch_size=8 * sizes.num_devices)
    memory = MemoryConfig(params=params, sequence_parallel=False)
    run = dataclasses.replace(run, data=data, memory=memory)
    config = resolve(run, num_devices=len(devices), platform="cpu")
    mesh = make_mesh(sizes, config.model, devices)
    state = abstract_state(config, mesh)
    params_bytes = bytes_per_device(state.params) * sizes.num_devices
    weights = Weights(config, mesh)
    with Peak() as peak:
        start = time.perf_counter()
        arrays = jax.block_until_ready(weights.params())
        seconds = time.perf_counter() - start
    found = {
        "mesh": mesh_name,
        "params": params,
        "folder_bytes": sum(file.stat().st_size for file in folder.iterdir()),
        "params_bytes": params_bytes,
        "import_beside_bytes": peak.bytes - params_bytes,
        "import_s": seconds,
    }
    leaves = jax.tree.leaves_with_path(arrays, is_leaf=is_quantised)
    with Peak() as peak:
        start = time.perf_counter()
        named = ((leaf_name(keys), value) for keys, value in leaves)
        save(config.model, mesh, named, folder.with_name("out"), "bf16")
        seconds = time.perf_counter() - start
    return found | {"export_beside_bytes": peak.bytes, "export_s": seconds}


def shown(found: dict) -> Table:
    title = f"{found['model']}, {found['params']} on {found['mesh']} of simulated devices"
    table = Table(title=title, title_justify="left", show_header=False)
    for name, value in found.items():
        if name.endswith("_bytes"):
            table.add_row(name.removesuffix("_bytes").replace("_", " "), gib(value))
        elif name.endswith("_s"):
            table.add_row(name.removesuffix("_s") + " time", f"{value:.1f} s")
    return table


if __name__ == "__main__":
    main()
