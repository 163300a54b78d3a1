"""A run's configuration for the devices there are: nothing left to decide.

Fills in what is automatic and checks every size that an axis has to divide.
"""

from __future__ import annotations

import dataclasses

from tpjax.config import ConfigError, MeshConfig, ModelConfig, TrainConfig, require

MAX_LOGITS_CHUNK_BYTES = 64 * 1024**2  # of one chunk's float32 logits, per device


def resolve(config: TrainConfig, *, num_devices: int, platform: str) -> TrainConfig:
    """The same run with nothing left to decide, or a `ConfigError`.

    Args:
        num_devices: devices there are (or are planned for), over all processes.
        platform: "gpu" or "cpu".
    """
    model, memory = config.model, config.memory
    if memory.tie_embeddings is not None:
        model = dataclasses.replace(model, tie_embeddings=memory.tie_embeddings)
    config = dataclasses.replace(config, model=model)
    mesh = config.mesh or _default_mesh(config, num_devices)
    _check_mesh(config, mesh, num_devices)
    compute = memory.compute
    if compute == "auto":
        compute = "bf16" if platform == "gpu" else "fp32"
    attention = memory.attention
    if attention == "auto":
        attention = "cudnn" if platform == "gpu" and compute == "bf16" else "xla"
    require(
        attention != "cudnn" or (platform == "gpu" and compute == "bf16"),
        "attention=cudnn needs a GPU and compute=bf16; use --attention=xla.",
    )
    sequence_parallel = memory.sequence_parallel and mesh.tensor > 1 and config.data.seq_len > 1
    memory = dataclasses.replace(
        memory,
        compute=compute,
        attention=attention,
        sequence_parallel=sequence_parallel,
        tie_embeddings=model.tie_embeddings,
    )
    optim = config.optim
    if optim.warmup is None:
        optim = dataclasses.replace(optim, warmup=config.steps // 10)
    config = dataclasses.replace(config, mesh=mesh, memory=memory, optim=optim, devices=num_devices)
    return dataclasses.replace(
        config, memory=dataclasses.replace(memory, loss_chunks=_loss_chunks(config, mesh))
    )


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _tensor_sizes(model: ModelConfig) -> list[int]:
    """Tensor axes that split N, F and V evenly, and K evenly or by whole copies."""
    return [
        t
        for t in _divisors(model.num_heads)
        if model.mlp_dim % t == 0 and (model.num_kv_heads % t == 0 or t % model.num_kv_heads == 0)
    ]


def _default_mesh(config: TrainConfig, num_devices: int) -> MeshConfig:
    """All devices on `tensor` as far as the model allows, the rest on `data`."""
    data = config.data
    rows = data.batch_size // data.accumulate
    for tensor in reversed(_tensor_sizes(config.model)):
        sequence_splits = not config.memory.sequence_parallel or data.seq_len % tensor == 0
        if num_devices % tensor == 0 and rows % (num_devices // tensor) == 0 and sequence_splits:
            return MeshConfig(data=num_devices // tensor, tensor=tensor)
    raise ConfigError(
        f"no mesh of {num_devices} devices fits {config.model.name} with batch_size="
        f"{data.batch_size}, accumulate={data.accumulate}: tensor may be "
        f"{_tensor_sizes(config.model)}, and the other devices must divide batch_size/accumulate."
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
        mesh.tensor in (sizes := _tensor_sizes(model)),
        f"tensor={mesh.tensor} does not split {model.name} ({model.num_heads} heads, "
        f"{model.num_kv_heads} key/value heads, feed-forward {model.mlp_dim}); "
        f"tensor may be {', '.join(map(str, sizes))}.",
    )
    require(
        model.embed_dim % mesh.fsdp == 0,
        f"fsdp={mesh.fsdp} does not divide the model width {model.embed_dim}; use a divisor of it.",
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
    if config.memory.sequence_parallel and data.seq_len > 1:
        require(
            data.seq_len % mesh.tensor == 0,
            f"seq_len={data.seq_len} does not split over tensor={mesh.tensor}; use a multiple of "
            f"{mesh.tensor}, or --no-sequence-parallel.",
        )


def _loss_chunks(config: TrainConfig, mesh: MeshConfig) -> int:
    """Chunks of the sequence in the loss; each divides a device's tokens evenly."""
    data, V = config.data, config.model.padded_vocab_size
    tokens = data.seq_len // (mesh.tensor if config.memory.sequence_parallel else 1)
    if chunks := config.memory.loss_chunks:
        require(
            tokens % chunks == 0,
            f"loss_chunks={chunks} does not divide the {tokens} tokens per sequence of a device; "
            f"it may be {', '.join(map(str, _divisors(tokens)))}.",
        )
        return chunks
    rows = data.batch_size // (mesh.data * mesh.fsdp * data.accumulate)
    logits_bytes = rows * data.seq_len * (V // mesh.tensor) * 4
    fitting = [c for c in _divisors(tokens) if logits_bytes / c <= MAX_LOGITS_CHUNK_BYTES]
    return fitting[0] if fitting else tokens
