"""A run's configuration for the devices there are: nothing left to decide.

Fills in what is automatic and checks every size that an axis has to divide.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from tpjax.config import ConfigError, MeshConfig, ModelConfig, TrainConfig, require
from tpjax.quant import block_size

MAX_LOGITS_CHUNK_BYTES = 64 * 1024**2  # of one chunk's float32 logits, per device

MAX_CHECKPOINT_STEPS = 1000  # between checkpoints, where nothing is said of them

MIN_PART_TOKENS = 2048  # of a part of a layer's work: enough for matmuls to be efficient


def resolve(
    config: TrainConfig, *, num_devices: int, platform: str, trains: bool = True
) -> TrainConfig:
    """The same run with nothing left to decide, or a `ConfigError`.

    Args:
        num_devices: devices there are (or are planned for), over all processes.
        platform: "gpu" or "cpu".
        trains: whether weights are to change.
    """
    model, memory, optim, data = config.model, config.memory, config.optim, config.data
    if memory.tie_embeddings is not None:
        model = dataclasses.replace(model, tie_embeddings=memory.tie_embeddings)
    if config.lora.lora_rank:
        model = dataclasses.replace(model, lora=config.lora)
    config = dataclasses.replace(config, model=model)
    _check_lora(config)
    require(
        not trains or memory.params != "nf4" or bool(model.adapted),
        "params=nf4 is too coarse for weights that are to change in small steps; train adapters "
        "beside them (--lora-rank 16), or use --params=int8.",
    )
    mesh = config.mesh or _default_mesh(config, num_devices)
    _check_mesh(config, mesh, num_devices)
    _check_remat(config)
    _check_blocks(config, mesh)
    recovery = config.recovery
    if recovery.checkpoint_every is None:
        every = min(max(config.steps // 10, 1), MAX_CHECKPOINT_STEPS)
        recovery = dataclasses.replace(recovery, checkpoint_every=every)
    if optim.warmup is None:
        optim = dataclasses.replace(optim, warmup=config.steps // 10)
    elif optim.warmup >= config.steps:
        raise ConfigError(
            f"warmup={optim.warmup} must be below steps={config.steps}, or the learning rate never "
            "gets there; shorten --warmup."
        )
    compute = memory.compute
    if compute == "auto":
        compute = "bf16" if platform == "gpu" else "fp32"
    memory = dataclasses.replace(
        memory,
        compute=compute,
        attention=_attention(config, compute, platform),
        sequence_parallel=_splits_sequence(config) and mesh.tensor > 1,
        tie_embeddings=model.tie_embeddings,
    )
    if data.tokenizer == "auto":
        data = dataclasses.replace(data, tokenizer=model.folder or "bytes")
    _check_update(config, compute)
    memory = dataclasses.replace(memory, split=_split(config, mesh))
    memory = dataclasses.replace(memory, loss_chunks=_loss_chunks(config, mesh))
    parts = {"mesh": mesh, "memory": memory, "optim": optim, "data": data, "recovery": recovery}
    return dataclasses.replace(config, **parts, devices=num_devices)


def _attention(
    config: TrainConfig, compute: str, platform: str
) -> Literal["cudnn", "xla", "materialised"]:
    """cuDNN's attention where it takes the shapes, which it is strict about."""
    memory = config.memory
    if memory.attention == "materialised":
        require(
            "attention" not in memory.kept,
            f"remat={memory.remat}: attention=materialised has no attention to keep, since its "
            "backward pass needs all scores; use --remat=none, dots or full.",
        )
        return "materialised"
    H, T = config.model.head_dim, config.data.seq_len
    obstacles = {
        "a GPU": platform == "gpu",
        "compute=bf16 or fp16": compute in ("bf16", "fp16"),
        f"a head width of at most 128 and a multiple of 8, not {H}": H <= 128 and H % 8 == 0,
        f"an even seq_len, not {T}": T % 2 == 0,
    }
    missing = [need for need, met in obstacles.items() if not met]
    if memory.attention == "cudnn" and missing:
        raise ConfigError(f"attention=cudnn needs {' and '.join(missing)}; use --attention=xla.")
    return "xla" if missing or memory.attention == "xla" else "cudnn"


def _check_remat(config: TrainConfig) -> None:
    """Policies that would do nothing."""
    memory, L = config.memory, config.model.num_layers
    require(
        memory.remat != "nested" or len(_divisors(L)) > 2,
        f"remat=nested cannot split the {L} layers of {config.model.name} into equal groups; use "
        "--remat=full.",
    )
    require(
        memory.remat != "none" or not memory.offloads_residuals,
        f"offload={memory.offload} needs a choice of what to keep, and remat=none keeps "
        "everything; use --remat=dots or one that keeps less.",
    )


def _check_lora(config: TrainConfig) -> None:
    """Adapters that would not be there, or not be trained."""
    model, lora = config.model, config.model.lora
    require(
        lora.lora_targets == "all" or "gate" not in lora.targets or model.mlp == "swiglu",
        f"lora_targets={lora.lora_targets}: {model.name} has no gate.",
    )
    require(
        not model.adapted or config.memory.update == "whole",
        "lora_rank does not go with update=layerwise: adapters are so small that their gradients "
        "may well be there together; use --update=whole.",
    )


def _check_update(config: TrainConfig, compute: str) -> None:
    """What the layer-by-layer update cannot do."""
    memory, data = config.memory, config.data
    if memory.update == "whole":
        require(
            memory.split == "auto" or memory.split == 1,
            f"split={memory.split} is for --update=layerwise; --accumulate splits the batch of a "
            "whole update.",
        )
        return
    require(
        memory.remat in ("full", "nested"),
        f"remat={memory.remat} does not go with update=layerwise, which runs each layer again "
        "going back; use --remat=full or --remat=nested.",
    )
    require(
        compute != "fp16",
        "compute=fp16 does not go with update=layerwise: a gradient that overflows is found when "
        "other layers are updated already; use --compute=bf16 or --update=whole.",
    )
    require(
        data.accumulate == 1,
        f"accumulate={data.accumulate} does not go with update=layerwise, which uses each gradient "
        "at once; use --split, which lowers the memory of a layer's work as well.",
    )
    require(
        memory.embedding == "sharded",
        "embedding=replicated does not go with update=layerwise; use one of them.",
    )


def _check_blocks(config: TrainConfig, mesh: MeshConfig) -> None:
    """Blocks of quantised arrays along D stay whole on the mesh."""
    D, memory = config.model.embed_dim, config.memory
    if memory.params not in ("int8", "nf4") and memory.moments not in ("int8", "factored"):
        return
    blocks = D // block_size(D)
    if memory.params == "nf4":
        blocks = math.gcd(blocks, D // block_size(D, bits=4))
    require(
        blocks % mesh.fsdp == 0,
        f"fsdp={mesh.fsdp} would cut the quantised blocks of the model width {D}; with int8, nf4 "
        f"or factored state fsdp may be {', '.join(map(str, _divisors(blocks)))}.",
    )


def _splits_sequence(config: TrainConfig) -> bool:
    """Whether a tensor axis would shard the sequence of the residual stream."""
    return config.memory.sequence_parallel and config.data.seq_len > 1


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def tensor_sizes(model: ModelConfig) -> list[int]:
    """Tensor axes that split N, F and V evenly, and K evenly or by whole copies."""
    return [
        t
        for t in _divisors(model.num_heads)
        if model.mlp_dim % t == 0 and (model.num_kv_heads % t == 0 or t % model.num_kv_heads == 0)
    ]


def _default_mesh(config: TrainConfig, num_devices: int) -> MeshConfig:
    """All devices on `tensor` as far as the model allows, the rest on `data`."""
    data = config.data
    sizes = [
        tensor
        for tensor in tensor_sizes(config.model)
        if not _splits_sequence(config) or data.seq_len % tensor == 0
    ]
    for tensor in reversed(sizes):
        if num_devices % tensor == 0 and data.part_size % (num_devices // tensor) == 0:
            return MeshConfig(data=num_devices // tensor, tensor=tensor)
    raise ConfigError(
        f"no mesh of {num_devices} devices fits {config.model.name}: with seq_len={data.seq_len} "
        f"tensor may be {', '.join(map(str, sizes))} (more of them: --no-sequence-parallel), and "
        f"the other devices must divide batch_size/accumulate={data.part_size}."
    )


def _check_mesh(config: TrainConfig, mesh: MeshConfig, num_devices: int) -> None:
    """Every size that an axis has to divide, with the sizes that work."""
    model, data = config.model, config.data
    require(
        mesh.num_devices == num_devices,
        f"mesh {mesh} has {mesh.num_devices} devices, but there are {num_devices}; "
        "make the axes multiply to that (simulated CPU devices: --devices "
        f"{mesh.num_devices}).",
    )
    require(
        mesh.tensor in (sizes := tensor_sizes(model)),
        f"tensor={mesh.tensor} does not split {model.name} ({model.num_heads} heads, "
        f"{model.num_kv_heads} key/value heads, feed-forward {model.mlp_dim}); "
        f"tensor may be {', '.join(map(str, sizes))}.",
    )
    require(
        model.embed_dim % mesh.fsdp == 0,
        f"fsdp={mesh.fsdp} does not divide the model width {model.embed_dim}; use a divisor of it.",
    )
    require(
        not model.adapted or model.embed_dim % (mesh.fsdp * mesh.tensor) == 0,
        f"mesh {mesh} does not split adapters: fsdp × tensor must divide the model width "
        f"{model.embed_dim}.",
    )
    shards = mesh.data * mesh.fsdp * data.accumulate
    require(
        data.batch_size % shards == 0,
        f"batch_size={data.batch_size} does not split into data × fsdp × accumulate = {shards} "
        f"parts; use a multiple of {shards}, such as {-(-data.batch_size // shards) * shards}.",
    )
    longest = model.max_seq_len
    require(
        data.seq_len <= longest or model.rope is not None,
        f"seq_len={data.seq_len} exceeds the {longest} learned positions of {model.name}.",
    )
    if _splits_sequence(config):
        require(
            data.seq_len % mesh.tensor == 0,
            f"seq_len={data.seq_len} does not split over tensor={mesh.tensor}; use a multiple of "
            f"{mesh.tensor}, or --no-sequence-parallel.",
        )


def _split(config: TrainConfig, mesh: MeshConfig) -> int:
    """Parts of the batch in a layer of the layer-by-layer update; each divides the rows of a
    device evenly."""
    rows = config.data.batch_size // (mesh.data * mesh.fsdp)
    if config.memory.split != "auto":
        require(
            rows % config.memory.split == 0,
            f"split={config.memory.split} does not divide the {rows} sequences of a device; "
            f"it may be {', '.join(map(str, _divisors(rows)))}.",
        )
        return config.memory.split
    if config.memory.update == "whole" or mesh.fsdp > 1:
        return 1
    tokens = rows * config.data.seq_len
    return max(d for d in _divisors(rows) if d == 1 or tokens // d >= MIN_PART_TOKENS)


def _loss_chunks(config: TrainConfig, mesh: MeshConfig) -> int:
    """Chunks of the sequence in the loss; each divides a device's tokens evenly."""
    data, V = config.data, config.model.padded_vocab_size
    tokens = data.seq_len // (mesh.tensor if _splits_sequence(config) else 1)
    if chunks := config.memory.loss_chunks:
        require(
            tokens % chunks == 0,
            f"loss_chunks={chunks} does not divide the {tokens} tokens per sequence of a device; "
            f"it may be {', '.join(map(str, _divisors(tokens)))}.",
        )
        return chunks
    rows = data.part_size // (mesh.data * mesh.fsdp)
    logits_bytes = rows * data.seq_len * (V // mesh.tensor) * 4
    fitting = [c for c in _divisors(tokens) if logits_bytes / c <= MAX_LOGITS_CHUNK_BYTES]
    return fitting[0] if fitting else tokens
