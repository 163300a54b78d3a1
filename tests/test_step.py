"""The compiled step: the same training on every mesh, in place, compiled once."""

from __future__ import annotations

import dataclasses
from functools import lru_cache, partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import (
    TINY,
    TINY_GPT2,
    TINY_QWEN,
    adam_states,
    initial_state,
    largest_difference,
    mesh_of,
    random_batch,
    tiny_config,
    to_numpy,
)

from tpjax.config import MeshConfig, ModelConfig, OptimConfig
from tpjax.memory.compiled import (
    ABSENT_GPU_OPTIONS,
    absent_devices,
    init_peak_bytes,
    peak_bytes,
)
from tpjax.mesh import make_mesh
from tpjax.sharding import bytes_per_device
from tpjax.state import abstract_state, create_state, lower_init
from tpjax.step import loss_and_gradients, lower_eval_step, lower_train_step, train_step
from tpjax.updates import split


def three_steps(config):
    """Losses, gradient norms and the state after three steps."""
    mesh = mesh_of(config)
    step, state = lower_train_step(config, mesh).compile(), initial_state(config, mesh)
    curve = []
    for number in range(3):
        state, metrics = step(state, random_batch(config, mesh, seed=number))
        curve.append((float(metrics["loss"]), float(metrics["grad_norm"])))
    return np.array(curve), to_numpy(state)


@lru_cache
def on_one_device(model: ModelConfig):
    return three_steps(tiny_config(model=model))


def check_equals_one_device(config) -> None:
    curve, state = three_steps(config)
    expected_curve, expected = on_one_device(config.model)
    np.testing.assert_allclose(curve, expected_curve, rtol=3e-6)
    theirs_by_part = adam_states(expected)
    for part, ours in adam_states(state).items():
        theirs = theirs_by_part[part]
        assert largest_difference(theirs.mu, ours.mu) < 1e-5
        assert largest_difference(theirs.nu, ours.nu) < 1e-5
    # Adam divides by a gradient's size: where that is rounding noise only (the bias of
    # the keys, by mathematics), it makes steps of noise. Few entries are so.
    moved = flat(expected.params) - flat(state.params)
    assert np.quantile(np.abs(moved), 0.98) < 1e-6


def flat(tree) -> np.ndarray:
    return np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(tree)])


@pytest.mark.parametrize(
    ("mesh", "settings"),
    [
        ("tensor=2", {"remat": "dots", "sequence_parallel": False}),
        ("tensor=2", {"remat": "none", "accumulate": 4}),
        ("tensor=4", {"remat": "full", "loss_chunks": 1}),
        ("tensor=4", {"remat": "attention", "sequence_parallel": False, "accumulate": 4}),
        ("tensor=8", {"remat": "dots", "accumulate": 4}),
        ("tensor=8", {"remat": "full", "sequence_parallel": False, "loss_chunks": 8}),
        ("fsdp=2,tensor=2", {"remat": "attention", "accumulate": 4}),
        ("fsdp=2,tensor=2", {"remat": "none", "sequence_parallel": False}),
        ("data=2,fsdp=2,tensor=2", {"remat": "full"}),
        ("data=2,fsdp=2,tensor=2", {"sequence_parallel": False, "accumulate": 2}),
        ("fsdp=2,tensor=2", {"embedding": "replicated"}),
        ("tensor=8", {"embedding": "replicated", "accumulate": 2}),
    ],
)
def test_three_steps_equal_one_device(mesh, settings):
    check_equals_one_device(tiny_config(mesh, **settings))


@pytest.mark.parametrize("model", [TINY_GPT2, TINY_QWEN], ids=lambda model: model.name)
def test_other_families_equal_one_device(model):
    check_equals_one_device(tiny_config("data=2,fsdp=2,tensor=2", model=model))


@pytest.mark.parametrize("mesh", ["fsdp=2,tensor=2", "tensor=4"])
@pytest.mark.parametrize("model", [TINY, TINY_QWEN], ids=lambda model: model.name)
def test_copies_of_the_tables_start_and_learn_as_shards_do(mesh, model):
    """The same bits of weights and gradients; every device of the tensor axis has all rows."""

    def of(embedding: str):
        config = tiny_config(mesh, model=model, embedding=embedding)
        grid = mesh_of(config)
        params = create_state(config, grid).params
        with jax.set_mesh(grid):
            batch = random_batch(config, grid)
            return params, jax.jit(partial(loss_and_gradients, config))(params, batch)[1]

    (sharded, expected), (copied, gradients) = of("sharded"), of("replicated")
    tables = {"embedding"} if model.tie_embeddings else {"embedding", "head"}
    fsdp = MeshConfig.parse(mesh).fsdp
    for tree, like in ((copied, sharded), (gradients, expected)):
        for name in tables:
            shape = tree[name].shape
            assert tree[name].sharding.shard_shape(shape) == (shape[0], shape[1] // fsdp)
            assert like[name].sharding.shard_shape(shape)[0] == shape[0] // (4 // fsdp)
        jax.tree.map(np.testing.assert_array_equal, to_numpy(tree), to_numpy(like))
    moments = abstract_state(tiny_config(mesh, embedding="replicated"), mesh_of(tiny_config(mesh)))
    assert (
        moments.opt_state["tables"]["embedding"][0].nu["embedding"].sharding
        == copied["embedding"].sharding
    )


@pytest.mark.parametrize(
    ("params", "moments"), [("bf16", "bf16"), ("int8", "int8"), ("int8", "factored")]
)
def test_low_precision_steps_round_alike_on_every_mesh(params, moments):
    """The same bits, but where sums in another order have tipped a rounding."""
    settings = {"params": params, "moments": moments}
    _, one = three_steps(tiny_config(**settings))
    _, many = three_steps(tiny_config("fsdp=2,tensor=2", **settings))
    dtype = jnp.dtype(jnp.bfloat16 if params == "bf16" else jnp.int8)
    for part in ("params", "opt_state"):
        ours, theirs = (
            flat([leaf for leaf in jax.tree.leaves(getattr(s, part)) if leaf.dtype == dtype])
            for s in (one, many)
        )
        assert len(ours) > 10_000
        assert (ours == theirs).mean() > 0.985


def test_rounding_depends_on_seed_and_step():
    """A constant rate and the same batch: only the seed and the step number differ."""
    constant = OptimConfig(lr=1e-3, min_lr=1e-3, warmup=0)
    config = tiny_config(params="bf16", optim=constant, donate=False)
    mesh = mesh_of(config)
    step, state = lower_train_step(config, mesh).compile(), initial_state(config, mesh)

    def after(seed: int, number: int) -> np.ndarray:
        seeded = dataclasses.replace(
            state, seed=_like(state.seed, seed), step=_like(state.step, number)
        )
        new, _ = step(seeded, random_batch(config, mesh))
        return flat(to_numpy(new.params))

    start = after(0, 0)
    np.testing.assert_array_equal(start, after(0, 0))
    assert not np.array_equal(start, after(1, 0))
    assert not np.array_equal(start, after(0, 1))


def _like(leaf: jax.Array, value: int) -> jax.Array:
    return jax.device_put(np.asarray(value, leaf.dtype), leaf.sharding)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"params": "bf16"},
        {"embedding": "replicated"},
        {"init": "eager"},
        {"params": "int8", "moments": "int8"},
        {"params": "int8", "moments": "factored"},
        {"params": "int8", "moments": "int8", "update": "layerwise", "remat": "full", "split": 2},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())) or "fp32",
)
def test_every_buffer_of_the_state_is_reused(settings):
    config = tiny_config("fsdp=2,tensor=2", **settings)
    mesh = mesh_of(config)
    step, state = lower_train_step(config, mesh).compile(), create_state(config, mesh)
    sizes = step.memory_analysis()
    assert sizes is not None
    assert sizes.alias_size_in_bytes == bytes_per_device(state)
    buffers = {s.data.unsafe_buffer_pointer() for s in _shards(state)}
    for number in range(3):
        old = state
        state, _ = step(old, random_batch(config, mesh, seed=number))
        jax.block_until_ready(state)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(old))
        assert {s.data.unsafe_buffer_pointer() for s in _shards(state)} == buffers


def _shards(tree):
    return [shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]


def test_no_donation_when_asked():
    config = tiny_config("tensor=2", donate=False)
    mesh = mesh_of(config)
    step, state = lower_train_step(config, mesh).compile(), initial_state(config, mesh)
    jax.block_until_ready(step(state, random_batch(config, mesh)))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))


def test_traced_once_over_three_steps():
    config = tiny_config("data=2,tensor=2")
    mesh = mesh_of(config)
    state = initial_state(config, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    chex.clear_trace_counter()

    @chex.assert_max_traces(n=1)
    def traced_once(state, batch):
        return train_step(config, state, batch)

    with jax.set_mesh(mesh):
        step = jax.jit(traced_once, donate_argnums=0, out_shardings=(shardings, None))
        for number in range(3):
            state, metrics = step(state, random_batch(config, mesh, seed=number))
            jax.block_until_ready(metrics)
    assert step._cache_size() == 1
    assert int(state.step) == 3


def test_moments_are_sharded_as_their_parameters():
    config = tiny_config("data=2,fsdp=2,tensor=2", params="bf16", moments="fp32")
    state = abstract_state(config, mesh_of(config))
    parts, states = split(state.params), adam_states(state)
    of_part = {"rest": parts.rest, "blocks": parts.blocks}
    of_part |= {name: {name: table} for name, table in parts.tables.items()}
    assert of_part.keys() == states.keys() == {"rest", "embedding", "blocks"}
    for part, params in of_part.items():
        for moments in (states[part].mu, states[part].nu):
            pairs = zip(jax.tree.leaves(params), jax.tree.leaves(moments), strict=True)
            assert all(p.sharding == m.sharding and m.dtype == jnp.float32 for p, m in pairs)
    assert states["blocks"].step.shape == (TINY.num_layers,)
    matrices = [leaf for leaf in jax.tree.leaves(state.params["blocks"]) if leaf.ndim > 2]
    assert all(m.sharding.shard_shape(m.shape) != m.shape for m in matrices)


def test_initialisation_makes_nothing_whole():
    """Beside the result, a device needs less than one whole parameter of the largest."""
    wide = dataclasses.replace(TINY, vocab_size=4096, embed_dim=256, num_layers=1)
    config = tiny_config("fsdp=2,tensor=4", model=wide)
    mesh = mesh_of(config)
    state = abstract_state(config, mesh)
    largest = max(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.params))
    init = lower_init(config, mesh).compile()
    sizes = init.memory_analysis()
    assert sizes is not None
    assert sizes.output_size_in_bytes < 1.01 * bytes_per_device(state) + 8 * 64
    assert sizes.temp_size_in_bytes < largest
    assert f"[4096,{wide.embed_dim}]" not in (init.as_text() or "")


@pytest.mark.parametrize("mesh", ["fsdp=2,tensor=4", "data=2,tensor=2"])
def test_made_on_one_device_first_the_state_has_the_same_bits(mesh):
    lazy, eager = (tiny_config(mesh, init=init, params="bf16") for init in ("lazy", "eager"))
    grid = mesh_of(lazy)
    made, moved = create_state(lazy, grid), create_state(eager, grid)
    assert jax.tree.map(lambda x: x.sharding, made) == jax.tree.map(lambda x: x.sharding, moved)
    jax.tree.map(np.testing.assert_array_equal, to_numpy(made), to_numpy(moved))
    first = {grid.devices.flat[0]}
    assert all(x.sharding.device_set == first for x in jax.tree.leaves(_made_by(eager, grid)))
    assert all(x.sharding.device_set > first for x in jax.tree.leaves(_made_by(lazy, grid)))


def _made_by(config, mesh):
    return lower_init(config, mesh).compile()(np.uint32(0))


@pytest.mark.parametrize("devices", [jax.devices, partial(absent_devices, "h100", 8)])
def test_what_initialisation_needs_on_the_device_that_holds_most(devices):
    """Lazy: its shards, and some of a leaf. Eager: all of the state, and then its shards."""
    wide = dataclasses.replace(TINY, vocab_size=4096, embed_dim=256, num_layers=1)
    lazy, eager = (
        tiny_config("fsdp=2,tensor=4", model=wide, init=init) for init in ("lazy", "eager")
    )
    assert lazy.mesh is not None
    mesh = make_mesh(lazy.mesh, wide, devices())
    state = abstract_state(lazy, mesh)
    shards = bytes_per_device(state)
    whole = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert whole > 7 * shards
    assert shards <= init_peak_bytes(lazy, mesh) < 2 * shards
    assert init_peak_bytes(eager, mesh) >= whole + shards
    if mesh.devices.flat[0].platform == "cpu":
        return
    # Two thirds of the state wait in the memory of a GPU's host.
    offloaded = dataclasses.replace(eager.memory, offload="moments")
    peak = init_peak_bytes(dataclasses.replace(eager, memory=offloaded), mesh)
    assert (whole + shards) / 3 < peak < whole


def test_tokens_that_do_not_count_are_left_out():
    """With 4, 4, 1 and 2 valid tokens in the rows of two devices, the loss is the sum over
    tokens by their number, and a part of the batch without any gives no NaN."""
    config = tiny_config("data=2,tensor=2", accumulate=4)
    mesh = mesh_of(config)
    batch = random_batch(config, mesh)
    counts = np.array([4, 4, 1, 2, 0, 0, 0, 0])
    valid = np.arange(32) < counts[:, None]
    batch = dataclasses.replace(batch, valid_BT=jax.device_put(valid, batch.valid_BT.sharding))
    state = initial_state(config, mesh)
    evaluate = lower_eval_step(tiny_config("data=2,tensor=2"), mesh).compile()
    zero = jax.device_put((np.float32(0), np.int32(0)), jax.NamedSharding(mesh, jax.P()))
    total, count = evaluate(state.params, zero, batch)
    new, metrics = lower_train_step(config, mesh).compile()(state, batch)
    assert int(metrics["tokens"]) == int(count) == counts.sum()
    assert float(metrics["loss"]) == pytest.approx(float(total) / counts.sum(), rel=1e-6)
    assert np.isfinite(float(metrics["grad_norm"]))

    nothing = jax.device_put(np.zeros_like(valid), batch.valid_BT.sharding)
    step = lower_train_step(config, mesh).compile()
    new, metrics = step(new, dataclasses.replace(batch, valid_BT=nothing))
    assert float(metrics["loss"]) == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(to_numpy(new.params)))


def test_recomputation_saves_memory_on_the_cpu_too():
    peaks = []
    for remat in ("none", "dots", "full"):
        deep = dataclasses.replace(TINY, num_layers=8)
        config = tiny_config("tensor=2", model=deep, remat=remat)
        peaks.append(peak_bytes(lower_train_step(config, mesh_of(config)).compile()))
    assert peaks[0] > peaks[1] > peaks[2]


def test_gradients_are_clipped_to_the_norm():
    """After one step the first moment is a tenth of the clipped gradient."""
    config = tiny_config("fsdp=2,tensor=2", optim=OptimConfig(warmup=0, beta1=0.9, clip=0.01))
    mesh = mesh_of(config)
    step, state = lower_train_step(config, mesh).compile(), initial_state(config, mesh)
    state, metrics = step(state, random_batch(config, mesh))
    assert float(metrics["grad_norm"]) > 0.1
    mu = flat(to_numpy([part.mu for part in adam_states(state).values()]))
    assert np.linalg.norm(mu) == pytest.approx(0.1 * 0.01, rel=1e-4)


def test_loss_falls_and_state_counts():
    config = tiny_config("tensor=4", steps=30, optim=OptimConfig(lr=1e-2, min_lr=1e-3, warmup=0))
    mesh = mesh_of(config)
    step, state = lower_train_step(config, mesh).compile(), create_state(config, mesh)
    batch, losses = random_batch(config, mesh), []
    for _ in range(30):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(np.log(97), rel=0.02)
    assert losses[-1] < 0.5 * losses[0]
    assert int(state.step) == 30


def test_deterministic_kernels_are_asked_of_a_gpus_compiler(tmp_path):
    """Of that one alone: the CPU's would refuse options that are not its own."""
    config = tiny_config("tensor=2")
    asked = dataclasses.replace(config, deterministic=True)
    assert lower_eval_step(asked, mesh_of(config)).compile() is not None
    mesh = make_mesh(config.mesh, config.model, absent_devices("h100", 2, 1))
    said = {}
    for name, lowered in {
        "plain": lower_eval_step(config, mesh),
        "eval": lower_eval_step(asked, mesh),
        "train": lower_train_step(asked, mesh),
    }.items():
        folder = tmp_path / name
        lowered.compile(compiler_options={**ABSENT_GPU_OPTIONS, "xla_dump_to": str(folder)})
        (options,) = folder.glob("*debug_options")
        said[name] = "xla_gpu_deterministic_ops: true" in options.read_text()
    assert said == {"plain": False, "eval": True, "train": True}
