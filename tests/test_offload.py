"""Moments that wait in the host's memory: the same steps, with that much less on the device.

(Saved residuals are with what is saved, in tests/test_remat.py.)
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import jax
import numpy as np
import pytest
from conftest import TINY_QWEN, mesh_of, random_batch, tiny_config, to_numpy
from test_needs import LLAMA, D, F, K, N, V, run

from tpjax.config import TrainConfig
from tpjax.memory.compiled import Compilation, compile_for
from tpjax.memory.lint import lint
from tpjax.memory.policies import kept_bytes
from tpjax.resolve import resolve
from tpjax.state import create_state
from tpjax.step import lower_train_step

LAYERWISE = {"update": "layerwise", "remat": "full"}
L = 12
DEEP = dataclasses.replace(LLAMA, num_layers=L)


@pytest.mark.parametrize(
    "settings",
    [
        {"offload": "moments", "moments": "fp32", "remat": "dots"},
        {"offload": "residuals,moments", "params": "bf16", "moments": "int8", **LAYERWISE},
    ],
    ids=["whole", "layerwise"],
)
def test_three_steps_are_the_same_bits(settings):
    found = []
    for offload in ("none", settings["offload"]):
        config = tiny_config(
            "fsdp=2,tensor=2", model=TINY_QWEN, **(settings | {"offload": offload})
        )
        mesh = mesh_of(config)
        state, step = create_state(config, mesh), lower_train_step(config, mesh).compile()
        for number in range(3):
            state, metrics = step(state, random_batch(config, mesh, seed=number))
        large = [leaf for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim > 1]
        kinds = {leaf.sharding.memory_kind for leaf in large}
        on_device = jax.devices()[0].default_memory().kind
        assert kinds == {"pinned_host" if "moments" in offload else on_device}
        found.append(to_numpy((state, metrics)))
    jax.tree.map(np.testing.assert_array_equal, *found)


def on_four_gpus(offload: str, **settings) -> TrainConfig:
    config = run("tensor=4", model=DEEP, **settings, offload=offload)
    return resolve(config, num_devices=4, platform="gpu")


@lru_cache
def compiled(config: TrainConfig) -> Compilation:
    return compile_for(config, gpu="h100")


def moments_bytes() -> int:
    """Of a device: two in bfloat16 for each parameter, a quarter of the matrices' and all of
    the layers' two norms'."""
    layer = 2 * D * D + 2 * D * K * (D // N) + 3 * D * F
    return 2 * 2 * (V * D // 4 + L * (layer // 4 + 2 * D))


SETTINGS = {"remat": "full", "params": "bf16", "moments": "bf16"}


def test_moments_leave_the_device_for_the_host():
    step = compiled(on_four_gpus("moments", **SETTINGS))
    assert step.host_bytes == moments_bytes()
    assert lint(step) == []


def test_what_leaves_layer_by_layer_is_not_on_the_device():
    """But for one layer's or one part of a table's, on their way there or back."""
    offloads = ("none", "residuals,moments")
    steps = [
        compiled(on_four_gpus(offload, update="layerwise", **SETTINGS)) for offload in offloads
    ]
    both = moments_bytes() + kept_bytes(on_four_gpus("residuals,moments", **SETTINGS))
    assert [step.host_bytes for step in steps] == [0, both]
    here, there = (step.peak_bytes for step in steps)
    assert here - there > 0.75 * both
    assert lint(steps[1]) == []
