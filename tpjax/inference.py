"""A trained model ready to be asked: of a model folder, or of a run's newest checkpoint."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax
from jax.sharding import Mesh

from tpjax.checkpoint import choose
from tpjax.checks import check_fields, require
from tpjax.config import DataConfig, MemoryConfig, MeshConfig, TrainConfig
from tpjax.folder import CHECKPOINTS
from tpjax.hf.load import Weights
from tpjax.mesh import make_mesh, start_devices
from tpjax.presets import preset
from tpjax.resolve import resolve, tensor_sizes
from tpjax.restore import Restoration
from tpjax.resume import settings_of
from tpjax.state import abstract_state, joined
from tpjax.tokenizer import Tokenizer, load_tokenizer

NO_BASE = "checkpoint {} has adapters of a model with random weights, which are kept nowhere."


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Which model, and how it lies on the devices."""

    model: str = ""
    """A Hugging Face folder or a GGUF file."""
    out: str = ""
    """A run's folder: the newest checkpoint in it."""
    tokenizer: str = "auto"
    """As of training; by default the model's own."""
    mesh: MeshConfig | None = None
    """Devices per axis, such as fsdp=2,tensor=4; by default all on tensor as far as the
    heads allow, the rest on data."""
    devices: int = 1
    """Simulated CPU devices where no GPU is there."""
    params: Literal["auto", "fp32", "bf16", "int8", "nf4"] = "auto"
    """How parameters are kept; auto is as the run has them, or the compute format."""
    compute: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Matmuls and activations; auto is bf16 on a GPU and fp32 on a CPU."""

    def __post_init__(self) -> None:
        check_fields(self, positive="devices")


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A model on its mesh.

    Attributes:
        config: resolved; only model, mesh, memory and data say something.
        notes: what is to be said of where it is from.
    """

    config: TrainConfig
    mesh: Mesh
    tokenizer: Tokenizer
    params: dict
    notes: list[str]


def load(source: ModelSource, rows: int, seq_len: int) -> Loaded:
    """The model, its weights in their shards.

    Args:
        rows: sequences at a time; rounded up to what the mesh's batch shards divide.
        seq_len: their length.

    Raises:
        ConfigError: there is no such model or no weights, or the mesh does not go with it.
    """
    require(
        bool(source.model) != bool(source.out),
        "name a model folder with --model, or a run's folder with --out.",
    )
    checkpoint = None
    if source.out:
        checkpoint = choose(Path(source.out) / CHECKPOINTS, "must")
        assert checkpoint is not None  # there must be one
        run = settings_of(checkpoint)
    else:
        run = TrainConfig(model=preset(source.model))
        require(bool(run.model.folder), f"model {source.model} has no weights; name a folder.")
    devices = start_devices(source.devices)
    config = _resolved(source, run, rows, seq_len, devices)
    assert config.mesh is not None  # resolved
    mesh = make_mesh(config.mesh, config.model, devices)
    tokenizer = load_tokenizer(config)
    if checkpoint is None:
        weights = Weights(config, mesh)
        params, notes = weights.params(), weights.notes
        return Loaded(config=config, mesh=mesh, tokenizer=tokenizer, params=params, notes=notes)
    restoration = Restoration(checkpoint, config, mesh)
    structure = jax.tree.structure(abstract_state(config, mesh).params)
    units = [value for _, value in restoration.parameters()]
    params = jax.tree.unflatten(structure, jax.tree.leaves(units))
    if config.model.adapted:
        require(bool(config.model.folder), NO_BASE.format(checkpoint.path))
        params = joined(params, Weights(config, mesh).params())
    notes = [*checkpoint.skipped, f"parameters of {checkpoint.path}", *restoration.notes]
    return Loaded(config=config, mesh=mesh, tokenizer=tokenizer, params=params, notes=notes)


def _resolved(
    source: ModelSource, run: TrainConfig, rows: int, seq_len: int, devices: list
) -> TrainConfig:
    """The run's model and formats, on the devices there are and without what training needs."""
    platform = devices[0].platform
    compute = source.compute
    if compute == "auto":
        compute = "bf16" if platform == "gpu" else "fp32"
    params = source.params
    if params == "auto":
        params = run.memory.params if source.out else "bf16" if compute != "fp32" else "fp32"
    memory = MemoryConfig(
        remat="none",
        params=params,
        compute=compute,
        moments=run.memory.moments,
        sequence_parallel=False,
        tie_embeddings=run.model.tie_embeddings,
    )
    name = run.data.tokenizer if source.tokenizer == "auto" else source.tokenizer
    mesh = source.mesh
    if mesh is None:  # as few rows are filled up as can be
        tensor = max(t for t in tensor_sizes(run.model) if len(devices) % t == 0)
        mesh = MeshConfig(data=len(devices) // tensor, tensor=tensor)
    shards = mesh.data * mesh.fsdp
    data = DataConfig(tokenizer=name, batch_size=-(-rows // shards) * shards, seq_len=seq_len)
    config = dataclasses.replace(run, memory=memory, data=data, mesh=mesh)
    return resolve(config, num_devices=len(devices), platform=platform, trains=False)
