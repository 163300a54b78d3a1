"""Importing and exporting a model never hold more of it than its shards and a piece."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.weights import write_random
from tpjax.presets import preset

LIMIT_BYTES = 256 * 2**20
MODEL = dataclasses.replace(
    preset("llama3.1-8b"),
    vocab_size=32_000,
    num_layers=28,
    embed_dim=1024,
    num_heads=16,
    head_dim=64,
    mlp_dim=4096,
)


def test_a_model_several_times_the_limit_comes_in_and_goes_out_below_it():
    with tempfile.TemporaryDirectory() as parent:  # not kept: it is large
        folder = Path(parent) / "model"
        write_random(MODEL, folder)
        flags = ["--mesh", "tensor=4", "--params", "int8", "--folder", str(folder)]
        command = [sys.executable, "-m", "benchmarks.weights", *flags]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        written = sum(file.stat().st_size for file in (Path(parent) / "out").iterdir())
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["folder_bytes"] > 3.5 * LIMIT_BYTES
    assert found["params_bytes"] > 1.5 * LIMIT_BYTES
    assert found["import_beside_bytes"] < LIMIT_BYTES
    assert found["export_beside_bytes"] < LIMIT_BYTES
    assert written > 3.5 * LIMIT_BYTES
