"""Eight simulated CPU devices for all tests; small models on any mesh of them."""

from __future__ import annotations

import dataclasses
import os
from functools import lru_cache
from types import SimpleNamespace

# Machine code compiles twice as fast unoptimised; what XLA makes of a program
# (its fusions, buffers and collectives) is decided before and stays the same.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)

import numpy as np
import pytest
from jax.sharding import Mesh

from tpjax.checkpoint import choose
from tpjax.config import (
    DataConfig,
    MemoryConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    RecoveryConfig,
    RopeConfig,
    TrainConfig,
)
from tpjax.data import place
from tpjax.mesh import make_mesh
from tpjax.optim import AdamState
from tpjax.resolve import resolve
from tpjax.restore import Restoration
from tpjax.resume import settings_of
from tpjax.state import Batch, TrainState, abstract_state, create_state
from tpjax.step import lower_eval_step, lower_train_step

# Eight query heads and four key/value heads, so that tensor=8 needs copies; a
# vocabulary that no axis divides.
TINY = ModelConfig(
    name="tiny",
    vocab_size=97,
    num_layers=2,
    embed_dim=32,
    num_heads=8,
    num_kv_heads=4,
    head_dim=8,
    mlp_dim=64,
    max_seq_len=32,
)
TINY_GPT2 = dataclasses.replace(
    TINY,
    name="tiny-gpt2",
    num_kv_heads=8,
    norm="layernorm",
    rope=None,
    mlp="gelu",
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    norm_bias=True,
)
TINY_QWEN = dataclasses.replace(
    TINY,
    name="tiny-qwen",
    qkv_bias=True,
    qk_norm=True,
    tie_embeddings=False,
    sliding_window=5,
    rope=RopeConfig(theta=1000.0, kind="linear", factor=2.0),
)


def tiny_config(
    mesh: str = "tensor=1",
    *,
    model: ModelConfig = TINY,
    accumulate: int = 1,
    steps: int = 10,
    optim: OptimConfig | None = None,
    **memory,
) -> TrainConfig:
    """A resolved run of a tiny model on a mesh of simulated devices."""
    sizes = MeshConfig.parse(mesh)
    config = TrainConfig(
        model=model,
        mesh=sizes,
        memory=MemoryConfig(**{"loss_chunks": 2, **memory}),
        optim=optim or OptimConfig(lr=1e-3, min_lr=1e-4, warmup=0),
        data=DataConfig(batch_size=8, seq_len=32, accumulate=accumulate),
        steps=steps,
    )
    return resolve(config, num_devices=sizes.num_devices, platform="cpu")


def mesh_of(config: TrainConfig) -> Mesh:
    assert config.mesh is not None
    return make_mesh(config.mesh, config.model, jax.devices()[: config.mesh.num_devices])


def initial_state(config: TrainConfig, mesh: Mesh) -> TrainState:
    """A new state on the mesh. Made once on one device, since every mesh starts from the
    same bits (a test of its own)."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, mesh))
    memory = (config.memory.params, config.memory.moments, config.memory.compute)
    made = _state_on_one_device(config.model, config.model.table_parts, *memory)
    return jax.device_put(made, shardings)


@lru_cache
def _state_on_one_device(
    model: ModelConfig, table_parts: int, params: str, moments: str, compute: str
) -> TrainState:
    config = tiny_config(model=model, params=params, moments=moments, compute=compute)
    return to_numpy(create_state(config, mesh_of(config)))


def adam_states(state: TrainState) -> dict[str, AdamState]:
    """Adam's memory of each part of the parameters: the rest, every table, the blocks."""
    tables = {name: table[0] for name, table in state.opt_state["tables"].items()}
    return {"rest": state.opt_state["rest"][0], **tables, "blocks": state.opt_state["blocks"][0]}


def random_rows(config: TrainConfig, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, targets and validity with some positions left out."""
    rng = np.random.default_rng(seed)
    shape = (config.data.batch_size, config.data.seq_len)
    tokens = rng.integers(0, config.model.vocab_size, (shape[0], shape[1] + 1), np.int32)
    return tokens[:, :-1], tokens[:, 1:], rng.random(shape) < 0.8


def random_batch(config: TrainConfig, mesh: Mesh, seed: int = 0) -> Batch:
    return place(random_rows(config, seed), mesh)


def tiny_run(tmp_path, *, steps: int = 10, **settings) -> TrainConfig:
    """A run of a tiny model on bytes of a small text, into `tmp_path`/run."""
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("the quick brown fox jumps over the lazy dog. " * 60)
    run = TrainConfig(
        model=dataclasses.replace(TINY, vocab_size=257, name="tiny-bytes"),
        mesh=MeshConfig(data=2, tensor=2),
        optim=OptimConfig(lr=1e-2, min_lr=1e-3),
        data=DataConfig(corpus=(str(corpus),), batch_size=8, seq_len=32),
        recovery=RecoveryConfig(checkpoint_every=0),
        steps=steps,
        out=str(tmp_path / "run"),
    )
    return dataclasses.replace(run, **settings)


def to_numpy(tree):
    return jax.tree.map(np.asarray, tree)


def largest_difference(a, b) -> float:
    """The greatest difference of two trees, relative to the largest value of the first."""
    a, b = ([np.asarray(x, np.float64) for x in jax.tree.leaves(tree)] for tree in (a, b))
    largest = max(np.abs(x).max() for x in a)
    return max(float(np.abs(x - y).max()) for x, y in zip(a, b, strict=True)) / largest


@lru_cache
def _compiled(lower, config: TrainConfig, mesh: Mesh) -> jax.stages.Compiled:
    return lower(config, mesh).compile()


@pytest.fixture
def quick_runs(monkeypatch):
    """Whole runs whose programs are compiled once for all tests, which are not about them."""

    def once(lower):
        def lowered(config: TrainConfig, mesh: Mesh):
            of = dataclasses.replace(config, out="", recovery=RecoveryConfig(), seed=0, force=False)
            return SimpleNamespace(compile=lambda: _compiled(lower, of, mesh))

        return lowered

    monkeypatch.setattr("tpjax.run.lower_train_step", once(lower_train_step))
    monkeypatch.setattr("tpjax.run.lower_eval_step", once(lower_eval_step))
    monkeypatch.setattr("tpjax.run.create_state", initial_state)
    monkeypatch.setattr("tpjax.loop.sample", lambda *_: [])


@pytest.fixture(autouse=True, scope="session")
def _jax():
    """Tests compile what they test, on eight devices whichever test comes first."""
    jax.config.update("jax_enable_compilation_cache", False)
    assert len(jax.devices()) == 8


def params_of(out) -> dict[str, np.ndarray]:
    """Of the newest checkpoint, as the run wrote them."""
    checkpoint = choose(out / "checkpoints", "must")
    assert checkpoint is not None
    config = settings_of(checkpoint)
    found = Restoration(checkpoint, config, mesh_of(config)).parameters()
    return {path: np.asarray(value) for path, value in found}
