"""The compiler for GPUs that are not there: found, placed in nodes, or missed in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from conftest import TINY
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tpjax.config import ConfigError, DataConfig, MeshConfig, TrainConfig
from tpjax.memory import compiled
from tpjax.memory.compiled import absent_devices, absent_mesh, compile_for, compile_lowered

ROOT = Path(__file__).parent.parent


def test_devices_of_a_node_are_neighbours():
    devices = absent_devices("h100", 8, nodes=2)
    assert [device.process_index for device in devices] == [0] * 4 + [1] * 4
    assert {device.device_kind for device in devices} == {"NVIDIA H100 80GB HBM3"}
    assert absent_mesh("a100-80g", {"data": 2, "tensor": 3}).shape == {"data": 2, "tensor": 3}


@pytest.mark.parametrize("nodes", [0, 3])
def test_nodes_have_to_share_the_devices(nodes):
    with pytest.raises(ConfigError, match=f"nodes={nodes} does not divide the 4 devices"):
        absent_devices("h100", 4, nodes)


def test_without_the_compiler_the_way_to_get_it_is_said(monkeypatch):
    def nothing(*_, **__):
        raise NotImplementedError("topology not implemented for cuda")

    def no_plugin(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(compiled.topologies, "get_topology_desc", nothing)
    monkeypatch.setattr(compiled.importlib, "import_module", no_plugin)
    with pytest.raises(ConfigError, match=r"pip install 'tpjax\[plan\]'") as said:
        absent_devices("h100", 4)
    assert "\n" not in str(said.value)


def test_jax_may_have_started_before():
    """In a notebook it has; without a driver it then has passed the plugin over."""
    code = (
        "import jax, jax.numpy as jnp\n"
        "jnp.ones(3).block_until_ready()\n"
        "import tpjax\n"
        "x = jax.ShapeDtypeStruct((64, 64), jnp.float32)\n"
        "print(tpjax.memory.report(jax.jit(jnp.tanh), x, gpu='h100').peak_bytes)\n"
        "print(float(jnp.ones(3).sum()))\n"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(2 * 64 * 64 * 4), "3.0"]


def test_a_run_without_a_mesh_is_planned_for_one_card():
    data = DataConfig(batch_size=8, seq_len=32)
    step = compile_for(TrainConfig(model=TINY, data=data), "l4")
    assert step.mesh is not None
    assert step.mesh.size == 1
    same = compile_for(TrainConfig(model=TINY, data=data, mesh=MeshConfig(tensor=1)), "l4")
    assert step.peak_bytes == same.peak_bytes


def test_an_axis_of_no_devices_is_refused():
    with pytest.raises(ConfigError, match="must be greater than 0"):
        absent_mesh("h100", {"data": 0})


def test_a_program_that_donates_holds_what_it_gives_once():
    mesh = absent_mesh("h100", {"data": 2})
    x = jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    kept = compile_lowered(jax.jit(jnp.tanh).lower(x), mesh)
    given = compile_lowered(jax.jit(jnp.tanh, donate_argnums=0).lower(x), mesh)
    local = 256 * 512 * 4
    assert (kept.peak_bytes, given.peak_bytes) == (2 * local, local)
    assert kept.host_bytes == 0
