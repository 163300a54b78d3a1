"""AdamW against optax's own, rounding against its mean, decay against the table."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import TINY_GPT2, initial_state, mesh_of, tiny_config

from tpjax import optim, updates
from tpjax.config import OptimConfig
from tpjax.moments import Plain
from tpjax.precision import noise, stochastic_round
from tpjax.updates import Application

KEY = jax.random.key(0)


def whole(key) -> Application:
    """A gradient applied as it is."""
    return Application(key, jnp.float32(1), jnp.bool_(True))


def test_equals_optax_in_float32():
    config = OptimConfig(lr=1e-2, min_lr=1e-3, warmup=2, weight_decay=0.3)
    rng = np.random.default_rng(0)
    params = {"q": jnp.asarray(rng.standard_normal((4, 3, 5)), jnp.float32)}
    params = {"blocks": params, "embedding": jnp.ones((7, 2))}
    ours = optim.make_optimizer(config, 10)
    theirs = optax.adamw(optim.schedule(config, 10), b1=0.9, b2=0.95, weight_decay=0.3)
    state, their_state, their_params = updates.init(ours, params), theirs.init(params), params
    for number in range(5):
        gradients = jax.tree.map(lambda p, n=number: jnp.sin(p * (n + 1)), params)
        params, state = updates.update(ours, gradients, state, params, whole(KEY), 1)
        steps, their_state = theirs.update(gradients, their_state, their_params)
        their_params = optax.apply_updates(their_params, steps)
        gradients = None
        for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(their_params), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-5)


def test_schedule_by_hand():
    rate = optim.schedule(OptimConfig(lr=1.0, min_lr=0.1, warmup=4), 12)
    rates = [float(rate(step)) for step in range(12)]
    np.testing.assert_allclose(rates[:5], [0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-6)
    assert rates[4 + 3] == pytest.approx(0.1 + 0.9 * (1 + np.cos(np.pi * 3 / 7)) / 2)
    assert rates[11] == pytest.approx(0.1)  # the last of twelve steps
    assert float(optim.schedule(OptimConfig(lr=1.0, min_lr=0.1, warmup=0), 5)(0)) == 1.0


def test_matrices_decay_and_vectors_do_not():
    config = tiny_config(model=TINY_GPT2)
    params = initial_state(config, mesh_of(config)).params
    decays = optim.decays(params)
    assert decays["blocks"]["attention"]["q"]
    assert decays["embedding"]
    assert decays["positions"]
    assert not any(jax.tree.leaves(decays["blocks"]["attention_norm"]))  # stacked: 2-dimensional
    assert not decays["blocks"]["mlp"]["up_bias"]
    assert not decays["blocks"]["attention"]["q_bias"]


def test_clipping_by_hand():
    gradients = {"a": jnp.full((3,), 2.0, jnp.bfloat16), "b": jnp.full((4, 1), 1.0)}
    norm = updates.global_norm(gradients)
    assert float(norm) == 4.0
    assert float(updates.clip_scale(norm, 1.0)) == 0.25
    assert float(updates.clip_scale(norm, 8.0)) == 1.0
    assert float(updates.clip_scale(norm, 0.0)) == 1.0
    assert float(updates.clip_scale(jnp.float32(0), 1.0)) == 1.0


def bits(like) -> jax.Array:
    return noise(KEY, like)[0]


def test_stochastic_rounding_is_right_on_average():
    """Between two neighbours the upper one comes as often as the fraction says."""
    low, high = 1.0, 1.0 + 2.0**-7  # neighbours in bfloat16
    for fraction in (0.1, 0.5, 0.9):
        value = jnp.full((100_000,), low + fraction * (high - low))
        rounded = np.asarray(stochastic_round(value, bits(value)), np.float64)
        assert set(rounded) == {low, high}
        assert (rounded == high).mean() == pytest.approx(fraction, abs=0.006)
    exact = jnp.asarray([0.0, 1.0, -2.5, 2.0**100, jnp.inf, -jnp.inf])
    np.testing.assert_array_equal(stochastic_round(exact, bits(exact)).astype(jnp.float32), exact)
    nan = jnp.float32(jnp.nan)
    assert np.isnan(float(stochastic_round(nan, bits(nan))))


def test_bf16_weights_near_one_move_by_small_updates_and_decay():
    """Updates of a hundredth of a bf16 step: rounded to nearest they would all be lost."""
    config = OptimConfig(lr=1e-4, min_lr=1e-4, warmup=0, weight_decay=0.5, clip=0)
    optimizer = optim.make_optimizer(config, 1000)
    weights = {"blocks": {"up": jnp.ones((2, 100, 50), jnp.bfloat16)}}
    state = updates.init(optimizer, weights)

    @jax.jit
    def step(weights, state, number):
        gradients = jax.tree.map(jnp.ones_like, weights)
        key = jax.random.fold_in(KEY, number)
        return updates.update(optimizer, gradients, state, weights, whole(key), 1)

    for number in range(100):
        weights, state = step(weights, state, number)
    up = np.asarray(weights["blocks"]["up"], np.float64)
    exact = 1.0
    for _ in range(100):
        exact -= 1e-4 * (1 + 0.5 * exact)  # a constant gradient makes steps of one
    # The mean of 10,000 weights; each has rounded at random 100 times by up to 2⁻⁷.
    assert up.mean() == pytest.approx(exact, abs=5e-4)
    assert not np.array_equal(up[0], up[1])  # every layer rounds by itself


def test_bf16_moments_keep_their_mean_and_float32_arithmetic():
    """nu moves by a thousandth per step, less than bf16 resolves."""
    adam = optim.scale_by_adam(0.9, 0.999, 1e-8, lambda path, leaf: Plain(jnp.dtype(jnp.bfloat16)))
    params = jnp.zeros((20_000,), jnp.bfloat16)
    state = adam.init(params)
    assert state.nu.dtype == jnp.bfloat16

    @jax.jit
    def step(state, number):
        return adam.update(
            jnp.ones_like(params), state, params, key=jax.random.fold_in(KEY, number)
        )

    for number in range(300):
        updates, state = step(state, number)
    assert updates.dtype == jnp.float32
    assert float(state.nu.astype(jnp.float32).mean()) == pytest.approx(1 - 0.999**300, rel=0.01)
    np.testing.assert_allclose(np.asarray(updates).mean(), 1.0, rtol=0.02)
