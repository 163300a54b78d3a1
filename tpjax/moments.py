"""How one parameter's two Adam moments are stored, and what they give.

Each storage makes zeros and takes one step; arithmetic is float32 in all of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tpjax import precision, quant
from tpjax.quant import Block, Quantised

FACTORED_EPS = 1e-30  # added to g², Adafactor's


class Rates(NamedTuple):
    """Adam's constants at one step: decays, what the means have to be divided by, eps."""

    b1: float
    b2: float
    bias1: Array
    bias2: Array
    eps: float


@dataclass(frozen=True)
class Plain:
    """Both moments in a floating-point type; bfloat16 is rounded stochastically. (Rounded to
    nearest, a mean that changes by a thousandth per step would never move.)"""

    dtype: jnp.dtype

    def zeros(self, param: Array) -> tuple[Any, Any]:
        return jnp.zeros_like(param, self.dtype), jnp.zeros_like(param, self.dtype)

    def step(self, g: Array, mu: Array, nu: Array, rates: Rates, key: Array):
        mu, nu = mu.astype(jnp.float32), nu.astype(jnp.float32)
        step, mu, nu = _adam(g, mu, nu, rates)
        if self.dtype != jnp.bfloat16:
            return step, mu.astype(self.dtype), nu.astype(self.dtype)
        high, low = precision.noise(key, g)
        return step, precision.stochastic_round(mu, high), precision.stochastic_round(nu, low)


@dataclass(frozen=True)
class Blocks:
    """Both moments in 8 bits, rounded stochastically.

    The second is stored as its square root: of 255 linear steps those of the root reach
    down to 1/65,025 of a block's largest value, where small second moments, rounded to
    zero, would make Adam divide by nothing (Dettmers et al. 2022, arXiv:2110.02861, use a
    dynamic type to the same end). For the same reason what is not zero never becomes zero.
    """

    block: Block

    def zeros(self, param: Array) -> tuple[Any, Any]:
        return quant.zeros(param, self.block), quant.zeros(param, self.block, signed=False)

    def step(self, g: Array, mu: Quantised, nu: Quantised, rates: Rates, key: Array):
        second = jnp.square(quant.dequantise(nu))
        step, first, second = _adam(g, quant.dequantise(mu), second, rates)
        high, low = map(precision.uniform, precision.noise(key, g))
        stored = quantise_second(second, self.block, low)
        return step, quant.quantise(first, self.block, high), stored


def quantise_second(second: Array, block: Block, noise: Array | float) -> Quantised:
    """Second moments as their roots in 8 bits; what is not zero does not become zero."""
    stored = quant.quantise(jnp.sqrt(second), block, noise, signed=False)
    floored = jnp.where(second > 0, jnp.maximum(stored.codes, 1), stored.codes)
    return Quantised(floored, stored.scales)


class Factors(NamedTuple):
    """A matrix of second moments as the means of its rows and of its columns, float32; of a
    table (columns None) those of its rows alone."""

    rows: Array
    columns: Array | None


@dataclass(frozen=True)
class Factored:
    """Adafactor (arXiv:1804.04235): the second moment by the means of rows and columns, the
    updates clipped to a root mean square of 1, and the first moment, here in int8, one of
    those updates.

    A matrix of more than two dimensions is cut in two where the two sides are the smallest.
    A table has one second moment for each row (a token's), so that its rows can be updated
    apart from each other.
    """

    block: Block
    is_table: bool = False

    def zeros(self, param: Array) -> tuple[Any, Any]:
        sharding, cut = (
            jax.typeof(param).sharding,
            1 if self.is_table else factored_cut(param.shape),
        )
        rows, columns = (
            jnp.zeros(shape, jnp.float32, out_sharding=NamedSharding(sharding.mesh, P(*spec)))
            for shape, spec in (
                (param.shape[:cut], sharding.spec[:cut]),
                (param.shape[cut:], sharding.spec[cut:]),
            )
        )
        return quant.zeros(param, self.block), Factors(rows, None if self.is_table else columns)

    def _means(self, x: Array) -> Factors:
        if self.is_table:
            return Factors(x.mean(1), None)
        cut = factored_cut(x.shape)
        return Factors(x.mean(tuple(range(cut, x.ndim))), x.mean(tuple(range(cut))))

    def _second(self, nu: Factors) -> Array:
        if nu.columns is None:
            return nu.rows[:, None]
        rows = nu.rows / nu.rows.mean()
        return rows.reshape(rows.shape + (1,) * nu.columns.ndim) * nu.columns

    def step(self, g: Array, mu: Quantised, nu: Factors, rates: Rates, key: Array):
        new = self._means(jnp.square(g) + FACTORED_EPS)
        nu = jax.tree.map(lambda old, mean: rates.b2 * old + (1 - rates.b2) * mean, nu, new)
        update = g / (jnp.sqrt(self._second(nu) / rates.bias2) + rates.eps)
        update /= jnp.maximum(1.0, jnp.sqrt(jnp.mean(jnp.square(update))))
        first = rates.b1 * quant.dequantise(mu) + (1 - rates.b1) * update
        bits, _ = precision.noise(key, g)
        return first / rates.bias1, quant.quantise(first, self.block, precision.uniform(bits)), nu


Storage: TypeAlias = Plain | Blocks | Factored


def factored_cut(shape: tuple[int, ...]) -> int:
    """How many of the leading dimensions are the rows of a factored matrix."""
    return min(
        range(1, len(shape)), key=lambda cut: math.prod(shape[:cut]) + math.prod(shape[cut:])
    )


def _adam(g: Array, mu: Array, nu: Array, rates: Rates) -> tuple[Array, Array, Array]:
    """Adam (arXiv:1412.6980): the step to take, and both new means."""
    mu = rates.b1 * mu + (1 - rates.b1) * g
    nu = rates.b2 * nu + (1 - rates.b2) * g * g
    return (mu / rates.bias1) / (jnp.sqrt(nu / rates.bias2) + rates.eps), mu, nu


def fp32(path, leaf) -> Storage:
    """Of every parameter in float32."""
    return Plain(jnp.dtype(jnp.float32))


def int8(path, leaf) -> Storage:
    """Of matrices in int8, with blocks chosen from the shape alone; of vectors in float32."""
    return Blocks(quant.choose_block(leaf.shape)) if leaf.ndim > 1 else fp32(path, leaf)
