"""Number formats by name, and rounding that is right on average."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

DTYPES = {"fp32": jnp.dtype(jnp.float32), "bf16": jnp.dtype(jnp.bfloat16)}


def stochastic_round(value: Array, key: Array) -> Array:
    """float32 → bfloat16, up or down with a chance that makes the mean exact.

    A float32 has 16 more mantissa bits than a bfloat16: adding 16 random bits
    there and cutting them off rounds up with the probability of the fraction
    cut off (Gupta et al. 2015, arXiv:1502.02551). Bits depend on `key` and the
    position in the global array, so every mesh rounds alike. Infinities and
    NaNs stay what they are.
    """
    sharding = jax.typeof(value).sharding
    noise = jax.random.bits(key, value.shape, jnp.uint16, out_sharding=sharding)
    bits = jax.lax.bitcast_convert_type(value, jnp.uint32) + noise.astype(jnp.uint32)
    cut = jax.lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(value), cut, value).astype(jnp.bfloat16)


def store(value: Array, dtype: jnp.dtype, key: Array) -> Array:
    """A float32 result as it is kept: bfloat16 by stochastic rounding."""
    return stochastic_round(value, key) if dtype == jnp.bfloat16 else value.astype(dtype)
