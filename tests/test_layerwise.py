"""The layer-by-layer update does what the update of all parameters at once does."""

from __future__ import annotations

import dataclasses
import math
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
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

from tpjax import architecture, layerwise, state, step
from tpjax.config import ModelConfig, OptimConfig
from tpjax.layerwise import clip_each
from tpjax.step import loss_and_gradients, lower_train_step
from tpjax.updates import split

# A small rate: where a gradient is rounding noise only, Adam and Lion make whole steps of it,
# which later gradients are to feel little of.
UNCLIPPED = OptimConfig(lr=1e-4, min_lr=1e-5, warmup=0, clip=0)
DEEP = dataclasses.replace(TINY, name="tiny-deep", num_layers=4)
OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-4, weight_decay=0.1),
    "sgd": lambda: optax.sgd(0.1, momentum=0.9),
    "lion": lambda: optax.lion(1e-4),
    "plain sgd": lambda: optax.sgd(1.0),
}


def run(mesh: str = "tensor=1", *, split: int = 1, optim: OptimConfig = UNCLIPPED, **settings):
    settings = {"update": "layerwise", "remat": "full", "split": split, **settings}
    return tiny_config(mesh, optim=optim, **settings)


def whole(mesh: str = "tensor=1", **settings):
    return run(mesh, update="whole", **settings)


@pytest.fixture
def parts_of_tables(monkeypatch):
    """Four parts to a table, as a large one has."""
    monkeypatch.setattr(architecture, "TABLE_PART_BYTES", 128 * 32 * 4 // 4)
    assert TINY.table_parts == 4


def start(config, mesh):
    """A new state, the tables drawn at once whatever the parts that they are updated in."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(architecture, "TABLE_PART_BYTES", 2**20)
        return initial_state(config, mesh)


def compile_step(config, optimizer: str | None = None):
    """A step for the mesh, and a new state for it, with another optimiser in place of ours."""
    mesh = mesh_of(config)
    initial = start(config, mesh)
    if optimizer is None:
        return lower_train_step(config, mesh).compile(), initial
    with pytest.MonkeyPatch.context() as patch:
        for module in (state, layerwise, step):
            patch.setattr(module, "optimizer_of", lambda config: OPTIMIZERS[optimizer]())
        abstract = state.abstract_state(config, mesh).opt_state
        compiled = lower_train_step(config, mesh).compile()

    def zeros(leaf):
        return jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding)

    return compiled, dataclasses.replace(initial, opt_state=jax.tree.map(zeros, abstract))


def three_steps(config, optimizer: str | None = None):
    """Losses, gradient norms, and the state after three steps."""
    mesh, curve = mesh_of(config), []
    compiled, now = compile_step(config, optimizer)
    for number in range(3):
        now, metrics = compiled(now, random_batch(config, mesh, seed=number))
        curve.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return np.array(curve), to_numpy(now)


@lru_cache
def reference(model: ModelConfig, optimizer: str | None = None):
    """The update of all at once, tables too, on one device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(architecture, "TABLE_PART_BYTES", 2**20)
        assert model.table_parts == 1
        return three_steps(whole(model=model), optimizer)


def flat(tree) -> np.ndarray:
    return np.concatenate([np.float64(leaf).ravel() for leaf in jax.tree.leaves(tree)])


def memories(opt_state) -> list:
    """The trees of moments and counters of each part, one after the other."""
    parts = [opt_state["rest"], *opt_state["tables"].values(), opt_state["blocks"]]
    return [tree for part in parts for memory in part for tree in memory if jax.tree.leaves(tree)]


def check_equals_whole(config, optimizer: str | None = None) -> None:
    curve, ours = three_steps(config, optimizer)
    expected_curve, theirs = reference(config.model, optimizer)
    np.testing.assert_allclose(curve, expected_curve, rtol=3e-6)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    pairs = list(zip(memories(ours.opt_state), memories(theirs.opt_state), strict=True))
    assert len(pairs) >= len(split(ours.params).tables) + 2
    for a, b in pairs:
        assert largest_difference(b, a) < 1e-5
    apart = np.abs(flat(ours.params) - flat(theirs.params))
    assert np.quantile(apart, 0.98) < 1e-6
    if optimizer == "sgd":
        begin = flat(to_numpy(start(config, mesh_of(config)).params))
        assert apart.max() < 2e-5 * np.abs(flat(theirs.params) - begin).max()


@pytest.mark.parametrize(
    ("mesh", "model", "settings"),
    [
        ("tensor=1", TINY, {}),
        ("tensor=4", TINY_GPT2, {"split": 4}),
        ("fsdp=2,tensor=2", TINY_QWEN, {"split": 2}),
        ("tensor=8", TINY, {"split": 2, "loss_chunks": 1}),
        ("data=2,tensor=2", TINY_QWEN, {"loss_chunks": 4}),
        ("fsdp=4,tensor=2", TINY, {"split": 2, "sequence_parallel": False}),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
@pytest.mark.usefixtures("parts_of_tables")
def test_three_steps_equal_those_of_the_whole_update(mesh, model, settings):
    check_equals_whole(run(mesh, model=model, **settings))


@pytest.mark.usefixtures("parts_of_tables")
def test_groups_of_layers_equal_the_whole_update_too():
    check_equals_whole(run("tensor=2", model=DEEP, remat="nested", split=2))


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion"])
@pytest.mark.usefixtures("parts_of_tables")
def test_any_optimiser_that_acts_leaf_by_leaf(optimizer):
    check_equals_whole(run("fsdp=2,tensor=2", model=TINY_QWEN, split=2), optimizer)


@pytest.mark.parametrize(
    ("mesh", "model", "settings"),
    [
        ("tensor=1", TINY, {"moments": "bf16"}),
        ("fsdp=2,tensor=2", DEEP, {"params": "int8", "moments": "factored", "remat": "nested"}),
    ],
    ids=["bf16", "int8"],
)
@pytest.mark.usefixtures("parts_of_tables")
def test_rounding_is_that_of_the_whole_update(mesh, model, settings):
    """Layer by layer and part by part from the same keys: the same values (to sums in another
    order), but where one was at the edge and has tipped a rounding."""
    (_, ours), (_, theirs) = (
        three_steps(how(mesh, model=model, **settings)) for how in (run, whole)
    )
    trees = zip(*([s.params, *memories(s.opt_state)] for s in (ours, theirs)), strict=True)
    for a, b in trees:
        same = np.isclose(flat(a), flat(b), rtol=1e-4, atol=0)
        assert same.mean() > 0.85  # the smallest has 32 values


# Clipping. With plain SGD at a rate of one a parameter moves by what is applied.


def norms_by_part(tree, parts: int) -> list[float]:
    """Of each layer, each part of a table (every so many rows), and the rest."""
    rest, tables, blocks = split(tree)
    pieces = [jax.tree.map(lambda leaf, i=i: leaf[i], blocks) for i in range(TINY.num_layers)]
    pieces += [table[part::parts] for table in tables.values() for part in range(parts)]
    return [np.linalg.norm(flat(piece)) for piece in [*pieces, rest]]


@lru_cache
def gradient(model: ModelConfig):
    """Of the first batch, on one device."""
    config = whole(model=model)
    mesh = mesh_of(config)
    params = start(config, mesh).params
    with jax.set_mesh(mesh):
        sweep = jax.jit(partial(loss_and_gradients, config))
        return to_numpy(sweep(params, random_batch(config, mesh), jnp.float32(1))[1])


@pytest.mark.usefixtures("parts_of_tables")
def test_each_part_is_clipped_to_its_share():
    """Two layers, two tables in four parts each, and the rest of one gradient, each scaled down
    to its share and no further, so that all together are never above `clip`."""
    clip = 0.9
    clipped = dataclasses.replace(UNCLIPPED, clip=clip)
    config = run("fsdp=2,tensor=2", model=TINY_QWEN, split=2, optim=clipped)
    mesh = mesh_of(config)
    compiled, before = compile_step(config, "plain sgd")
    expected, old = gradient(TINY_QWEN), to_numpy(before.params)
    after, metrics = compiled(before, random_batch(config, mesh))
    applied = jax.tree.map(lambda a, b: np.float64(a) - b, old, to_numpy(after.params))
    each = clip_each(config)
    assert each == pytest.approx(clip / math.sqrt(2 + 2 + 1))
    share = np.array([each] * 2 + [each / 2] * 8 + [each])
    ours, whole = (norms_by_part(tree, 4) for tree in (applied, expected))
    np.testing.assert_allclose(ours, np.minimum(whole, share), rtol=1e-3)
    assert np.linalg.norm(flat(applied)) <= clip * 1.001
    assert 0 < (whole < share).sum() < len(share)  # some are clipped, some are not
    assert float(metrics["grad_norm"]) == pytest.approx(np.linalg.norm(flat(expected)), rel=1e-5)


def test_a_loss_that_is_not_finite_changes_nothing():
    config = run("fsdp=2,tensor=2", split=2, donate=False)
    mesh = mesh_of(config)
    compiled, batch = lower_train_step(config, mesh).compile(), random_batch(config, mesh)
    good, _ = compiled(start(config, mesh), batch)
    gain = good.params["norm"]["gain"]
    values = np.asarray(gain).copy()
    values[3] = np.nan
    spoilt = jax.device_put(values, gain.sharding)
    bad = dataclasses.replace(good, params=good.params | {"norm": {"gain": spoilt}})
    after, metrics = compiled(bad, batch)
    assert np.isnan(float(metrics["loss"]))
    for tree in ("params", "opt_state"):
        old, new = (to_numpy(getattr(s, tree)) for s in (bad, after))
        jax.tree.map(np.testing.assert_array_equal, old, new)
    assert int(after.step) == 2
    # The same program goes on from there.
    mended, _ = compiled(dataclasses.replace(after, params=good.params), batch)
    assert not np.array_equal(flat(to_numpy(mended.params)), flat(to_numpy(good.params)))
    assert np.isfinite(flat(to_numpy(mended.params))).all()
