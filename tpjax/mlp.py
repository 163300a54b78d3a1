"""The tensor-parallel feed-forward half of a block: F is sharded.

Letters: B batch, T sequence, D model width, F feed-forward width; R = B·T rows.
"""

from __future__ import annotations

import math
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import reshard

from tpjax.adapters import Adapters
from tpjax.config import MemoryConfig, ModelConfig
from tpjax.layers import contract, make_weight, read
from tpjax.precision import DTYPES
from tpjax.sharding import activation_spec, residual_spec

_TANH_SCALE = math.sqrt(2 / math.pi)
_TANH_CUBIC = 0.044715


@jax.custom_vjp
def gelu(x: Array) -> Array:
    """GELU in GPT-2's tanh form (arXiv:1606.08415)."""
    return 0.5 * x * (1 + jnp.tanh(_TANH_SCALE * (x + _TANH_CUBIC * x**3)))


def _gelu_backward(x: Array, g: Array) -> tuple[Array]:
    """Keeps x alone and takes one tanh, where differentiating would keep five arrays."""
    t = jnp.tanh(_TANH_SCALE * (x + _TANH_CUBIC * x**3))
    slope = _TANH_SCALE * (1 + 3 * _TANH_CUBIC * x**2)
    return (g * (0.5 * (1 + t) + 0.5 * x * (1 - t * t) * slope),)


gelu.defvjp(lambda x: (gelu(x), x), _gelu_backward)


class MLP(nnx.Module):
    """x_BTD → h_BTF → x_BTD, SwiGLU (arXiv:2002.05202) or GELU."""

    def __init__(self, model: ModelConfig, memory: MemoryConfig, rngs: nnx.Rngs):
        make = partial(make_weight, model, memory, rngs)
        gated = model.mlp == "swiglu"
        self.gate = make("gate") if gated else None
        self.up, self.down = make("up"), make("down")
        self.gate_bias = make("gate_bias") if gated and model.mlp_bias else None
        self.up_bias = make("up_bias") if model.mlp_bias else None
        self.down_bias = make("down_bias") if model.mlp_bias else None
        self.adapters = Adapters(model, memory, rngs, ("gate", "up", "down"))
        self.memory = memory

    @jax.named_scope("mlp")
    def __call__(self, x_BTD: Array) -> Array:
        """Normed residual in, its update out; both laid out as `residual_spec`."""
        dtype, (B, T, D) = DTYPES[self.memory.compute], x_BTD.shape
        x = reshard(x_BTD, activation_spec("BTD"))
        if not self.memory.sequence_parallel:
            # One dimension of rows: a weight gradient that sums over B and T apart takes
            # XLA:CPU twice as long. With sequence parallelism the gradient of x would be
            # all-reduced instead of reduce-scattered.
            x = x.reshape(B * T, D)
        both = (x_BTD if x.ndim == 3 else x), x
        h = self._project(both, self.up, self.up_bias)
        h = (
            gelu(h)
            if self.gate is None
            else h * jax.nn.silu(self._project(both, self.gate, self.gate_bias))
        )
        with jax.named_scope("down"):
            weight_FD = read(self.down, dtype, gathered=False)
            out_spec = residual_spec(self.memory.sequence_parallel)
            h_BTF = h.reshape(B, T, -1)
            out_BTD = contract("BTF,FD->BTD", h_BTF, weight_FD, out_spec)
            equations = ("BTF,FA->BTA", "BTA,AD->BTD")
            out_BTD = self.adapters.add(out_BTD, "down", h_BTF, equations, spec=out_spec)
            return out_BTD if self.down_bias is None else out_BTD + read(self.down_bias, dtype)

    def _project(
        self, both: tuple[Array, Array], weight: nnx.Param, bias: nnx.Param | None
    ) -> Array:
        """x → h, from x as it came, to which adapters add, and as it was gathered."""
        residual, x = both
        with jax.named_scope(name := weight.get_metadata()["name"]):
            rows = "BT" if x.ndim == 3 else "R"
            out = contract(f"{rows}D,DF->{rows}F", x, read(weight, x.dtype, gathered=False))
            equations = (f"{rows}D,DA->{rows}A", f"{rows}A,AF->{rows}F")
            spec = activation_spec("BTA") if x.ndim == 3 else None
            out = self.adapters.add(out, name, residual, equations, spec=spec)
            return out if bias is None else out + read(bias, x.dtype)
