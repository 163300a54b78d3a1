"""What each policy keeps and where: the same gradients, the bytes that were said."""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from itertools import pairwise

import jax
import numpy as np
import pytest
from conftest import (
    TINY,
    TINY_GPT2,
    TINY_QWEN,
    initial_state,
    largest_difference,
    mesh_of,
    random_batch,
    tiny_config,
    to_numpy,
)
from flax import nnx
from test_collectives import MODEL, compiled, run
from test_flops import all_policies

from tpjax import remat
from tpjax.config import ModelConfig, TrainConfig
from tpjax.memory.compiled import compile_lowered
from tpjax.memory.lint import lint
from tpjax.memory.needs import unneeded
from tpjax.memory.policies import kept_bytes, policies
from tpjax.resolve import resolve
from tpjax.sharding import bytes_per_device
from tpjax.state import abstract_batch, abstract_state, graph
from tpjax.step import loss_and_gradients, lower_train_step

DEEP = dataclasses.replace(TINY, num_layers=6)
DEEP_QWEN = dataclasses.replace(TINY_QWEN, num_layers=6)
DEEP_GPT2 = dataclasses.replace(TINY_GPT2, num_layers=6)


@pytest.mark.parametrize(
    ("num_layers", "size"),
    [(16, 4), (12, 3), (28, 4), (30, 5), (32, 4), (80, 8), (126, 9), (7, 1), (2, 1), (1, 1)],
)
def test_groups_by_hand(num_layers, size):
    assert remat.group_size(num_layers) == size


def test_an_unknown_name_is_an_error():
    with pytest.raises(ValueError, match="'q' is not in the table"):
        remat.name(np.zeros(3), "q")


@lru_cache
def loss_and_gradient(mesh: str, model: ModelConfig, **memory):
    config = tiny_config(mesh, model=model, **memory)
    grid = mesh_of(config)
    with jax.set_mesh(grid):
        step = jax.jit(lambda p, b: loss_and_gradients(config, p, b))
        found = step(initial_state(config, grid).params, random_batch(config, grid))
    return to_numpy(found)


@pytest.mark.parametrize("policy", all_policies())
@pytest.mark.parametrize(
    ("mesh", "model"),
    [("tensor=1", DEEP), ("fsdp=2,tensor=2", DEEP), ("tensor=1", DEEP_QWEN)],
    ids=["one device", "four devices", "qk norm"],
)
def test_loss_and_gradients_are_those_without_remat(mesh, model, policy):
    loss, gradients = loss_and_gradient(mesh, model, remat=policy)
    expected, expected_gradients = loss_and_gradient("tensor=1", model, remat="none")
    assert loss == pytest.approx(expected, rel=1e-6)
    assert largest_difference(expected_gradients, gradients) < 1e-6


@pytest.mark.parametrize(
    "settings",
    [
        {"remat": "nested", "accumulate": 2},
        {"remat": "nested", "sequence_parallel": False},
        {"remat": "nested", "attention": "materialised"},
        {"remat": "none", "attention": "materialised"},
        *({"remat": policy, "offload": "residuals"} for policy in ("full", "nested", "dots")),
        {"remat": "attention,qkv,mlp_in", "offload": "residuals"},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_other_settings_change_no_gradient(settings):
    loss, gradients = loss_and_gradient("fsdp=2,tensor=2", DEEP, **settings)
    expected, expected_gradients = loss_and_gradient("tensor=1", DEEP, remat="none")
    assert loss == pytest.approx(expected, rel=1e-6)
    assert largest_difference(expected_gradients, gradients) < 1e-6


def residual_bytes(config: TrainConfig) -> int:
    """Per device, of what differentiating the model keeps of each layer or group, the weights
    left out."""
    mesh = mesh_of(config)
    params, batch = abstract_state(config, mesh).params, abstract_batch(config, mesh, 8)

    def kept(params, tokens):
        return jax.vjp(lambda p: nnx.merge(graph(config), p)(tokens), params)[1]

    with jax.set_mesh(mesh):
        leaves = jax.tree.leaves(jax.eval_shape(kept, params, batch.tokens_BT))
    weights = {leaf.shape for leaf in jax.tree.leaves(params)}
    steps = (config.model.num_layers, config.model.num_layers // 2)
    stacks = [x for x in leaves if x.shape[:1] in {(n,) for n in steps} and x.ndim > 2]
    stacks = [x for x in stacks if x.shape[1] > 1]  # a gain, [1, 1, D], is no activation
    return bytes_per_device([x for x in stacks if x.shape not in weights])


@pytest.mark.parametrize("policy", all_policies())
@pytest.mark.parametrize(
    ("mesh", "model", "settings"),
    [
        ("tensor=4", DEEP, {"sequence_parallel": False}),
        ("tensor=8", DEEP, {}),
        ("data=2,fsdp=2,tensor=2", DEEP_QWEN, {"accumulate": 2}),
        ("fsdp=2,tensor=2", DEEP_GPT2, {}),
    ],
    ids=["whole sequence", "copied heads", "qk norm", "gelu"],
)
def test_kept_bytes_are_those_of_the_residuals(mesh, model, settings, policy):
    config = tiny_config(mesh, model=model, remat=policy, **settings)
    in_8_bits = dataclasses.replace(config.memory, params="int8", moments="int8")
    assert kept_bytes(config) == kept_bytes(dataclasses.replace(config, memory=in_8_bits))
    part = config.data.accumulate
    group = 0
    if policy == "nested":  # and the inputs of the two layers of a group
        assert config.mesh is not None
        devices = config.mesh.num_devices if config.memory.sequence_parallel else 1
        group = 2 * 8 * 32 * 32 * 4 // devices // part
    assert kept_bytes(config) == residual_bytes(config) // part + group


DEEP_LLAMA = dataclasses.replace(MODEL, num_layers=12)


def on_four_gpus(mesh: str, policy: str, offload: str = "none") -> TrainConfig:
    config = run(mesh, model=DEEP_LLAMA, remat=policy, offload=offload)
    return resolve(config, num_devices=4, platform="gpu")


ORDER = ("none", "dots", "attention,qkv,mlp_in", "full", "nested")


@pytest.mark.parametrize(
    ("mesh", "policy"),
    [*(("tensor=4", policy) for policy in ORDER[1:]), ("fsdp=2,tensor=2", "attention")],
)
def test_offloaded_residuals_leave_the_device_for_the_host(mesh, policy):
    config = on_four_gpus(mesh, policy, "residuals")
    here, there = compiled(on_four_gpus(mesh, policy)), compiled(config)
    stacked, kept = 12, kept_bytes(config)
    if policy == "nested":  # four groups of three layers, whose inputs stay
        stacked, kept = 4, kept * 4 // (4 + 3)
    assert here.host_bytes == 0
    assert there.host_bytes == kept
    # What one or two layers keep is on the device, on its way there or back.
    assert kept * (1 - 2 / stacked) < here.peak_bytes - there.peak_bytes < kept * 1.01
    assert lint(there) == []


def test_residuals_are_offloaded_where_weights_are_gathered():
    config = on_four_gpus("fsdp=4", "qkv", "residuals")
    assert compiled(config).host_bytes == kept_bytes(config)
    assert unneeded(config, compiled(config).collectives) == []


def test_peaks_fall_in_the_order_of_what_is_kept():
    configs = [on_four_gpus("tensor=4", policy) for policy in ORDER]
    peaks = [compiled(config).peak_bytes for config in configs]
    kept = [kept_bytes(config) for config in configs]
    for (a, b), (kept_a, kept_b) in zip(pairwise(peaks), pairwise(kept), strict=True):
        assert a > b
        assert kept_a > kept_b
    # Without remat, kept is what differentiating keeps; the others' layers need space to be
    # run again.
    assert kept[0] - kept[3] == pytest.approx(peaks[0] - peaks[3], rel=0.05)


def test_an_offload_that_the_cpu_leaves_out_is_found():
    config = tiny_config("tensor=2", model=DEEP, remat="full", offload="residuals")
    mesh = mesh_of(config)
    compilation = compile_lowered(lower_train_step(config, mesh), mesh)
    assert compilation.host_bytes == 0
    assert "offload-moved-nothing" in {finding.rule for finding in lint(compilation)}


def test_choices_are_those_worth_having():
    config = on_four_gpus("tensor=4", "qkv,attention")
    found = policies(config)
    assert [one.remat for one in found if one.chosen] == ["attention,qkv"]
    assert found[0].remat == "none"
    assert found[-1].remat == "nested"
    for one, next_one in pairwise(one for one in found if not one.chosen):
        assert one.kept_bytes > next_one.kept_bytes
        assert one.repeated_flops < next_one.repeated_flops
    # With 7 layers there are no groups; what is offloaded has to be chosen.
    seven = dataclasses.replace(config, model=dataclasses.replace(MODEL, num_layers=7))
    assert "nested" not in {one.remat for one in policies(seven)}
    offloaded = {one.remat for one in policies(on_four_gpus("tensor=4", "full", "residuals"))}
    assert "none" not in offloaded
    assert {"dots", "full"} <= offloaded
