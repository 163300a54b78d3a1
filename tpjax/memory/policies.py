"""What each remat policy keeps of a run's layers and computes again, without compiling.

Letters: B rows of a device's part of the batch, T sequence, D model width, N query heads,
K key/value heads, H head width, F feed-forward width, L layers, G layers of a group.
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass

import jax
from flax import nnx
from jax.sharding import NamedSharding

from tpjax.config import KEPT, ConfigError, TrainConfig
from tpjax.flops import repeated_flops
from tpjax.mesh import abstract_mesh
from tpjax.model import Block
from tpjax.precision import DTYPES
from tpjax.remat import group_size
from tpjax.resolve import resolve
from tpjax.rope import rope_tables
from tpjax.sharding import bytes_per_device, residual_spec


@dataclass(frozen=True, kw_only=True)
class Policy:
    """One choice of `remat`.

    Attributes:
        remat: as the flag takes it.
        chosen: whether it is the run's.
        kept_bytes: as `kept_bytes`.
        repeated_flops: operations of a step that are done a second time, on all devices.
    """

    remat: str
    chosen: bool
    kept_bytes: int
    repeated_flops: float


def policies(config: TrainConfig) -> list[Policy]:
    """What a resolved run can choose from, what keeps most first. Left out are those than
    which another is better in one figure and no worse in the other, but for the run's own."""
    names = [",".join(some) for n in (1, 2, 3) for some in itertools.combinations(KEPT, n)]
    found = []
    for remat in ("none", "dots", "full", "nested", *names):
        memory = dataclasses.replace(config.memory, remat=remat)
        try:  # nothing is left to decide, so that the platform plays no part
            run = resolve(
                dataclasses.replace(config, memory=memory),
                num_devices=config.devices,
                platform="gpu",
            )
        except ConfigError:  # not with the other settings
            continue
        chosen = set(remat.split(",")) == set(config.memory.remat.split(","))
        flops = repeated_flops(run)
        found.append(
            Policy(remat=remat, chosen=chosen, kept_bytes=kept_bytes(run), repeated_flops=flops)
        )
    figures = [(one.kept_bytes, one.repeated_flops) for one in found]
    best = [
        one
        for one, own in zip(found, figures, strict=True)
        if one.chosen or not any(a <= own[0] and b <= own[1] and (a, b) != own for a, b in figures)
    ]
    return sorted(best, key=lambda one: -one.kept_bytes)


def kept_bytes(config: TrainConfig) -> int:
    """What a resolved run keeps of all layers for the backward pass, per device, wherever
    that is: the host with `offload=residuals`.

    With `nested` also the layers' inputs of the group that is run again, which stay on the
    device. Without remat, what differentiating a layer keeps; XLA may find ways to keep less.
    """
    mesh, memory = config.mesh, config.memory
    assert mesh is not None  # resolved
    if memory.remat == "none":
        return _all_bytes(config)
    D, N, K, H, F, L = (config.model.sizes[letter] for letter in "DNKHFL")
    itemsize = DTYPES[memory.compute].itemsize
    tokens = config.data.part_size * config.data.seq_len // (mesh.data * mesh.fsdp)
    local_tokens = tokens // (mesh.tensor if memory.sequence_parallel else 1)
    heads, kv_heads = N // mesh.tensor, max(1, K // mesh.tensor)
    gated = 2 if config.model.mlp == "swiglu" else 1
    residual = local_tokens * D * itemsize
    tensors = {
        "attention": tokens * heads * (H * itemsize + 4),  # log-sum-exp in float32
        "qkv": tokens * (heads + 2 * kv_heads) * H * itemsize,
        "mlp_in": residual,
        "up": tokens * F // mesh.tensor * gated * itemsize,
    }
    if memory.remat == "nested":
        G = group_size(L)
        return (L // G + G) * residual
    kept = {"qkv", "mlp_in", "up"} if memory.remat == "dots" else memory.kept
    return L * (residual + sum(tensors[name] for name in kept))


def _all_bytes(config: TrainConfig) -> int:
    """What differentiating every layer keeps of the tokens, by tracing one."""
    model, memory, mesh = config.model, config.memory, config.mesh
    assert mesh is not None  # resolved
    # However weights are stored, what is kept is of the compute dtype.
    memory = dataclasses.replace(memory, params="fp32")
    abstract = abstract_mesh(mesh, model)
    with jax.sharding.use_abstract_mesh(abstract):
        graph, weights = nnx.split(nnx.eval_shape(lambda: Block(model, memory, nnx.Rngs(0))))
        x_BTD = jax.ShapeDtypeStruct(
            (config.data.part_size, config.data.seq_len, model.embed_dim),
            DTYPES[memory.compute],
            sharding=NamedSharding(abstract, residual_spec(memory.sequence_parallel)),
        )

        def kept(x_BTD, weights):
            rope = model.rope and rope_tables(model.rope, model.head_dim, x_BTD.shape[1])
            return jax.vjp(lambda x, w: nnx.merge(graph, w)(x, rope), x_BTD, weights)[1]

        leaves = jax.tree.leaves(jax.eval_shape(kept, x_BTD, weights))
    of_tokens = [x for x in leaves if _lies_over_the_batch(x)]
    return model.num_layers * bytes_per_device(of_tokens)


def _lies_over_the_batch(leaf) -> bool:
    """Which every activation does, on any mesh, and no weight or angle."""
    return "data" in str(leaf.sharding.spec[:1])
