"""One table: which mesh axes shard each dimension letter.

Letters: B batch, T sequence, D model width, N query heads, K key/value heads,
H head width, F feed-forward width, V vocabulary, L layers, A adapter rank.
"""

from __future__ import annotations

import math

import jax
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tpjax.mesh import BATCH, TENSOR

_WEIGHT = {"D": "fsdp", "N": TENSOR, "K": "tensor", "F": TENSOR, "V": TENSOR}
_ACTIVATION = {"B": BATCH, "N": TENSOR, "K": TENSOR, "F": TENSOR, "V": TENSOR}


def weight_spec(letters: str, *, gathered: bool = False, replicated_V: bool = False) -> P:
    """How a weight is stored, or (`gathered`) used: without its fsdp shards.

    Vectors over D (norm gains, biases) are whole on every device: gathering
    them would cost more time than keeping them costs memory. So is, on purpose,
    the vocabulary over the tensor axis where `replicated_V` asks for it. An adapter's
    width is over both axes, since nothing else of it is in shards.
    """
    whole = {"D"} if gathered or letters == "D" else set()
    whole |= {"V"} if replicated_V else set()
    axes = _WEIGHT | ({"D": ("fsdp", *TENSOR)} if "A" in letters else {})
    return P(*(None if letter in whole else axes.get(letter) for letter in letters))


def activation_spec(letters: str) -> P:
    """How an activation lies between the collectives of a block. Key/value heads
    are there as many times as the tensor axis needs, so K is sharded like N."""
    return P(*(_ACTIVATION.get(letter) for letter in letters))


def residual_spec(sequence_parallel: bool) -> P:
    """How the residual stream x_BTD lies: with its sequence over the tensor axis or not."""
    return P(BATCH, TENSOR if sequence_parallel else None, None)


def deal(x: Array, parts: int) -> Array:
    """[n, …] → [n / parts, parts, …]: rows dealt out in turn, so that every part lies on all
    devices as the whole does and none moves."""
    shape, (first, *others) = (x.shape[0] // parts, parts, *x.shape[1:]), spec_of(x)
    return jax.lax.reshape(x, shape, out_sharding=placed(x, first, None, *others))


def undeal(x: Array) -> Array:
    """`deal` undone."""
    shape, (first, _, *others) = (x.shape[0] * x.shape[1], *x.shape[2:]), spec_of(x)
    return jax.lax.reshape(x, shape, out_sharding=placed(x, first, *others))


def fetch(x: Array) -> Array:
    """`x` in the device's memory."""
    in_host = jax.typeof(x).memory_space == jax.memory.Space.Host
    return jax.device_put(x, jax.memory.Space.Device) if in_host else x


def beside(x: Array, other: Array) -> Array:
    """`x` in the memory that `other` is in, the device's or its host's."""
    in_host = jax.typeof(other).memory_space == jax.memory.Space.Host
    return jax.device_put(x, jax.memory.Space.Host) if in_host else x


def placed(x: Array, *spec) -> NamedSharding:
    """A spec on the mesh that `x` is on, which may be none at all."""
    return NamedSharding(jax.typeof(x).sharding.mesh, P(*spec))


def spec_of(x: Array) -> tuple:
    """The mesh axes of each of its dimensions."""
    spec = jax.typeof(x).sharding.spec
    return (*spec, *[None] * (x.ndim - len(spec)))


def bytes_per_device(tree) -> int:
    """Bytes one device holds of a tree of (abstract) arrays with shardings."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
