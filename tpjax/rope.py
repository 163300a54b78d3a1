"""Rotary positions (arXiv:2104.09864), stretched as Hugging Face's models are.

Letters: B batch, T sequence, N heads, H head width.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tpjax.config import RopeConfig


def rope_frequencies(rope: RopeConfig, H: int, T: int) -> tuple[np.ndarray, float]:
    """Angle per position for each of the H/2 pairs, and the scale of cos and sin.

    Follows Hugging Face's definitions of each `rope_type`, so that imported
    models keep their meaning. `T`, the sequence length, matters to `dynamic`.
    """
    theta = rope.theta
    if rope.kind == "dynamic" and rope.original_max_seq_len < T:
        stretch = rope.factor * T / rope.original_max_seq_len - (rope.factor - 1)
        theta *= stretch ** (H / (H - 2))
    frequency = 1.0 / theta ** (np.arange(0, H, 2) / H)
    if rope.kind == "linear":
        frequency = frequency / rope.factor
    elif rope.kind == "llama3":
        turns = rope.original_max_seq_len * frequency / (2 * math.pi)
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        frequency = _blend(frequency, rope.factor, keep)
    elif rope.kind == "yarn":

        def pair_of(turns: float) -> float:  # the pair that turns this often while trained
            ratio = rope.original_max_seq_len / (turns * 2 * math.pi)
            return H * math.log(ratio) / (2 * math.log(theta))

        low, high = pair_of(rope.beta_fast), pair_of(rope.beta_slow)
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, H - 1)
        keep = 1 - (np.arange(H // 2) - low) / max(high - low, 0.001)
        scale = rope.attention_factor or (
            0.1 * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0
        )
        return _blend(frequency, rope.factor, keep), scale
    return frequency, 1.0


def _blend(frequency: np.ndarray, factor: float, keep: np.ndarray) -> np.ndarray:
    keep = np.clip(keep, 0, 1)
    return frequency * keep + frequency / factor * (1 - keep)


@jax.named_scope("rope")
def rope_tables(
    rope: RopeConfig, H: int, T: int, positions: Array | None = None
) -> tuple[Array, Array]:
    """cos and sin for sequences of length `T`, of all its positions, [T, H/2], or of some,
    [*positions.shape, H/2]; float32."""
    frequency, scale = rope_frequencies(rope, H, T)
    positions = jnp.arange(T) if positions is None else positions
    angle = positions.astype(jnp.float32)[..., None] * jnp.asarray(frequency, jnp.float32)
    return jnp.cos(angle) * scale, jnp.sin(angle) * scale


@jax.named_scope("rope")
def rotate(x_BTNH: Array, tables: tuple[Array, Array]) -> Array:
    """Rotates the pairs (x_i, x_{i+H/2}) by their position's angles (arXiv:2104.09864)."""
    cos, sin = (table[..., None, :] for table in tables)
    x, y = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([x * cos - y * sin, y * cos + x * sin], -1).astype(x_BTNH.dtype)
