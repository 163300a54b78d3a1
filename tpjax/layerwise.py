"""The layer-by-layer update: each layer's gradient is used as soon as it is there.

Forward, each layer's input is kept. Going back, one layer at a time is run again,
its gradient made and its parameters updated, so that never more than one layer's
gradient exists (LOMO, arXiv:2306.09782, and BAdam's like do so for SGD; here with
any optimiser that acts parameter by parameter).

Letters: B batch, T sequence, D model width, L layers; A parts of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array
from jax.sharding import PartitionSpec as P

from tpjax import optim, quant
from tpjax.config import TrainConfig
from tpjax.layers import rope_tables
from tpjax.loss import next_token_loss
from tpjax.optim import Application
from tpjax.precision import DTYPES
from tpjax.state import Batch, TrainState, graph, optimizer_of

Block = Callable[[dict, Array], Array]  # (one layer's parameters, x_BTD) → x_BTD


def update(
    config: TrainConfig, state: TrainState, batch: Batch, key: Array
) -> tuple[dict, dict, Array, Array]:
    """New parameters, new optimiser state, mean loss and global norm of the gradient."""
    optimizer, dtype = optimizer_of(config), DTYPES[config.memory.compute]
    rest, blocks = optim.split(state.params)
    slots = quant.slots(rest, dtype)

    def whole(slots: dict):
        return nnx.merge(graph(config), {**quant.attach(rest, slots), "blocks": blocks})

    block = _block(config, whole(slots), batch.tokens_BT.shape[1])
    x_BTD, embed_back = jax.vjp(lambda slots: whole(slots).embed(batch.tokens_BT), slots)
    with jax.named_scope("layers"):
        x_BTD, kept = jax.lax.scan(partial(_forward, config, block), x_BTD, blocks)

    def tail(slots: dict, x_BTD: Array) -> Array:
        model = whole(slots)
        return next_token_loss(
            model.norm(x_BTD),
            model.head_VD(),
            batch.targets_BT,
            batch.valid_BT,
            1 / batch.count,
            config.model.vocab_size,
            config.memory.loss_chunks,
            config.memory.sequence_parallel,
        )

    loss, (head_gradients, dx_BTD) = jax.value_and_grad(tail, (0, 1))(slots, x_BTD)
    how = Application(key, jnp.float32(1), jnp.isfinite(loss))
    clip = config.optim.clip / math.sqrt(config.model.num_layers + 1)

    def backward(carry, layer):
        dx_BTD, stacked, squares = carry
        number, x_BTD = layer
        params, _ = optim.layer_of(stacked, number)
        gradients, dx_BTD = _gradients(config, block, params, x_BTD, dx_BTD)
        stacked, norm = _clipped(
            optimizer, gradients, clip, how,
            lambda how: optim.update_layer(optimizer, gradients, stacked, number, how),
        )
        return (dx_BTD, stacked, squares + norm * norm), None

    stacked = (blocks, state.opt_state["blocks"])
    numbered = (jnp.arange(config.model.num_layers), kept)
    start = (dx_BTD, stacked, jnp.float32(0))
    with jax.named_scope("layers"):
        (dx_BTD, (blocks, block_state), squares), _ = jax.lax.scan(backward, start, numbered, reverse=True)
    (embed_gradients,) = embed_back(dx_BTD)
    gradients = jax.tree.map(jnp.add, head_gradients, embed_gradients)
    how = how._replace(key=jax.random.fold_in(key, config.model.num_layers))
    (rest, rest_state), norm = _clipped(
        optimizer, gradients, clip, how,
        lambda how: optim.update_part(optimizer, gradients, state.opt_state["rest"], rest, how),
    )
    params = {**rest, "blocks": blocks}
    return params, {"rest": rest_state, "blocks": block_state}, loss, jnp.sqrt(squares + norm * norm)


def _clipped(optimizer, gradients, clip: float, how: Application, apply):
    with jax.named_scope("update"):
        norm = optim.global_norm(gradients)
        return apply(how._replace(scale=optim.clip_scale(norm, clip))), norm


def _block(config: TrainConfig, model: nnx.Module, T: int) -> Block:
    graph, _ = nnx.split(model.blocks)
    rope = None
    if config.model.rope is not None:
        rope = rope_tables(config.model.rope, config.model.head_dim, T)
    return lambda layer, x_BTD: nnx.merge(graph, layer)(x_BTD, rope)


def _forward(config: TrainConfig, block: Block, x_BTD: Array, layer: dict) -> tuple[Array, Array]:
    A = config.memory.split
    parts = _deal(A, x_BTD)

    def one(x, a):
        return _put(x, block(layer, _take(x, a)), a), None

    if A == 1:
        return block(layer, x_BTD), x_BTD
    y, _ = jax.lax.scan(one, parts, jnp.arange(A))
    return _undeal(y, x_BTD), x_BTD


def _gradients(config: TrainConfig, block: Block, params: dict, x_BTD: Array, dx_BTD: Array):
    slots = quant.slots(params, DTYPES[config.memory.compute])

    def back(x, dx):
        _, back = jax.vjp(lambda s, x: block(quant.attach(params, s), x), slots, x)
        return back(dx)

    A = config.memory.split
    if A == 1:
        return back(x_BTD, dx_BTD)
    x_parts = _deal(A, x_BTD)

    def one(carry, a):
        total, dx = carry
        gradients, dx_a = back(_take(x_parts, a), _take(dx, a))
        return (jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, gradients), _put(dx, dx_a, a)), None

    zeros = jax.tree.map(lambda s: jnp.zeros_like(s, jnp.float32), slots)
    (total, dx), _ = jax.lax.scan(one, (zeros, _deal(A, dx_BTD)), jnp.arange(A))
    return total, _undeal(dx, dx_BTD)


def _deal(A: int, x: Array) -> Array:
    """[B, …] → [B/A, A, …]: rows are dealt out in turn, so that every part lies on all
    devices as the batch does and no row moves."""
    spec = jax.typeof(x).sharding.spec
    shape = (x.shape[0] // A, A, *x.shape[1:])
    return jax.lax.reshape(x, shape, out_sharding=P(spec[0], None, *spec[1:]))


def _undeal(x: Array, like: Array) -> Array:
    return jax.lax.reshape(x, like.shape, out_sharding=jax.typeof(like).sharding.spec)


def _take(x: Array, a: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(x, a, axis=1, keepdims=False)


def _put(x: Array, part: Array, a: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(x, part, a, axis=1)
