"""The next token from a sharded vocabulary: no device ever sees another's logits.

Letters: B batch, D model width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import PartitionSpec as P

from tpjax.checks import check_fields, require
from tpjax.layers import gather_fsdp
from tpjax.mesh import BATCH, TENSOR
from tpjax.sharding import weight_spec


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.8
    """What logits are divided by; 0 takes the most likely token."""
    top_k: int = 0
    """Only the so many most likely tokens; 0 for all."""
    top_p: float = 1.0
    """Only the most likely tokens that together have this probability (arXiv:1904.09751), of
    those that top_k leaves."""

    def __post_init__(self) -> None:
        check_fields(self, non_negative="temperature top_k")
        require(
            self.temperature == 0 or self.temperature >= 1e-3,
            f"temperature={self.temperature} must be 0 (the most likely token), or 0.001 or more.",
        )
        require(0 < self.top_p <= 1, f"top_p={self.top_p} must be above 0 and at most 1.")


def next_token(
    x_BD: Array, head_VD: Array, key: Array, vocab_size: int, sampling: Sampling
) -> Array:
    """A token for each row, int32 [B], by the Gumbel trick: the arg max of logits with noise.
    Each device finds the best of its own vocabulary rows, and only the winners are compared:
    no logits are gathered, and padding never wins."""
    B, V = x_BD.shape[0], head_VD.shape[0]
    greedy = sampling.temperature == 0
    spec = P(BATCH, TENSOR)
    noise_BV = jax.random.gumbel(key, (B, V), jnp.float32, out_sharding=spec)

    @partial(
        jax.shard_map,
        in_specs=(P(BATCH, None), weight_spec("VD"), spec),
        out_specs=P(BATCH),
    )
    def local(x: Array, head: Array, noise: Array) -> Array:
        head = gather_fsdp(head, axis=1)
        row = jax.lax.axis_index(TENSOR) * head.shape[0] + jnp.arange(head.shape[0])
        # The head first: for a row or two XLA:CPU would turn all of it around.
        logits = jnp.einsum("VD,BD->VB", head, x, preferred_element_type=jnp.float32).T
        logits = jnp.where(row < vocab_size, logits, -jnp.inf)
        if not greedy:
            logits = _kept(logits / sampling.temperature, sampling) + noise
        best = logits.max(-1)
        winner = jnp.where(best == jax.lax.pmax(best, TENSOR), row[logits.argmax(-1)], V)
        return jax.lax.pmin(winner, TENSOR)

    return local(x_BD, head_VD, noise_BV)


def _kept(logits: Array, sampling: Sampling) -> Array:
    """Logits, −inf for those that top_k and top_p leave out. Of equals at the end all stay."""
    if sampling.top_k:
        threshold = _threshold(logits, jnp.ones_like(logits), jnp.float32(sampling.top_k))
        logits = jnp.where(_order(logits) >= threshold, logits, -jnp.inf)
    if sampling.top_p < 1:
        greatest = jax.lax.pmax(logits.max(-1, keepdims=True), TENSOR)
        weights = jnp.exp(logits - greatest)
        total = jax.lax.psum(weights.sum(-1, keepdims=True), TENSOR)
        threshold = _threshold(logits, weights, sampling.top_p * total)
        logits = jnp.where(_order(logits) >= threshold, logits, -jnp.inf)
    return logits


def _order(x: Array) -> Array:
    """uint32 that compare as the float32 do."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    negative = bits >> 31 == 1
    return jnp.where(negative, ~bits, bits | jnp.uint32(1 << 31))


def _threshold(logits: Array, weights: Array, wanted: Array) -> Array:
    """The greatest value, as `_order` has it, for which the weights of all logits not below it
    sum up to `wanted` or more; [B, 1]. Found bit by bit, so that only sums travel."""
    order = _order(logits)

    def one(i: Array, found: Array) -> Array:
        tried = found | (jnp.uint32(1 << 31) >> i.astype(jnp.uint32))
        weight = jnp.where(order >= tried, weights, 0).sum(-1, keepdims=True)
        return jnp.where(jax.lax.psum(weight, TENSOR) >= wanted, tried, found)

    start = jax.lax.pcast(jnp.zeros((logits.shape[0], 1), jnp.uint32), BATCH, to="varying")
    return jax.lax.fori_loop(0, 32, one, start)
