"""What is trained beside frozen weights (LoRA, arXiv:2106.09685).

Letters: A adapter rank; otherwise as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from tpjax.config import MemoryConfig, ModelConfig
from tpjax.layers import contract, make_weight, read
from tpjax.mesh import TENSOR


class Adapters(nnx.Module):
    """Those of some projections that have one."""

    def __init__(
        self, model: ModelConfig, memory: MemoryConfig, rngs: nnx.Rngs, names: Sequence[str]
    ):
        make = partial(make_weight, model, memory, rngs)
        targets = [name for name in names if name in model.adapted]
        self.weights = nnx.Dict(
            {f"{n}_{part}": make(f"{n}_{part}") for n in targets for part in "ab"}
        )
        self.lora = model.lora

    def add(
        self,
        out: Array,
        name: str,
        x: Array,
        equations: tuple[str, str],
        *,
        spec: P | None = None,
        spread: Callable[[Array], Array] = lambda weight: weight,
    ) -> Array:
        """The projection's output with what its adapter makes of its input.

        Args:
            equations: of `contract`, into the adapter and out of it.
            spec: of what is between: it is summed over devices, or gathered, while it is narrow.
            spread: of B, as key/value heads are copied.
        """
        if f"{name}_a" not in self.weights:
            return out
        a, b = (read(self.weights[f"{name}_{part}"], x.dtype, gathered=False) for part in "ab")
        sums = TENSOR in jax.typeof(a).sharding.spec
        inner = contract(equations[0], x, a, spec if sums else None)
        inner = inner if spec is None else reshard(inner, spec)
        return out + contract(equations[1], inner, spread(b)) * self.lora.scale
