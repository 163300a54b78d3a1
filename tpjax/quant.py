"""Arrays stored as 8-bit integers in blocks, with a float32 scale for each block.

A block is a run of elements along one axis of the whole array. It is chosen from
the array's shape and a stated number of shards, never from today's mesh, so that
no block straddles two devices on any mesh allowed and a stored array means the
same on all of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from tpjax.sharding import placed, spec_of

BLOCK = 128  # elements of a block at most
MAX_SHARDS = 16  # of an axis of which nothing else is said
_TINY = jnp.finfo(jnp.float32).tiny  # the least scale: that of zeros, and of what is near it


@dataclass(frozen=True)
class Block:
    """Blocks of `size` elements along `axis`."""

    axis: int
    size: int


def choose_block(shape: Sequence[int], shards: Sequence[int] | None = None) -> Block:
    """The axis that allows the largest blocks, the last of several, and their size.

    Args:
        shape: of the whole array.
        shards: the greatest number of shards of each axis. Blocks stay whole on every mesh
            that shards an axis of n elements into a divisor of n / size (of the blocks).
    """
    sizes = []
    for n, most in zip(shape, shards or [MAX_SHARDS] * len(shape), strict=True):
        shard = n // math.gcd(n, most)
        sizes.append(max(d for d in range(1, min(shard, BLOCK) + 1) if shard % d == 0))
    axis = max(range(len(shape)), key=lambda i: (sizes[i], i))
    return Block(axis, sizes[axis])


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Int8:
    """An array as codes · scales, element by element and block by block.

    Attributes:
        codes: int8 in −127 … 127 or uint8 in 0 … 255, of the array's shape and sharding.
        scales: float32, one per block: as `codes`, but with the number of blocks in place
            of the blocked axis.
        slot: None, or an array of the same shape whose gradient is that of the values (its
            own values are never read): integers have none.
    """

    codes: Array
    scales: Array
    slot: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def block(self) -> Block:
        for axis, (n, blocks) in enumerate(zip(self.shape, self.scales.shape, strict=True)):
            if n != blocks:
                return Block(axis, n // blocks)
        return Block(len(self.shape) - 1, 1)


def is_int8(leaf) -> bool:
    """For `is_leaf`: an `Int8` is one array of a tree."""
    return isinstance(leaf, Int8)


def quantise(x: Array, block: Block, noise: Array | float = 0.5, *, signed: bool = True) -> Int8:
    """`x` (float32) in int8, or in uint8 where it has no sign.

    Args:
        noise: in [0, 1), a number or one for each element: what is rounded down after it
            was added. Uniform noise rounds stochastically, right on average; 0.5 to nearest.

    A block of zeros comes back as exact zeros; what is not finite spoils its block visibly.
    """
    levels, dtype = (127, jnp.int8) if signed else (255, jnp.uint8)
    blocks = _split(x, block)
    largest = jnp.max(jnp.abs(blocks), block.axis + 1, keepdims=True)
    scales = jnp.maximum(largest / levels, _TINY)
    scaled = _join(blocks / scales, x)
    codes = jnp.clip(jnp.floor(scaled + noise), -levels if signed else 0, levels)
    return Int8(codes.astype(dtype), jnp.squeeze(scales, block.axis + 1))


def zeros(like: Array, block: Block, *, signed: bool = True) -> Int8:
    """What `quantise` makes of zeros with the shape and sharding of `like`. (Told to quantise
    them, XLA would do so while it compiles, and take minutes.)"""
    shape = list(like.shape)
    shape[block.axis] //= block.size
    scales = jnp.full(shape, _TINY, jnp.float32, out_sharding=jax.typeof(like).sharding)
    return Int8(jnp.zeros_like(like, jnp.int8 if signed else jnp.uint8), scales)


def dequantise(x: Int8) -> Array:
    """The values, float32."""
    block = x.block
    scales = jnp.expand_dims(x.scales, block.axis + 1)
    return _join(_split(x.codes, block).astype(jnp.float32) * scales, x.codes)


def _split(x: Array, block: Block) -> Array:
    """[…, n, …] → […, n / size, size, …]: each shard splits its own."""
    shape, spec = list(x.shape), list(spec_of(x))
    shape[block.axis : block.axis + 1] = [shape[block.axis] // block.size, block.size]
    spec.insert(block.axis + 1, None)
    return jax.lax.reshape(x, shape, out_sharding=placed(x, *spec))


def _join(x: Array, like: Array) -> Array:
    return jax.lax.reshape(x, like.shape, out_sharding=placed(like, *spec_of(like)))


def value(weight: Array | Int8, dtype) -> Array:
    """A weight, stored in whatever way, as an array of `dtype`. Its gradient goes to the
    weight itself, or to an `Int8`'s slot."""
    if not isinstance(weight, Int8):
        return weight.astype(dtype)
    if weight.slot is None:
        return dequantise(weight).astype(dtype)
    return _value_through(dtype, weight.slot, weight.codes, weight.scales)


def _dequantise_as(dtype, slot: Array, codes: Array, scales: Array) -> Array:
    return dequantise(Int8(codes, scales)).astype(dtype)


_value_through = jax.custom_vjp(_dequantise_as, nondiff_argnums=(0,))
_value_through.defvjp(
    lambda dtype, slot, codes, scales: (_dequantise_as(dtype, slot, codes, scales), None),
    lambda dtype, saved, g: (g, None, None),
)


def slots(params, dtype):
    """What to differentiate in: the parameters, and for each `Int8` an array of `dtype`."""

    def one(leaf):
        if not isinstance(leaf, Int8):
            return leaf
        return jnp.zeros(leaf.shape, dtype, out_sharding=jax.typeof(leaf.codes).sharding)

    return jax.tree.map(one, params, is_leaf=is_int8)


def attach(params, slots):
    """`params` with each array or slot of `slots` in its place."""

    def one(leaf, slot):
        return dataclasses.replace(leaf, slot=slot) if isinstance(leaf, Int8) else slot

    return jax.tree.map(one, params, slots, is_leaf=is_int8)
