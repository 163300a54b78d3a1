"""A short sample of text from a model in training.

It decodes naively: every token takes a whole forward pass, no cache is kept.
Letters: B batch, T sequence, D model width, V vocabulary.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, reshard
from jax.sharding import PartitionSpec as P

from tpjax.config import TrainConfig
from tpjax.layers import gather_fsdp
from tpjax.mesh import BATCH, TENSOR
from tpjax.sharding import activation_spec, weight_spec
from tpjax.state import graph, purpose_key

TEMPERATURE = 0.8


def sample(
    config: TrainConfig, mesh: Mesh, params: dict, prompt: np.ndarray, count: int, seed: int
) -> list[int]:
    """`count` tokens that follow `prompt`; together at most `seq_len`."""
    # Every shard of the batch decodes a row of its own; the first is returned.
    B = mesh.shape["data"] * mesh.shape["fsdp"]
    tokens = np.zeros((B, config.data.seq_len), np.int32)
    tokens[:, : len(prompt)] = prompt
    with jax.set_mesh(mesh):
        tokens_BT = jax.device_put(tokens, activation_spec("BT"))
        run = jax.jit(partial(_decode, config), static_argnums=(2, 3))
        done = run(params, tokens_BT, len(prompt), count, purpose_key(seed, "sampling"))
    row = np.asarray(done.addressable_shards[0].data)[0]
    return row[len(prompt) : len(prompt) + count].tolist()


def _decode(
    config: TrainConfig, params: dict, tokens_BT: Array, first: int, count: int, key: Array
) -> Array:
    model = nnx.merge(graph(config), params)

    def one(position: Array, tokens_BT: Array) -> Array:
        x_BTD = reshard(model(tokens_BT), activation_spec("BTD"))
        x_BD = jax.lax.dynamic_index_in_dim(x_BTD, position - 1, axis=1, keepdims=False)
        next_B = next_token(
            x_BD, model.head_VD(), jax.random.fold_in(key, position), config.model.vocab_size
        )
        return jax.lax.dynamic_update_slice_in_dim(tokens_BT, next_B[:, None], position, axis=1)

    return jax.lax.fori_loop(first, first + count, one, tokens_BT)


def next_token(x_BD: Array, head_VD: Array, key: Array, vocab_size: int) -> Array:
    """Samples from softmax(logits / temperature) by the Gumbel trick: the arg max of
    logits with noise. Each device finds the best of its own vocabulary rows, and only
    the winners are compared: no logits are gathered, and padding never wins."""

    V = head_VD.shape[0]
    noise_BV = jax.random.gumbel(
        key, (x_BD.shape[0], V), jnp.float32, out_sharding=P(BATCH, TENSOR)
    )

    @partial(
        jax.shard_map,
        in_specs=(P(BATCH, None), weight_spec("VD"), P(BATCH, TENSOR)),
        out_specs=P(BATCH),
    )
    def local(x: Array, head: Array, noise: Array) -> Array:
        head = gather_fsdp(head, axis=1)
        first_row = jax.lax.axis_index(TENSOR) * head.shape[0]
        logits = jnp.einsum("BD,VD->BV", x, head, preferred_element_type=jnp.float32)
        row = first_row + jnp.arange(head.shape[0])
        scores = jnp.where(row < vocab_size, logits / TEMPERATURE + noise, -jnp.inf)
        best = scores.max(-1)
        winner = jnp.where(best == jax.lax.pmax(best, TENSOR), row[scores.argmax(-1)], V)
        return jax.lax.pmin(winner, TENSOR)

    return local(x_BD, head_VD, noise_BV)
