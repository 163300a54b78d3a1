"""The keys and values of what has been read, kept for decoding: preallocated, updated in place.

Position p of a sequence lies in slot p mod S, so that a model with a sliding window needs no
more slots than its window has positions.

Letters: L layers, B batch, S slots, T positions read at once, N query heads, H head width,
K key/value heads, as often as the tensor axis needs them; G = N/K.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpjax import quant
from tpjax.config import ModelConfig
from tpjax.mesh import BATCH, TENSOR
from tpjax.precision import DTYPES
from tpjax.quant import Block, Quantised
from tpjax.sharding import activation_spec

Kind: TypeAlias = Literal["fp32", "bf16", "fp16", "int8"]

_SPEC = P(None, BATCH, TENSOR, None, None)  # of k, v, their codes and scales
_ROWS = P(BATCH)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values of all layers, each [L, B, K, S, H]: arrays, or `Quantised` with one scale
    for each position and head. Heads come before slots, as matmuls want them: the other way round
    XLA would make a copy of all of it."""

    k: Any
    v: Any

    @property
    def slots(self) -> int:
        return self.k.shape[3]


def abstract_cache(model: ModelConfig, mesh: Mesh, B: int, context: int, kind: Kind) -> Cache:
    """Shapes, dtypes and shardings of a cache for `context` positions of B sequences."""
    S = min(context, model.sliding_window or context)
    K = max(model.num_kv_heads, mesh.shape["tensor"] * mesh.shape["kv_copy"])
    shape = (model.num_layers, B, K, S, model.head_dim)
    abstract: Any = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(mesh, _SPEC))
    if kind == "int8":
        one = Quantised(abstract(shape, jnp.int8), abstract((*shape[:-1], 1), jnp.float32))
    else:
        one = abstract(shape, DTYPES[kind])
    return Cache(one, one)


def empty(like: Cache) -> Cache:
    """A new cache; of what has not been written nothing is ever read."""
    shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
    zeros = partial(jax.tree.map, lambda leaf: jnp.zeros(leaf.shape, leaf.dtype))
    return jax.jit(lambda: zeros(like), out_shardings=shardings)()


def store(
    cache: Cache, layer: Array, row: Array, k_BTKH: Array, v_BTKH: Array, length_B: Array
) -> Cache:
    """The cache with positions 0 … T−1 of one sequence of each batch shard written.

    Args:
        row: which of its sequences.
        k_BTKH, v_BTKH: of one sequence a shard.
        length_B: how many of the T positions there are; the others are padding.
    """
    S = cache.slots

    def local(all: Array, new: Array, layer: Array, row: Array, length: Array) -> Array:
        if new.shape[1] > S:  # only the last S are kept
            last = length[0] - 1
            position = last - (last - jnp.arange(S)) % S
            new = jnp.take(new, jnp.maximum(position, 0), axis=1)
        # In that order in memory too, or XLA would bring the whole cache into the other one.
        new_BKTH = with_layout_constraint(jnp.moveaxis(new, 1, 2), Layout((0, 1, 2, 3)))
        return jax.lax.dynamic_update_slice(all, new_BKTH[None], (layer, row, 0, 0, 0))

    return _each(cache, k_BTKH, v_BTKH, local, (layer, P()), (row, P()), (length_B, _ROWS))


def append(cache: Cache, layer: Array, k_BTKH: Array, v_BTKH: Array, position_B: Array) -> Cache:
    """The cache with one position of every sequence written; T is 1."""
    S = cache.slots

    def local(all: Array, new: Array, layer: Array, position: Array) -> Array:
        rows = jnp.arange(new.shape[0])
        return all.at[layer, rows, :, position % S].set(new[:, 0])

    return _each(cache, k_BTKH, v_BTKH, local, (layer, P()), (position_B, _ROWS))


def _each(cache: Cache, k: Array, v: Array, local: Callable, *others: tuple[Array, P]) -> Cache:
    """`local` on the shards of keys and values, and of their codes and scales."""
    arrays, specs = zip(*others, strict=True)
    mapped = jax.shard_map(
        local, in_specs=(_SPEC, activation_spec("BTKH"), *specs), out_specs=_SPEC
    )

    def put(all: Any, new: Array) -> Any:
        if isinstance(all, Quantised):
            stored: Any = quant.quantise(new.astype(jnp.float32), Block(3, new.shape[3]))
        else:
            stored = new.astype(all.dtype)
        return jax.tree.map(lambda a, n: mapped(a, n, *arrays), all, stored)

    return Cache(put(cache.k, k), put(cache.v, v))


@jax.named_scope("attend")
def attend(q_BTNH: Array, cache: Cache, layer: Array, position_B: Array) -> Array:
    """`attention.attend` of one position a sequence (T is 1), itself written already, over all
    that the cache has of it; returns y_BTNH."""
    spec = activation_spec("BTNH")

    @partial(jax.shard_map, in_specs=(spec, _SPEC, P(), _ROWS), out_specs=spec)
    def local(q: Array, cache: Cache, layer: Array, position: Array) -> Array:
        (k, k_scale), (v, v_scale) = (_layer(x, layer, q.dtype) for x in (cache.k, cache.v))
        B, _, N, H = q.shape
        K, S = k.shape[1:3]
        q_BKGH = q.reshape(B, K, N // K, H)
        s_BKGS = jnp.einsum("BKGH,BKSH->BKGS", q_BKGH, k, preferred_element_type=jnp.float32)
        s_BKGS *= k_scale / math.sqrt(H)
        written = position[:, None] - (position[:, None] - jnp.arange(S)) % S
        s_BKGS = jnp.where((written >= 0)[:, None, None], s_BKGS, -jnp.inf)
        p_BKGS = jax.nn.softmax(s_BKGS, axis=-1) * v_scale
        y_BKGH = jnp.einsum("BKGS,BKSH->BKGH", p_BKGS.astype(q.dtype), v)
        return y_BKGH.reshape(q.shape)

    return local(q_BTNH, cache, layer, position_B)


def _layer(all: Any, layer: Array, dtype: Any) -> tuple[Array, Array | float]:
    """x_BKSH of one layer in `dtype`, and its scales, to go with s_BKGS."""
    take = partial(jax.lax.dynamic_index_in_dim, index=layer, axis=0, keepdims=False)
    if not isinstance(all, Quantised):
        return take(all).astype(dtype), 1.0
    return take(all.codes).astype(dtype), jnp.swapaxes(take(all.scales), 2, 3)
