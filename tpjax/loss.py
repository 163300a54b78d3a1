"""Next-token cross entropy, vocabulary-parallel and in chunks of the sequence.

Logits, and what is computed from them, exist for one chunk at a time: float32
[B, T/chunks, V/tensor] per device. The gradient is made in the same sweep: what
is kept for the backward pass is that of x_BTD and of the head, and no logits
are made twice.

Letters: B batch, T sequence, D model width, V vocabulary; C = T/chunks, R = B·C rows.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from tpjax.layers import gather_fsdp
from tpjax.mesh import BATCH, TENSOR
from tpjax.sharding import activation_spec, residual_spec, weight_spec

Wanted: TypeAlias = Literal["loss", "gradients", "x_gradient"]


def loss_and_x_gradient(*arguments) -> tuple[Array, Array, Array]:
    """Of the arguments of `next_token_loss`: the loss, its gradient in x_BTD, and lse_BT, the
    float32 log-sum-exp of each position's logits, from which the head's gradient can be made
    (`tables.head_gradient`)."""
    loss, dx_BTD, lse_BT = _sweep(*arguments, wanted="x_gradient")
    return loss, dx_BTD, lse_BT


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def next_token_loss(
    x_BTD: Array,
    head_VD: Array,
    targets_BT: Array,
    valid_BT: Array,
    scale: Array,
    vocab_size: int,
    chunks: int,
    sequence_parallel: bool,
) -> Array:
    """`scale` times the sum over the valid positions of −log p(target), a float32 scalar.

    The caller's scale divides by the count of valid positions of the whole batch, so
    that shards, accumulation steps and devices with few of them weigh right. It is known
    before the gradient is made, so that sums over many tokens stay in float16's range.

    Args:
        x_BTD: the model's output, laid out as `residual_spec`.
        head_VD: the output matrix as it is stored, `weight_spec("VD")`; gathered over
            fsdp here, once for loss and gradient.
        targets_BT: the token each position has to predict; any value where not valid.
        valid_BT: bool, the positions that count.
        scale: float32 scalar.
        vocab_size: tokens there are; the rows of `head_VD` beyond it have no probability.
        chunks: pieces of the sequence, a divisor of a device's tokens per sequence.
        sequence_parallel: whether T of `x_BTD` is sharded over the tensor axis.
    """
    static = (vocab_size, chunks, sequence_parallel)
    arrays = (x_BTD, head_VD, targets_BT, valid_BT, scale)
    return _sweep(*arrays, *static, wanted="loss")[0]


@jax.named_scope("loss")
def _sweep(
    x_BTD: Array,
    head_VD: Array,
    targets_BT: Array,
    valid_BT: Array,
    scale: Array,
    vocab_size: int,
    chunks: int,
    sequence_parallel: bool,
    *,
    wanted: Wanted,
) -> tuple[Array, ...]:
    """(loss,) alone, or with its gradients in x_BTD and head_VD, or with that in x_BTD and
    what the other can be made from later."""
    x_spec, head_spec = residual_spec(sequence_parallel), weight_spec("VD")
    tokens_spec = activation_spec("BT")
    out_specs = {"loss": (), "gradients": (x_spec, head_spec), "x_gradient": (x_spec, tokens_spec)}
    local = jax.shard_map(
        partial(
            _local_sweep,
            vocab_size=vocab_size,
            chunks=chunks,
            sequence_parallel=sequence_parallel,
            wanted=wanted,
        ),
        in_specs=(x_spec, head_spec, tokens_spec, tokens_spec, P()),
        out_specs=(P(), *out_specs[wanted]),
    )
    tokens = (reshard(targets_BT, tokens_spec), reshard(valid_BT, tokens_spec))
    return local(x_BTD, head_VD, *tokens, scale)


def _local_sweep(
    x: Array,
    head: Array,
    targets: Array,
    valid: Array,
    scale: Array,
    *,
    vocab_size: int,
    chunks: int,
    sequence_parallel: bool,
    wanted: Wanted,
) -> tuple[Array, ...]:
    """`_sweep` on one device: all of T for its rows of the head, one chunk after the other."""
    head = gather_fsdp(head, axis=1)
    (B, T), t = targets.shape, x.shape[1]  # t: the tokens of x here, T or T / tensor
    size = t // chunks

    def rows(i: Array, tokens_BT: Array) -> Array:
        """Chunk i of every device's tokens, in the order of a gather of x."""
        by_device = tokens_BT.reshape(B, T // t, t)
        return jax.lax.dynamic_slice_in_dim(by_device, i * size, size, axis=2).reshape(-1)

    def one(carry, i: Array):
        loss, dx, dhead, lse = carry
        x_BCD = jax.lax.dynamic_slice_in_dim(x, i * size, size, axis=1)
        if sequence_parallel:
            x_BCD = jax.lax.all_gather(x_BCD, TENSOR, axis=1, tiled=True)
        x_RD = x_BCD.reshape(-1, x.shape[-1])
        with jax.named_scope("logits"):
            chunk = _Chunk(x_RD, head, rows(i, targets), rows(i, valid), vocab_size)
        if wanted != "loss":
            with jax.named_scope("logits_gradient"):
                dlogits_RV = (chunk.dlogits() * scale).astype(x.dtype)
            with jax.named_scope("x_gradient"):
                dx_BCD = (dlogits_RV @ head).reshape(x_BCD.shape)
            if sequence_parallel:
                dx_BCD = jax.lax.psum_scatter(dx_BCD, TENSOR, scatter_dimension=1, tiled=True)
            else:
                dx_BCD = jax.lax.psum(dx_BCD, TENSOR)
            dx = jax.lax.dynamic_update_slice_in_dim(dx, dx_BCD, i * size, axis=1)
            if wanted == "gradients":
                with jax.named_scope("head_gradient"):
                    dhead += jnp.einsum(
                        "RV,RD->VD", dlogits_RV, x_RD, preferred_element_type=jnp.float32
                    )
        if wanted == "x_gradient":
            by_device = chunk.lse.reshape(B, T // t, size)
            lse = jax.lax.dynamic_update_slice_in_dim(lse, by_device, i * size, axis=2)
        return (loss + chunk.loss, dx, dhead, lse), None

    def zeros(shape: tuple[int, ...], dtype, axes: tuple[str, ...], needed: bool = True) -> Array:
        return jax.lax.pcast(jnp.zeros(shape if needed else (0,), dtype), axes, to="varying")

    x_axes = BATCH + TENSOR if sequence_parallel else BATCH
    start = (
        zeros((), jnp.float32, BATCH),
        zeros(x.shape, x.dtype, x_axes, wanted != "loss"),
        zeros(head.shape, jnp.float32, BATCH + TENSOR, wanted == "gradients"),
        zeros((B, T // t, t), jnp.float32, BATCH, wanted == "x_gradient"),
    )
    (loss, dx, dhead, lse), _ = jax.lax.scan(one, start, jnp.arange(chunks))
    loss = jax.lax.psum(loss, BATCH) * scale
    if wanted == "loss":
        return (loss,)
    if wanted == "x_gradient":
        return loss, dx, lse.reshape(B, T)
    # Settled here, or XLA would carry the float32 sum to the end of the backward pass.
    dhead = jax.lax.optimization_barrier(dhead.astype(head.dtype))
    dhead = jax.lax.psum_scatter(dhead, "fsdp", scatter_dimension=1, tiled=True)
    return loss, dx, jax.lax.psum(dhead, "data")


class _Chunk:
    """Loss and gradient of one chunk on one device: its vocabulary rows, all tokens."""

    def __init__(
        self, x_RD: Array, head_VD: Array, targets_R: Array, valid_R: Array, vocab_size: int
    ):
        rows = head_VD.shape[0]
        first_row = jax.lax.axis_index(TENSOR) * rows
        logits = jnp.einsum("RD,VD->RV", x_RD, head_VD, preferred_element_type=jnp.float32)
        logits = jnp.where(first_row + jnp.arange(rows) < vocab_size, logits, -jnp.inf)
        greatest = jax.lax.pmax(logits.max(-1, keepdims=True), TENSOR)
        logits -= greatest
        self.exp = jnp.exp(logits)
        self.total = jax.lax.psum(self.exp.sum(-1, keepdims=True), TENSOR)
        self.is_target = (targets_R - first_row)[:, None] == jnp.arange(rows)
        target_logit = jax.lax.psum(
            jnp.where(self.is_target, logits, 0).sum(-1, keepdims=True), TENSOR
        )
        self.valid = valid_R[:, None]
        self.loss = jnp.where(self.valid, jnp.log(self.total) - target_logit, 0).sum()
        self.lse = greatest + jnp.log(self.total)

    def dlogits(self) -> Array:
        """softmax − one-hot where valid, else 0, in float32."""
        return jnp.where(self.valid, self.exp / self.total - self.is_target, 0)


def _forward_rule(*arguments):
    loss, *gradients = _sweep(*arguments, wanted="gradients")
    return loss, tuple(gradients)


@jax.named_scope("loss")
def _backward_rule(vocab_size, chunks, sequence_parallel, gradients, g: Array):
    dx, dhead = gradients
    return (dx * g).astype(dx.dtype), (dhead * g).astype(dhead.dtype), None, None, None


next_token_loss.defvjp(_forward_rule, _backward_rule)
