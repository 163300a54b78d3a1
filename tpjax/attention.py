"""Tensor-parallel causal self-attention: heads are sharded, tokens are not.

Letters: B batch, T sequence, D model width, N query heads, K key/value heads,
H head width; in a device's own part also G = N/K query heads per key/value
head, and Q = a block of query positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from tpjax import remat
from tpjax.adapters import Adapters
from tpjax.config import MemoryConfig, ModelConfig
from tpjax.layers import contract, make_weight, read, rms_norm
from tpjax.mesh import TENSOR
from tpjax.precision import DTYPES
from tpjax.rope import rotate
from tpjax.sharding import activation_spec, residual_spec

Mix = Callable[[Array, Array, Array], Array]  # q_BTNH, k_BTKH, v_BTKH → y_BTNH

QUERY_BLOCK = 128  # query rows whose scores exist at once


class Attention(nnx.Module):
    """x_BTD → q_BTNH, k_BTKH, v_BTKH → y_BTNH → x_BTD."""

    def __init__(self, model: ModelConfig, memory: MemoryConfig, rngs: nnx.Rngs):
        make = partial(make_weight, model, memory, rngs)
        self.q, self.k, self.v, self.o = make("q"), make("k"), make("v"), make("o")
        self.q_bias = make("q_bias") if model.qkv_bias else None
        self.k_bias = make("k_bias") if model.qkv_bias else None
        self.v_bias = make("v_bias") if model.qkv_bias else None
        self.o_bias = make("o_bias") if model.o_bias else None
        self.q_gain = make("q_gain") if model.qk_norm else None
        self.k_gain = make("k_gain") if model.qk_norm else None
        self.adapters = Adapters(model, memory, rngs, ("q", "k", "v", "o"))
        self.model, self.memory = model, memory

    @jax.named_scope("attention")
    def __call__(
        self, x_BTD: Array, rope: tuple[Array, Array] | None, mix: Mix | None = None
    ) -> Array:
        """Normed residual in, its update out; both laid out as `residual_spec`.

        Args:
            mix: what to do with queries, keys and values instead of `attend`.
        """
        dtype = DTYPES[self.memory.compute]
        both = x_BTD, reshard(x_BTD, activation_spec("BTD"))
        q_BTNH = self._project(both, self.q, self.q_bias)
        k_BTKH = self._project(both, self.k, self.k_bias)
        v_BTKH = self._project(both, self.v, self.v_bias)
        if self.q_gain is not None and self.k_gain is not None:
            # Kept as they go in: the backward pass of the norms needs them so.
            q_BTNH, k_BTKH = remat.name(q_BTNH, "qkv"), remat.name(k_BTKH, "qkv")
            q_BTNH = rms_norm(q_BTNH, read(self.q_gain, jnp.float32), self.model.norm_eps)
            k_BTKH = rms_norm(k_BTKH, read(self.k_gain, jnp.float32), self.model.norm_eps)
        if rope is not None:
            q_BTNH, k_BTKH = rotate(q_BTNH, rope), rotate(k_BTKH, rope)
        if self.q_gain is None:
            q_BTNH, k_BTKH = remat.name(q_BTNH, "qkv"), remat.name(k_BTKH, "qkv")
        v_BTKH = remat.name(v_BTKH, "qkv")
        if mix is None:
            how = (self.memory.attention, self.model.sliding_window)
            y_BTNH = attend(q_BTNH, k_BTKH, v_BTKH, *how)
        else:
            y_BTNH = mix(q_BTNH, k_BTKH, v_BTKH)
        out_spec = residual_spec(self.memory.sequence_parallel)
        with jax.named_scope("o"):
            weight_NHD = read(self.o, dtype, gathered=False)
            out_BTD = contract("BTNH,NHD->BTD", y_BTNH, weight_NHD, out_spec)
            equations = ("BTNH,NHA->BTA", "BTA,AD->BTD")
            out_BTD = self.adapters.add(out_BTD, "o", y_BTNH, equations, spec=out_spec)
            return out_BTD if self.o_bias is None else out_BTD + read(self.o_bias, dtype)

    def _project(
        self, both: tuple[Array, Array], weight: nnx.Param, bias: nnx.Param | None
    ) -> Array:
        """x_BTD → [B, T, heads, H], from x as it came and as it was gathered."""
        residual_BTD, x_BTD = both
        with jax.named_scope(name := weight.get_metadata()["name"]):
            weight_DNH = copy_heads(read(weight, x_BTD.dtype, gathered=False))
            out = contract("BTD,DNH->BTNH", x_BTD, weight_DNH)
            equations = ("BTD,DA->BTA", "BTA,ANH->BTNH")
            how = {"spec": activation_spec("BTA"), "spread": copy_heads}
            out = self.adapters.add(out, name, residual_BTD, equations, **how)
            return out if bias is None else out + copy_heads(read(bias, x_BTD.dtype))


def copy_heads(weight: Array) -> Array:
    """Key/value heads as often as the tensor axis needs them.

    Where K is smaller than the tensor axis, each head lies on a group of
    devices (mesh axis `kv_copy`). Naming every copy a head of its own costs no
    communication forward, and one sum of a weight's gradient backward.
    """
    stored = jax.typeof(weight).sharding.spec
    if "tensor" not in stored:  # query heads: sharded over both axes already
        return weight
    copied = P(*(TENSOR if axis == "tensor" else axis for axis in stored))
    copy = jax.shard_map(
        lambda w: jax.lax.pcast(w, "kv_copy", to="varying"), in_specs=stored, out_specs=copied
    )
    return copy(weight)


@jax.named_scope("attend")
def attend(
    q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, implementation: str, window: int | None
) -> Array:
    """Causal softmax(q kᵀ / √H) v, on each device's own heads; returns y_BTNH.

    `window` lets a position see itself and the `window - 1` before it.
    Never holds B×N×T×T: cuDNN's flash attention, or blocks of query rows; but for
    `materialised`, which is there to compare with.
    """
    spec = activation_spec("BTNH")

    @partial(jax.shard_map, in_specs=(spec, spec, spec), out_specs=spec)
    def local(q: Array, k: Array, v: Array) -> Array:
        if implementation == "materialised":
            return materialised_attention(q, k, v, window)
        if implementation == "cudnn":
            left = None if window is None else (window - 1, 0)
            return jax.nn.dot_product_attention(
                q, k, v, is_causal=True, implementation="cudnn", local_window_size=left
            )
        return blockwise_attention(q, k, v, window)

    return local(q_BTNH, k_BTKH, v_BTKH)


def materialised_attention(
    q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, window: int | None
) -> Array:
    """`attend` on one device's heads with all scores at once, [B, N, T, T] in float32, and
    differentiated as it is written: what an implementation has that thinks of no memory."""
    q_BTKGH = _grouped(q_BTNH, k_BTKH.shape[2])
    p_BKGQT = jax.nn.softmax(_block_scores(q_BTKGH, k_BTKH, 0, window), axis=-1)
    y_BTKGH = jnp.einsum("BKGQT,BTKH->BQKGH", p_BKGQT.astype(v_BTKH.dtype), v_BTKH)
    return y_BTKGH.reshape(q_BTNH.shape)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def blockwise_attention(q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, window: int | None) -> Array:
    """`attend` on one device's heads in plain XLA, a block of query rows at a time.

    Only the output and the log-sum-exp of the scores outlive the forward pass;
    the backward pass makes each block's probabilities again from them
    (arXiv:2205.14135, without its tiling of the keys).
    """
    return _forward(q_BTNH, k_BTKH, v_BTKH, window)[0]


def _block_scores(q_BQKGH: Array, k_BTKH: Array, first: Array | int, window: int | None) -> Array:
    """Masked float32 scores of the query rows from position `first` on: s_BKGQT."""
    Q, T = q_BQKGH.shape[1], k_BTKH.shape[1]
    scores = jnp.einsum(
        "BQKGH,BTKH->BKGQT", q_BQKGH, k_BTKH, preferred_element_type=jnp.float32
    ) / math.sqrt(q_BQKGH.shape[-1])
    query = first + jnp.arange(Q)[:, None]
    distance = query - jnp.arange(T)
    seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    return jnp.where(seen, scores, -jnp.inf)


def _blocks(x: Array, num_blocks: int) -> Array:
    """[B, T, ...] → [blocks, B, T / blocks, ...], to scan over."""
    B, T = x.shape[:2]
    return jnp.moveaxis(x.reshape(B, num_blocks, T // num_blocks, *x.shape[2:]), 1, 0)


def _unblocks(x: Array) -> Array:
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])


def _num_blocks(T: int) -> int:
    """The fewest equal blocks of at most QUERY_BLOCK rows."""
    return next(n for n in range(-(-T // QUERY_BLOCK), T + 1) if T % n == 0)


def _grouped(q_BTNH: Array, K: int) -> Array:
    B, T, N, H = q_BTNH.shape
    return q_BTNH.reshape(B, T, K, N // K, H)


def _forward(q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, window: int | None):
    blocks = _num_blocks(q_BTNH.shape[1])
    q_blocks = _blocks(_grouped(q_BTNH, k_BTKH.shape[2]), blocks)

    def one(_, block):
        first, q_BQKGH = block
        s = _block_scores(q_BQKGH, k_BTKH, first, window)
        lse_BKGQ = jax.nn.logsumexp(s, axis=-1)
        p = jnp.exp(s - lse_BKGQ[..., None]).astype(v_BTKH.dtype)
        return None, (jnp.einsum("BKGQT,BTKH->BQKGH", p, v_BTKH), lse_BKGQ)

    firsts = jnp.arange(blocks) * (q_BTNH.shape[1] // blocks)
    _, (y_blocks, lse_blocks) = jax.lax.scan(one, None, (firsts, q_blocks))
    y_BTNH = _unblocks(y_blocks).reshape(q_BTNH.shape)
    return y_BTNH, remat.name(lse_blocks, "attention")


def _forward_rule(q_BTNH: Array, k_BTKH: Array, v_BTKH: Array, window: int | None):
    y_BTNH, lse_blocks = _forward(q_BTNH, k_BTKH, v_BTKH, window)
    y_BTNH = remat.name(y_BTNH, "attention")
    return y_BTNH, (q_BTNH, k_BTKH, v_BTKH, y_BTNH, lse_blocks)


def _backward_rule(window: int | None, saved, dy_BTNH: Array):
    q_BTNH, k_BTKH, v_BTKH, y_BTNH, lse_blocks = saved
    blocks, K = lse_blocks.shape[0], k_BTKH.shape[2]
    scale = 1 / math.sqrt(q_BTNH.shape[-1])

    def one(carry, block):
        dk, dv = carry
        first, q, y, dy, lse_BKGQ = block
        p = jnp.exp(_block_scores(q, k_BTKH, first, window) - lse_BKGQ[..., None])
        dv += jnp.einsum(
            "BKGQT,BQKGH->BTKH", p.astype(dy.dtype), dy, preferred_element_type=jnp.float32
        )
        dp = jnp.einsum("BQKGH,BTKH->BKGQT", dy, v_BTKH, preferred_element_type=jnp.float32)
        delta = jnp.einsum("BQKGH,BQKGH->BKGQ", dy, y, preferred_element_type=jnp.float32)
        ds = (p * (dp - delta[..., None]) * scale).astype(q.dtype)
        dk += jnp.einsum("BKGQT,BQKGH->BTKH", ds, q, preferred_element_type=jnp.float32)
        return (dk, dv), jnp.einsum("BKGQT,BTKH->BQKGH", ds, k_BTKH)

    firsts = jnp.arange(blocks) * (q_BTNH.shape[1] // blocks)
    split = [_blocks(_grouped(x, K), blocks) for x in (q_BTNH, y_BTNH, dy_BTNH)]
    zeros = jnp.zeros_like(k_BTKH, jnp.float32)
    (dk, dv), dq_blocks = jax.lax.scan(one, (zeros, zeros), (firsts, *split, lse_blocks))
    dq = _unblocks(dq_blocks).reshape(q_BTNH.shape)
    return dq, dk.astype(k_BTKH.dtype), dv.astype(v_BTKH.dtype)


blockwise_attention.defvjp(_forward_rule, _backward_rule)
