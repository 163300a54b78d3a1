"""Gradients of the vocabulary's tables, a part of their rows at a time.

A float32 gradient of a whole table would be one of the largest arrays of a step. Here
row r belongs to part r mod C of C parts, so that each part lies on all devices as the
table does. The head's logits are made again, part by part, from the log-sum-exp kept.

Letters: B batch, T sequence, D model width, V vocabulary; U = V/C rows of a part,
R = B·(a chunk of T). Activations come with their sequence whole on every device.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from tpjax.layers import gather_fsdp
from tpjax.mesh import BATCH, TENSOR
from tpjax.sharding import activation_spec, weight_spec

_TOKENS, _X, _TABLE = activation_spec("BT"), activation_spec("BTD"), weight_spec("VD")


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
) -> Array:
    """Gradient of the loss in part `part` of the head's rows, [U, D]: added up in float32,
    returned in the compute dtype.

    Args:
        head_UD: those rows, as they are stored.
        lse_BT: of `loss_and_x_gradient`.
        chunks: of the sequence, whose logits exist one at a time.
        others: as of `next_token_loss`.
    """

    def local(x: Array, head: Array, part, targets, valid, lse, scale) -> Array:
        head_UD = gather_fsdp(head, axis=1)
        rows_U = _rows(head_UD.shape[0], part, parts)
        size, D = x.shape[1] // chunks, x.shape[2]

        def one(total_UD: Array, i: Array) -> tuple[Array, None]:
            def chunk(x: Array) -> Array:
                return jax.lax.dynamic_slice_in_dim(x, i * size, size, axis=1)

            x_RD = chunk(x).reshape(-1, D)
            target_R, valid_R, lse_R = (chunk(a).reshape(-1, 1) for a in (targets, valid, lse))
            with jax.named_scope("logits"):
                logits_RU = jnp.einsum(
                    "RD,UD->RU", x_RD, head_UD, preferred_element_type=jnp.float32
                )
            with jax.named_scope("logits_gradient"):
                p_RU = jnp.where(rows_U < vocab_size, jnp.exp(logits_RU - lse_R), 0)
                d_RU = jnp.where(valid_R, p_RU - (target_R == rows_U), 0) * scale
            with jax.named_scope("head_gradient"):
                total_UD += jnp.einsum(
                    "RU,RD->UD", d_RU.astype(x.dtype), x_RD, preferred_element_type=jnp.float32
                )
            return total_UD, None

        total, _ = jax.lax.scan(one, _zeros(head_UD.shape), jnp.arange(chunks))
        return _summed(total.astype(x.dtype))

    targets, valid, lse = (reshard(tokens, _TOKENS) for tokens in (targets_BT, valid_BT, lse_BT))
    in_specs = (_X, _TABLE, P(), *[_TOKENS] * 3, P())
    sweep = jax.shard_map(local, in_specs=in_specs, out_specs=_TABLE)
    return sweep(x_BTD, head_UD, part, targets, valid, lse, scale)


def embedding_gradient(
    dx_BTD: Array, tokens_BT: Array, part: Array, parts: int, num_rows: int
) -> Array:
    """Gradient in part `part` of the embedding's `num_rows` rows, [U, D]: added up in
    float32, returned in the compute dtype.

    Args:
        dx_BTD: gradient of what the embedding gives.
    """
    mesh = jax.sharding.get_abstract_mesh().shape
    local_rows = num_rows // parts // (mesh["tensor"] * mesh["kv_copy"])

    def local(dx: Array, tokens: Array, part: Array) -> Array:
        row = tokens - jax.lax.axis_index(TENSOR) * local_rows * parts
        mine = (row >= 0) & (row < local_rows * parts) & (row % parts == part)
        place = jnp.where(mine, row // parts, local_rows)
        zeros = _zeros((local_rows, dx.shape[-1]))
        total = zeros.at[place].add(dx.astype(jnp.float32), mode="drop")
        return _summed(total.astype(dx.dtype))

    lookup = jax.shard_map(local, in_specs=(_X, _TOKENS, P()), out_specs=_TABLE)
    return lookup(dx_BTD, reshard(tokens_BT, _TOKENS), part)


def _rows(local_rows: int, part: Array, parts: int) -> Array:
    """The place in the vocabulary of each of a device's rows of the part."""
    first = jax.lax.axis_index(TENSOR) * local_rows
    return (first + jnp.arange(local_rows)) * parts + part


def _zeros(shape: tuple[int, ...]) -> Array:
    return jax.lax.pcast(jnp.zeros(shape, jnp.float32), BATCH + TENSOR, to="varying")


def _summed(gradient_UD: Array) -> Array:
    gradient_UD = jax.lax.psum_scatter(gradient_UD, "fsdp", scatter_dimension=1, tiled=True)
    return jax.lax.psum(gradient_UD, "data")
