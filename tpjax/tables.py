"""Gradients of the vocabulary's tables, a part of their rows at a time.

A float32 gradient of a whole table would be one of the largest arrays of a step. Here
row r belongs to part r mod C of C parts, so that each part lies on all devices as the
table does. The head's logits are made again, part by part, from the log-sum-exp kept.

Letters: B batch, T sequence, D model width, V vocabulary; U = V/C rows of a part,
R = B·(a chunk of T).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from tpjax.layers import gather_fsdp
from tpjax.mesh import BATCH, TENSOR
from tpjax.sharding import activation_spec, residual_spec, weight_spec


def head_gradient(
    x_BTD: Array,
    head_UD: Array,
    part: Array,
    parts: int,
    targets_BT: Array,
    valid_BT: Array,
    lse_BT: Array,
    scale: Array,
    *,
    vocab_size: int,
    chunks: int,
    sequence_parallel: bool,
) -> Array:
    """Gradient of the loss in part `part` of the head's rows, float32 [U, D].

    Args:
        head_UD: those rows, as they are stored.
        lse_BT: of `loss_and_x_gradient`.
        others: as of `next_token_loss`.
    """

    def local(x: Array, head: Array, part, targets, valid, lse, scale) -> Array:
        head_UD = gather_fsdp(head, axis=1)
        rows_U = _rows(head_UD.shape[0], part, parts)
        t, D = x.shape[1:]
        size = t // chunks

        def one(total: Array, i: Array) -> tuple[Array, None]:
            x_BCD = jax.lax.dynamic_slice_in_dim(x, i * size, size, axis=1)
            if sequence_parallel:
                x_BCD = jax.lax.all_gather(x_BCD, TENSOR, axis=1, tiled=True)
            x_RD = x_BCD.reshape(-1, D)

            def column(tokens_BT: Array) -> Array:  # of the chunk, in the order of x_RD
                by_device = tokens_BT.reshape(x.shape[0], -1, t)
                return jax.lax.dynamic_slice_in_dim(by_device, i * size, size, 2).reshape(-1, 1)

            with jax.named_scope("logits"):
                logits_RU = jnp.einsum(
                    "RD,UD->RU", x_RD, head_UD, preferred_element_type=jnp.float32
                )
            with jax.named_scope("logits_gradient"):
                p_RU = jnp.where(rows_U < vocab_size, jnp.exp(logits_RU - column(lse)), 0)
                d_RU = jnp.where(column(valid), p_RU - (column(targets) == rows_U), 0) * scale
            with jax.named_scope("head_gradient"):
                total += jnp.einsum(
                    "RU,RD->UD", d_RU.astype(x.dtype), x_RD, preferred_element_type=jnp.float32
                )
            return total, None

        zeros = jax.lax.pcast(jnp.zeros(head_UD.shape, jnp.float32), BATCH + TENSOR, to="varying")
        return _summed(jax.lax.scan(one, zeros, jnp.arange(chunks))[0])

    tokens_spec, table_spec = activation_spec("BT"), weight_spec("VD")
    x_spec = residual_spec(sequence_parallel)
    tokens = [reshard(tokens, tokens_spec) for tokens in (targets_BT, valid_BT, lse_BT)]
    in_specs = (x_spec, table_spec, P(), *[tokens_spec] * 3, P())
    return jax.shard_map(local, in_specs=in_specs, out_specs=table_spec)(
        x_BTD, head_UD, part, *tokens, scale
    )


def embedding_gradient(
    dx_BTD: Array, tokens_BT: Array, part: Array, parts: int, num_rows: int, sequence_parallel: bool
) -> Array:
    """Gradient in part `part` of the embedding's `num_rows` rows, float32 [U, D].

    Args:
        dx_BTD: gradient of the embedding's result, laid out as `residual_spec`.
    """
    tensor = jax.sharding.get_abstract_mesh().shape
    local_rows = num_rows // parts // (tensor["tensor"] * tensor["kv_copy"])

    def local(dx: Array, tokens: Array, part: Array) -> Array:
        if sequence_parallel:
            dx = jax.lax.all_gather(dx, TENSOR, axis=1, tiled=True)
        row = tokens - jax.lax.axis_index(TENSOR) * local_rows * parts
        mine = (row >= 0) & (row < local_rows * parts) & (row % parts == part)
        zeros = jnp.zeros((local_rows, dx.shape[-1]), jnp.float32)
        zeros = jax.lax.pcast(zeros, BATCH + TENSOR, to="varying")
        total = zeros.at[jnp.where(mine, row // parts, local_rows)].add(
            dx.astype(jnp.float32), mode="drop"
        )
        return _summed(total)

    in_specs = (residual_spec(sequence_parallel), activation_spec("BT"), P())
    return jax.shard_map(local, in_specs=in_specs, out_specs=weight_spec("VD"))(
        dx_BTD, reshard(tokens_BT, activation_spec("BT")), part
    )


def _rows(local_rows: int, part: Array, parts: int) -> Array:
    """The place in the vocabulary of each of a device's rows of the part."""
    first = jax.lax.axis_index(TENSOR) * local_rows
    return (first + jnp.arange(local_rows)) * parts + part


def _summed(gradient_UD: Array) -> Array:
    gradient_UD = jax.lax.psum_scatter(gradient_UD, "fsdp", scatter_dimension=1, tiled=True)
    return jax.lax.psum(gradient_UD, "data")
