"""Number formats by name, and rounding that is right on average."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

DTYPES = {
    "fp32": jnp.dtype(jnp.float32),
    "bf16": jnp.dtype(jnp.bfloat16),
    "fp16": jnp.dtype(jnp.float16),
}


GROWTH_INTERVAL = 2000  # steps without overflow after which the loss scale doubles


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class LossScale:
    """What the loss is multiplied by, so that gradients in float16 neither vanish nor
    overflow (Micikevicius et al. 2018, arXiv:1710.03740).

    Attributes:
        scale: float32, a power of two.
        good_steps: int32, steps since the scale last changed.
    """

    scale: Array
    good_steps: Array

    @staticmethod
    def initial() -> LossScale:
        return LossScale(jnp.float32(2.0**16), jnp.int32(0))

    def after(self, ok: Array) -> LossScale:
        """Halved after an overflow, doubled after `GROWTH_INTERVAL` steps without one;
        within 1 … 2²⁴."""
        good_steps = jnp.where(ok, self.good_steps + 1, 0)
        grows = good_steps >= GROWTH_INTERVAL
        scale = self.scale * jnp.where(ok, jnp.where(grows, 2.0, 1.0), 0.5)
        return LossScale(jnp.clip(scale, 1.0, 2.0**24), jnp.where(grows, 0, good_steps))


def noise(key: Array, like: Array) -> tuple[Array, Array]:
    """Two independent draws of 16 random bits (as uint32) for each element of `like`, laid
    out as it is. They depend on `key` and the position in the global array, so that every
    mesh rounds alike."""
    sharding = jax.typeof(like).sharding
    bits = jax.random.bits(key, like.shape, jnp.uint32, out_sharding=sharding)
    return bits >> 16, bits & 0xFFFF


def uniform(bits: Array) -> Array:
    """16 random bits → float32 in (0, 1), the same mean as of a uniform number."""
    return (bits.astype(jnp.float32) + 0.5) * 2.0**-16


def stochastic_round(value: Array, bits: Array) -> Array:
    """float32 → bfloat16, up or down with a chance that makes the mean exact.

    A float32 has 16 more mantissa bits than a bfloat16: adding 16 random bits
    there and cutting them off rounds up with the probability of the fraction
    cut off (Gupta et al. 2015, arXiv:1502.02551). Infinities and NaNs stay what
    they are.
    """
    raised = jax.lax.bitcast_convert_type(value, jnp.uint32) + bits
    cut = jax.lax.bitcast_convert_type(raised & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(value), cut, value).astype(jnp.bfloat16)
