"""float16 compute with a loss scale that finds its own size."""

from __future__ import annotations

import dataclasses
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import initial_state, largest_difference, mesh_of, random_batch, tiny_config, to_numpy

from tpjax import precision
from tpjax.config import OptimConfig
from tpjax.precision import LossScale
from tpjax.step import loss_and_gradients, lower_train_step

PLAIN = OptimConfig(lr=1e-3, min_lr=1e-3, warmup=0, clip=0)


def test_it_halves_and_grows_by_the_rule(monkeypatch):
    monkeypatch.setattr(precision, "GROWTH_INTERVAL", 3)
    now, scale, good = LossScale.initial(), 2.0**16, 0
    after = jax.jit(LossScale.after)
    for ok in [True] * 40 + [False] + [True] * 2 + [False] * 30 + [True] * 7:
        now = after(now, jnp.bool_(ok))
        good = good + 1 if ok else 0
        if not ok:
            scale = max(scale / 2, 1.0)
        elif good == 3:
            scale, good = min(scale * 2, 2.0**24), 0
        assert (float(now.scale), int(now.good_steps)) == (scale, good)
    assert scale == 4.0  # it was at both bounds, 2²⁴ and 1


@lru_cache
def compiled(mesh: str, moments: str):
    config = tiny_config(mesh, optim=PLAIN, compute="fp16", donate=False, moments=moments)
    grid = mesh_of(config)
    return config, grid, lower_train_step(config, grid).compile()


def run(scale: float, mesh: str = "fsdp=2,tensor=2", moments: str = "fp32"):
    """A compiled step, and a state whose loss is multiplied by `scale`."""
    config, grid, step = compiled(mesh, moments)
    state = initial_state(config, grid)
    assert state.loss_scale is not None
    placed = jax.device_put(np.float32(scale), state.loss_scale.scale.sharding)
    scaled = dataclasses.replace(state.loss_scale, scale=placed)
    state = dataclasses.replace(state, loss_scale=scaled)
    return step, state, random_batch(config, grid)


@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_an_overflow_skips_the_step_and_the_next_scale_is_half(moments):
    step, start, batch = run(2.0**24, moments=moments)
    state, skipped = start, 0
    while True:
        before, (state, metrics) = state, step(state, batch)
        if np.isfinite(float(metrics["grad_norm"])):
            break
        skipped += 1
        for tree in ("params", "opt_state"):
            pair = (to_numpy(getattr(s, tree)) for s in (before, state))
            jax.tree.map(np.testing.assert_array_equal, *pair)
        assert float(metrics["loss_scale"]) == 2.0**24 / 2 ** (skipped - 1)
        assert float(state.loss_scale.scale) == 2.0**24 / 2**skipped
        assert int(state.step) == skipped
        assert np.isfinite(float(metrics["loss"]))
    assert 1 <= skipped < 20
    assert float(metrics["lr"]) == pytest.approx(1e-3)
    assert int(state.loss_scale.good_steps) == 1
    # The step that is taken is the one that a scale that fits would have taken at once.
    at_once = dataclasses.replace(start, loss_scale=before.loss_scale)
    expected, _ = step(at_once, batch)
    counts = [s.opt_state["rest"][0].step for s in (state, expected)]
    assert [int(c) for c in counts] == [1, 1]
    if moments == "fp32":  # rounding in 8 bits goes by the step's number
        pair = (to_numpy(s.params) for s in (state, expected))
        jax.tree.map(np.testing.assert_array_equal, *pair)


def test_the_scale_does_not_scale_the_step():
    """Loss, norm and update are those of float32, whatever the power of two."""
    reference = tiny_config(optim=PLAIN)
    mesh = mesh_of(reference)
    begin = initial_state(reference, mesh)
    expected, wanted = lower_train_step(reference, mesh).compile()(
        begin, random_batch(reference, mesh)
    )
    for scale in (2.0**8, 2.0**12):
        step, state, batch = run(scale)
        after, metrics = step(state, batch)
        assert float(metrics["loss"]) == pytest.approx(float(wanted["loss"]), rel=1e-3)
        assert float(metrics["grad_norm"]) == pytest.approx(float(wanted["grad_norm"]), rel=5e-3)
        mu, theirs = (to_numpy(s.opt_state["blocks"][0].mu) for s in (after, expected))
        assert largest_difference(theirs, mu) < 5e-3


def test_without_a_scale_small_gradients_vanish():
    config = tiny_config(compute="fp16")
    mesh = mesh_of(config)
    params, batch = initial_state(config, mesh).params, random_batch(config, mesh)
    with jax.set_mesh(mesh):
        sweep = jax.jit(lambda scale: loss_and_gradients(config, params, batch, scale)[1])
        found = [to_numpy(sweep(jnp.float32(scale))["blocks"]) for scale in (2.0**-10, 2.0**10)]
    gone = [np.mean([np.mean(leaf == 0) for leaf in jax.tree.leaves(tree)]) for tree in found]
    assert gone[0] > 0.1
    assert gone[1] < 0.01


def test_scale_and_overflow_are_those_of_any_mesh():
    alone, many = (run(2.0**24, mesh) for mesh in ("tensor=1", "fsdp=2,tensor=2"))
    (step, one, batch), (other, two, parts) = alone, many
    for _ in range(3):
        one, two = step(one, batch)[0], other(two, parts)[0]
        assert float(one.loss_scale.scale) == float(two.loss_scale.scale)
