"""Arrays stored in 8 or 4 bits in blocks, with a scale for each block.

A block is a run of elements along one axis of the whole array. It is chosen from
the array's shape and a stated number of shards, never from today's mesh, so that
no block straddles two devices on any mesh allowed and a stored array means the
same on all of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

from tpjax.checks import require
from tpjax.sharding import placed, spec_of

Bits = Literal[8, 4]
BLOCK: dict[Bits, int] = {8: 128, 4: 32}  # elements of a block at most
MAX_SHARDS = 16  # of an axis of which nothing else is said
_TINY = jnp.finfo(jnp.float32).tiny  # the least scale: that of zeros, and of what is near it
# NormalFloat, arXiv:2305.14314: quantiles of a normal distribution, seven below and eight above
# an exact zero, stretched to −1 … 1.
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


@dataclass(frozen=True)
class Block:
    """Blocks of `size` elements along `axis`."""

    axis: int
    size: int


def choose_block(
    shape: Sequence[int], shards: Sequence[int] | None = None, bits: Bits = 8
) -> Block:
    """The axis that allows the largest blocks, the last of several, and their size.

    Args:
        shape: of the whole array.
        shards: the greatest number of shards of each axis. Blocks stay whole on every mesh
            that shards an axis of n elements into a divisor of n / size (of the blocks).

    Raises:
        ConfigError: no axis has blocks of which two elements can share a byte.
    """
    shards = shards or [MAX_SHARDS] * len(shape)
    sizes = [block_size(n, most, bits) for n, most in zip(shape, shards, strict=True)]
    axis = max(range(len(shape)), key=lambda i: (sizes[i], i))
    require(
        bits == 8 or sizes[axis] > 1,
        f"a matrix of {list(shape)} numbers has no blocks for 4 bits, which take a multiple of 4 "
        "numbers in a row; use int8.",
    )
    return Block(axis, sizes[axis])


def block_size(n: int, shards: int = MAX_SHARDS, bits: Bits = 8) -> int:
    """Of the largest blocks of an axis of `n` elements; 1 where there are none of 4 bits."""
    shard = n // math.gcd(n, shards)
    fitting = (d for d in range(1, min(shard, BLOCK[bits]) + 1) if shard % d == 0)
    return max(d for d in fitting if d == 1 or bits == 8 or d % 4 == 0)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantised:
    """An array as codes · scales, element by element and block by block.

    Attributes:
        codes: int8 in −127 … 127 or uint8 in 0 … 255, of the array's shape and sharding; with 4
            bits uint8 that are two numbers of `NF4` each, those of a block's first half low.
        scales: one per block: as `codes`, but with the number of blocks in place of the
            blocked axis. float32; with 4 bits bf16, whose rounding is small beside theirs.
        slot: None, or an array of the same shape whose gradient is that of the values (its
            own values are never read): integers have none.
        bits: of a code.
    """

    codes: Array
    scales: Array
    slot: Array | None = None
    bits: Bits = dataclasses.field(default=8, metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.codes.shape)
        if self.bits == 4:
            shape[self.block.axis] *= 2
        return tuple(shape)

    @property
    def block(self) -> Block:
        for axis, (n, blocks) in enumerate(zip(self.codes.shape, self.scales.shape, strict=True)):
            if n != blocks:
                return Block(axis, n // blocks * 8 // self.bits)
        return Block(len(self.codes.shape) - 1, 1)


def is_quantised(leaf) -> bool:
    """For `is_leaf`: a `Quantised` is one array of a tree."""
    return isinstance(leaf, Quantised)


def quantise(
    x: Array, block: Block, noise: Array | float = 0.5, *, signed: bool = True
) -> Quantised:
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
    scaled = _merge(blocks / scales, block.axis)
    codes = jnp.clip(jnp.floor(scaled + noise), -levels if signed else 0, levels)
    return Quantised(codes.astype(dtype), jnp.squeeze(scales, block.axis + 1))


def quantise4(x: Array, block: Block) -> Quantised:
    """`x` (float32) in 4 bits, each number the nearest of `NF4` times its block's largest."""
    blocks = _split(x, block)
    scales = jnp.max(jnp.abs(blocks), block.axis + 1, keepdims=True)
    scales = jnp.maximum(scales, _TINY).astype(jnp.bfloat16)
    scaled = blocks / scales.astype(jnp.float32)
    middles = [(one + other) / 2 for one, other in itertools.pairwise(NF4)]
    codes = sum((scaled > middle).astype(jnp.uint8) for middle in middles)
    low, high = jnp.split(codes, 2, block.axis + 1)
    codes = _merge(low | high << 4, block.axis)
    return Quantised(codes, jnp.squeeze(scales, block.axis + 1), bits=4)


def zeros(like: Array, block: Block, *, signed: bool = True) -> Quantised:
    """What `quantise` makes of zeros with the shape and sharding of `like`. (Told to quantise
    them, XLA would do so while it compiles, and take minutes.)"""
    shape = list(like.shape)
    shape[block.axis] //= block.size
    scales = jnp.full(shape, _TINY, jnp.float32, out_sharding=jax.typeof(like).sharding)
    return Quantised(jnp.zeros_like(like, jnp.int8 if signed else jnp.uint8), scales)


def dequantise(x: Quantised) -> Array:
    """The values, float32."""
    axis, size = x.block.axis, x.block.size
    scales = jnp.expand_dims(x.scales, axis + 1).astype(jnp.float32)
    if x.bits == 8:
        return _merge(_split(x.codes, x.block).astype(jnp.float32) * scales, axis)
    pairs = _split(x.codes, Block(axis, size // 2))
    values = _entry(jnp.concatenate([pairs & 15, pairs >> 4], axis + 1))
    return _merge(values * scales, axis)


def _entry(codes: Array) -> Array:
    """`NF4` at the codes."""
    table = jnp.asarray(NF4, jnp.float32)
    where = placed(codes, *spec_of(codes))
    return table.at[codes].get(mode="promise_in_bounds", out_sharding=where)


def _split(x: Array, block: Block) -> Array:
    """[…, n, …] → […, n / size, size, …]: each shard splits its own."""
    shape, spec = list(x.shape), list(spec_of(x))
    shape[block.axis : block.axis + 1] = [shape[block.axis] // block.size, block.size]
    spec.insert(block.axis + 1, None)
    return jax.lax.reshape(x, shape, out_sharding=placed(x, *spec))


def _merge(x: Array, axis: int) -> Array:
    """[…, blocks, size, …] → […, blocks · size, …]."""
    shape, spec = list(x.shape), list(spec_of(x))
    shape[axis : axis + 2] = [shape[axis] * shape[axis + 1]]
    del spec[axis + 1]
    return jax.lax.reshape(x, shape, out_sharding=placed(x, *spec))


def value(weight: Array | Quantised, dtype) -> Array:
    """A weight, stored in whatever way, as an array of `dtype`. Its gradient goes to the
    weight itself, or to a `Quantised`'s slot."""
    if not isinstance(weight, Quantised):
        return weight.astype(dtype)
    if weight.slot is None:
        return dequantise(weight).astype(dtype)
    return _value_through(dtype, weight.slot, weight.codes, weight.scales)


def _dequantise_as(dtype, slot: Array, codes: Array, scales: Array) -> Array:
    return dequantise(Quantised(codes, scales)).astype(dtype)


_value_through = jax.custom_vjp(_dequantise_as, nondiff_argnums=(0,))
_value_through.defvjp(
    lambda dtype, slot, codes, scales: (_dequantise_as(dtype, slot, codes, scales), None),
    lambda dtype, saved, g: (g, None, None),
)


def slots(params, dtype):
    """What to differentiate in: the parameters, and for each `Quantised` an array of `dtype`."""

    def one(leaf):
        if not isinstance(leaf, Quantised):
            return leaf
        return jnp.zeros(leaf.shape, dtype, out_sharding=jax.typeof(leaf.codes).sharding)

    return jax.tree.map(one, params, is_leaf=is_quantised)


def attach(params, slots):
    """`params` with each array or slot of `slots` in its place."""

    def one(leaf, slot):
        return dataclasses.replace(leaf, slot=slot) if isinstance(leaf, Quantised) else slot

    return jax.tree.map(one, params, slots, is_leaf=is_quantised)
