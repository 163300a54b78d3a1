"""Imported models against what transformers computes for them: logits, loss and gradients.

`tests/parity` has the folders and the figures, and the script that made them.
"""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import mesh_of
from flax import nnx
from safetensors.numpy import load_file

from tpjax.config import DataConfig, MemoryConfig, MeshConfig, TrainConfig
from tpjax.data import place
from tpjax.hf.load import Weights
from tpjax.hf.model import read_model
from tpjax.hf.save import save
from tpjax.resolve import resolve
from tpjax.state import Batch, graph, leaf_name
from tpjax.step import loss_and_gradients

GOLDENS = Path(__file__).parent / "parity" / "goldens"
CASES = sorted(folder.name for folder in GOLDENS.iterdir())
SHARDED_DIFFERENTLY = ("llama-bias", "llama-mqa", "llama-smollm2", "qwen3", "gpt2-untied")
OTHER_FORM = sorted(folder.parent.name for folder in GOLDENS.glob("*/config-v4.json"))


def config_of(folder: Path, mesh: str) -> TrainConfig:
    sizes = MeshConfig.parse(mesh)
    run = TrainConfig(
        model=read_model(str(folder)),
        mesh=sizes,
        memory=MemoryConfig(remat="none"),
        data=DataConfig(batch_size=2, seq_len=24),
    )
    return resolve(run, num_devices=sizes.num_devices, platform="cpu")


def golden(name: str) -> dict[str, np.ndarray]:
    return load_file(GOLDENS / name / "golden.safetensors")


def computed(name: str, tensor: int, tmp_path: Path) -> dict[str, np.ndarray]:
    """What tpjax makes of a case on a mesh, named as the golden file has it."""
    config, tokens = config_of(GOLDENS / name, f"tensor={tensor}"), golden(name)["tokens"]
    mesh = mesh_of(config)
    params = Weights(config, mesh).params()
    valid = np.broadcast_to(np.arange(24) < 23, tokens.shape)

    def all_of(params: dict, batch: Batch):
        x_BTD = nnx.merge(graph(config), params)(batch.tokens_BT)
        return x_BTD, *loss_and_gradients(config, params, batch)

    with jax.set_mesh(mesh):
        batch = place((tokens, np.roll(tokens, -1, 1), valid), mesh)
        x_BTD, loss, gradients = jax.jit(all_of)(params, batch)
    head = np.asarray(params.get("head", params["embedding"]))[: config.model.vocab_size]
    named = ((leaf_name(keys), value) for keys, value in jax.tree.leaves_with_path(gradients))
    save(config.model, mesh, named, tmp_path / "gradients", "fp32")
    found = load_file(tmp_path / "gradients" / "model.safetensors")
    return {
        "tokens": tokens,
        "logits": np.asarray(x_BTD) @ head.T,
        "loss": np.asarray(loss),
        **{f"grad.{tensor}": value for tensor, value in found.items()},
    }


def tensor_sizes(name: str) -> list[int]:
    heads = read_model(str(GOLDENS / name)).num_heads
    return [size for size in (1, 2, 3, 4) if heads % size == 0]


# Every case on the largest tensor axis, those that are sharded differently on all.
@pytest.mark.parametrize(
    ("name", "tensor"),
    [(name, tensor_sizes(name)[-1]) for name in CASES]
    + [(name, tensor) for name in SHARDED_DIFFERENTLY for tensor in tensor_sizes(name)[:-1]],
)
def test_logits_loss_and_gradients_are_those_of_transformers(name, tensor, tmp_path):
    wanted, found = golden(name), computed(name, tensor, tmp_path)
    assert found.keys() == wanted.keys()
    assert np.abs(wanted["logits"]).max() > 1
    np.testing.assert_allclose(found["logits"], wanted["logits"], atol=1e-4, rtol=0)
    for what, of in wanted.items():
        np.testing.assert_allclose(found[what], of, atol=1e-4 * np.abs(of).max(), err_msg=what)


@pytest.mark.parametrize("name", OTHER_FORM)
def test_both_forms_of_a_configuration_say_the_same(name, tmp_path):
    shutil.copy(GOLDENS / name / "config-v4.json", tmp_path / "config.json")
    other = read_model(str(tmp_path))
    model = read_model(str(GOLDENS / name))
    assert dataclasses.replace(other, name=name, folder=model.folder) == model
