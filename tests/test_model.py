"""The model against NumPy, against itself on other meshes, and against causality."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import reference
from conftest import (
    TINY,
    TINY_GPT2,
    TINY_QWEN,
    initial_state,
    mesh_of,
    random_rows,
    tiny_config,
    to_numpy,
)
from flax import nnx

from tpjax import architecture, quant
from tpjax.config import RopeConfig
from tpjax.data import place
from tpjax.layers import PARAMETERS
from tpjax.rope import rope_frequencies, rotate
from tpjax.state import create_state, graph
from tpjax.step import loss_and_gradients

MODELS = pytest.mark.parametrize(
    "model", [TINY, TINY_GPT2, TINY_QWEN], ids=lambda model: model.name
)


def scaled_up(params: dict) -> dict:
    """Weights large enough for every part of the model to matter to the loss."""
    rng = np.random.default_rng(1)

    def one(path, p: np.ndarray) -> np.ndarray:
        shift = 0.1 * rng.standard_normal(p.shape)
        return (p * (1 if "gain" in str(path[-1]) else 5) + shift).astype(np.float32)

    return jax.tree.map_with_path(one, params)


@MODELS
@pytest.mark.parametrize("mesh", ["tensor=1", "tensor=4"])
def test_loss_and_gradient_equal_numpy(model, mesh):
    config = tiny_config(mesh, model=model)
    grid = mesh_of(config)
    initial = initial_state(config, grid).params
    shardings = jax.tree.map(lambda p: p.sharding, initial)
    params = scaled_up(to_numpy(initial))
    rows = random_rows(config)
    with jax.set_mesh(grid):
        loss, gradients = jax.jit(lambda p, b: loss_and_gradients(config, p, b, jnp.float32(1)))(
            jax.device_put(params, shardings), place(rows, grid)
        )
    exact = jax.tree.map(lambda p: p.astype(np.float64), params)
    assert float(loss) == pytest.approx(reference.loss(exact, *rows, model), rel=2e-6)

    # Along a random direction, the gradient is the slope of the NumPy loss.
    rng = np.random.default_rng(2)
    direction = jax.tree.map(lambda p: rng.standard_normal(p.shape), exact)
    eps = 1e-5

    def shifted(by: float) -> float:
        moved = jax.tree.map(lambda p, d: p + by * d, exact, direction)
        return reference.loss(moved, *rows, model)

    slope = (shifted(eps) - shifted(-eps)) / (2 * eps)
    products = jax.tree.map(
        lambda g, d: (np.asarray(g, np.float64) * d).sum(), gradients, direction
    )
    assert sum(jax.tree.leaves(products)) == pytest.approx(slope, rel=2e-4)


@MODELS
def test_no_position_sees_a_later_one(model):
    """The gradient of an early output in later embeddings is zero, in earlier ones not."""
    config = tiny_config(model=model)
    grid = mesh_of(config)
    params = initial_state(config, grid).params
    tokens = jnp.arange(32, dtype=jnp.int32)[None].repeat(8, 0)  # every position another token
    with jax.set_mesh(grid):
        tokens = jax.device_put(tokens, jax.P(("data", "fsdp"), None))

        def output_at_10(embedding):
            net = nnx.merge(graph(config), {**params, "embedding": embedding})
            at_10 = (jnp.arange(32) == 10)[:, None]
            return jnp.sum(jnp.where(at_10, net(tokens), 0) ** 3)

        slope = np.abs(np.asarray(jax.jit(jax.grad(output_at_10))(params["embedding"]))).max(-1)
    first = 0 if model.sliding_window is None else 11 - 2 * model.sliding_window
    assert (slope[11:32] == 0).all()
    assert (slope[max(first + 2, 0) : 11] > 0).all()


@pytest.mark.parametrize(
    ("mesh", "params"),
    [("tensor=8", "fp32"), ("data=2,fsdp=2,tensor=2", "fp32"), ("fsdp=4", "bf16")],
)
def test_initial_weights_are_the_same_bits_on_every_mesh(mesh, params):
    one = to_numpy(create_state(c := tiny_config(params=params), mesh_of(c)).params)
    many = to_numpy(create_state(c := tiny_config(mesh, params=params), mesh_of(c)).params)
    assert jax.tree.all(jax.tree.map(np.array_equal, one, many))
    assert one["embedding"].astype(np.float32).std() == pytest.approx(0.02, rel=0.05)
    layers = one["blocks"]["attention"]["q"].astype(np.float32)
    assert not np.array_equal(layers[0], layers[1])


def test_tables_drawn_in_parts_are_the_same_bits_on_every_mesh(monkeypatch):
    monkeypatch.setattr(architecture, "TABLE_PART_BYTES", 128 * 32 * 4 // 4)
    monkeypatch.setitem(quant.BLOCK, 8, 4)
    assert TINY.table_parts == 4
    for params in ("fp32", "int8"):
        found = [
            to_numpy(create_state(c := tiny_config(mesh, params=params), mesh_of(c)).params)
            for mesh in ("tensor=1", "fsdp=2,tensor=4")
        ]
        assert jax.tree.all(jax.tree.map(np.array_equal, *found))
        table = found[0]["embedding"]
        values = np.asarray(table if params == "fp32" else quant.dequantise(table))
        assert values.std() == pytest.approx(0.02, rel=0.05)
        assert len(np.unique(np.round(values, 6), axis=0)) == 128  # no row is another's
        assert abs(np.corrcoef(values[::4].ravel(), values[1::4].ravel())[0, 1]) < 0.1


@MODELS
def test_every_parameter_stands_in_the_table(model):
    config = tiny_config(model=model)
    params = initial_state(config, mesh_of(config)).params
    for path, leaf in jax.tree.leaves_with_path(params):
        row = PARAMETERS[path[-1].key]
        shape = tuple(model.sizes[letter] for letter in row.letters)
        assert leaf.shape == ((model.num_layers, *shape) if "blocks" in str(path) else shape)
    padding = model.padded_vocab_size - model.vocab_size
    tables = 1 if model.tie_embeddings else 2
    stored = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert stored - padding * model.embed_dim * tables == model.num_parameters


GOLDEN = json.loads((Path(__file__).parent / "golden" / "rope.json").read_text())


@pytest.mark.parametrize("name", GOLDEN["kinds"])
def test_rope_frequencies_equal_transformers(name):
    golden = GOLDEN["kinds"][name]
    settings = dict(golden["settings"])
    rope = RopeConfig(
        kind=settings.pop("rope_type"),
        theta=settings.pop("rope_theta"),
        original_max_seq_len=settings.pop("original_max_position_embeddings", 2048),
        **settings,
    )
    frequency, scale = rope_frequencies(rope, GOLDEN["head_dim"], golden["seq_len"])
    np.testing.assert_allclose(frequency, golden["frequency"], rtol=5e-7)
    assert scale == pytest.approx(golden["scale"], rel=1e-7)


def test_rotation_keeps_what_depends_on_distance_only():
    """q·k after rotation depends on the distance of their positions, not on where they are."""
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 1, 1, 8))
    angle = np.arange(32)[:, None] * 10.0 ** -np.arange(4)
    tables = (jnp.cos(angle), jnp.sin(angle))
    q, k = (np.asarray(rotate(jnp.broadcast_to(x, (1, 32, 1, 8)), tables))[0, :, 0] for x in (q, k))
    products = q @ k.T
    for distance in (0, 3, 11):
        np.testing.assert_allclose(np.diag(products, -distance), products[distance, 0], atol=1e-5)
