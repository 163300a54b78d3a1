"""The decoder: embed → scan over blocks → norm.

Letters: B batch, T sequence, D model width, V vocabulary, L layers.
"""

from __future__ import annotations

from functools import partial

import jax
from flax import nnx
from jax import Array
from jax.sharding import reshard

from tpjax import remat
from tpjax.attention import Attention, Mix
from tpjax.config import MemoryConfig, ModelConfig
from tpjax.layers import Norm, embed, make_weight, read
from tpjax.mlp import MLP
from tpjax.precision import DTYPES
from tpjax.rope import rope_tables
from tpjax.sharding import residual_spec


class Block(nnx.Module):
    """One layer: x += attention(norm(x)); x += mlp(norm(x))."""

    def __init__(self, model: ModelConfig, memory: MemoryConfig, rngs: nnx.Rngs):
        self.attention_norm = Norm(model, memory, rngs)
        self.attention = Attention(model, memory, rngs)
        self.mlp_norm = Norm(model, memory, rngs)
        self.mlp = MLP(model, memory, rngs)

    def __call__(
        self, x_BTD: Array, rope: tuple[Array, Array] | None, mix: Mix | None = None
    ) -> Array:
        x_BTD += self.attention(self.attention_norm(x_BTD), rope, mix)
        x_BTD = remat.name(x_BTD, "mlp_in")
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class Transformer(nnx.Module):
    """tokens_BT → x_BTD, the normed output of the last block.

    The loss multiplies it with `head_VD`, chunk by chunk; logits of the whole
    sequence are nowhere.
    """

    def __init__(self, model: ModelConfig, memory: MemoryConfig, rngs: nnx.Rngs):
        make = partial(make_weight, model, memory, rngs)
        self.embedding = make("embedding")
        self.positions = make("positions") if model.rope is None else None
        make_blocks = nnx.scan(  # one at a time: a layer in float32 is there once
            lambda rngs: Block(model, memory, rngs),
            in_axes=0,
            out_axes=0,
            transform_metadata={nnx.PARTITION_NAME: None},
        )
        self.blocks = make_blocks(rngs.split(model.num_layers))
        self.norm = Norm(model, memory, rngs)
        self.head = None if model.tie_embeddings else make("head")
        self.model, self.memory = model, memory

    def __call__(self, tokens_BT: Array) -> Array:
        x_BTD = self.embed(tokens_BT)
        rope = None
        if self.model.rope is not None:
            rope = rope_tables(self.model.rope, self.model.head_dim, tokens_BT.shape[1])
        block, stacked = nnx.split(self.blocks)

        def layer(x_BTD: Array, weights: dict, rope: tuple[Array, Array] | None) -> Array:
            return nnx.merge(block, weights)(x_BTD, rope)

        with jax.named_scope("layers"):
            x_BTD = remat.scan(layer, x_BTD, stacked, rope, self.memory)
        return self.norm(x_BTD)

    @jax.named_scope("embedding")
    def embed(self, tokens_BT: Array, positions_BT: Array | None = None) -> Array:
        """tokens_BT → the residual stream x_BTD before the first block; without positions
        they are 0, 1, …"""
        dtype, sequence_parallel = DTYPES[self.memory.compute], self.memory.sequence_parallel
        table_VD = read(self.embedding, dtype, gathered=False)
        x_BTD = embed(table_VD, tokens_BT, sequence_parallel)
        if self.positions is not None:
            table_TD = read(self.positions, dtype)
            if positions_BT is not None:
                spec = residual_spec(sequence_parallel)
                return x_BTD + table_TD.at[positions_BT].get(out_sharding=spec)
            positions_TD = table_TD[: tokens_BT.shape[1]]
            x_BTD += reshard(positions_TD, jax.P(*residual_spec(sequence_parallel)[1:]))
        return x_BTD

    def head_VD(self) -> Array:
        """The output matrix in the compute dtype, as it is stored; rows from `vocab_size`
        on are padding."""
        weight = self.embedding if self.head is None else self.head
        return read(weight, DTYPES[self.memory.compute], gathered=False)
