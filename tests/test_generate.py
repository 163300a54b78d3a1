"""Sampling from a sharded vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from conftest import TINY, initial_state, mesh_of, tiny_config

from tpjax.generate import TEMPERATURE, next_token, sample
from tpjax.sharding import weight_spec


def draw(mesh_text: str, x: np.ndarray, head: np.ndarray, keys: int) -> np.ndarray:
    with jax.set_mesh(mesh_of(tiny_config(mesh_text))):
        x = jax.device_put(x, jax.P(("data", "fsdp"), None))
        head = jax.device_put(head, weight_spec("VD"))
        one = jax.jit(lambda key: next_token(x, head, key, TINY.vocab_size))
        return np.stack([np.asarray(one(jax.random.key(i))) for i in range(keys)])


def test_sampling_is_the_same_on_every_mesh_and_follows_the_probabilities():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 4)).astype(np.float32)
    x[:] = x[0]
    head = rng.standard_normal((TINY.padded_vocab_size, 4)).astype(np.float32)
    head[TINY.vocab_size :] = 100 * x[0]  # padding would win every time
    tokens = draw("tensor=1", x, head, 300)
    np.testing.assert_array_equal(tokens[:20], draw("fsdp=2,tensor=4", x, head, 20))
    assert tokens.max() < TINY.vocab_size
    expected = jax.nn.softmax(jnp.asarray(head[: TINY.vocab_size] @ x[0]) / TEMPERATURE)
    counts = np.bincount(tokens.ravel(), minlength=TINY.vocab_size) / tokens.size
    assert np.abs(counts - np.asarray(expected)).max() < 0.03


def test_a_sample_continues_the_prompt():
    config = tiny_config("data=2,tensor=2")
    mesh = mesh_of(config)
    params = initial_state(config, mesh).params
    tokens = sample(config, mesh, params, np.array([5, 6, 7]), 12, seed=1)
    assert len(tokens) == 12
    assert all(0 <= token < TINY.vocab_size for token in tokens)
    assert tokens == sample(config, mesh, params, np.array([5, 6, 7]), 12, seed=1)
    assert tokens != sample(config, mesh, params, np.array([5, 6, 7]), 12, seed=2)
