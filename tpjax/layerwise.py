"""The layer-by-layer update: each gradient is used as soon as it is there.

Forward, each layer's input is kept. Going back, one layer at a time is run again,
its gradient made and its parameters updated, then the vocabulary's tables some
rows at a time, so that never more than one such part's gradient exists (as LOMO,
arXiv:2306.09782, does for SGD; here for any optimiser that acts parameter by
parameter).

Letters: B batch, T sequence, D model width, L layers; A parts of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.experimental.layout import Layout, with_layout_constraint
from jax.sharding import reshard

from tpjax import quant, remat, tables, updates
from tpjax.config import TrainConfig
from tpjax.loss import loss_and_x_gradient
from tpjax.model import Transformer
from tpjax.precision import DTYPES
from tpjax.rope import rope_tables
from tpjax.sharding import activation_spec, deal, fetch, undeal
from tpjax.state import Batch, TrainState, graph, optimizer_of
from tpjax.updates import Application


def clip_each(config: TrainConfig) -> float:
    """The greatest norm of each layer's gradient, each table's and the rest's (0: not clipped):
    all of them at it, the whole gradient is at `clip`. A table's is shared out alike over its
    parts.

    The global norm is not known before the last part, when the others are used up.
    """
    num_tables = 1 if config.model.tie_embeddings else 2
    return config.optim.clip / math.sqrt(config.model.num_layers + num_tables + 1)


def update(
    config: TrainConfig, state: TrainState, batch: Batch, key: Array
) -> tuple[dict, dict, Array, Array]:
    """New parameters, new optimiser state, mean loss and global norm of the gradient.

    A loss that is not finite is seen before anything is updated; then nothing is.
    """
    sweep = _Sweep(config, state, batch)
    x_BTD, kept, embed_back = sweep.forward()
    loss, dx_BTD, y_BTD, lse_BT, norm_gradients = sweep.loss(x_BTD)
    how = Application(key, jnp.float32(1), jnp.isfinite(loss))
    blocks, dx_BTD, squares = sweep.backward(kept, dx_BTD, how)
    rest, rest_squares = sweep.rest(norm_gradients, embed_back, dx_BTD, how)
    done, table_squares = sweep.tables(y_BTD, lse_BT, dx_BTD, how)
    params = {**rest[0], "blocks": blocks[0]}
    states = {"rest": rest[1], "tables": {}, "blocks": blocks[1]}
    for name, (table, table_state) in done.items():
        params |= table
        states["tables"][name] = table_state
    return params, states, loss, jnp.sqrt(squares + rest_squares + table_squares)


class _Sweep:
    """One step over one batch, piece by piece."""

    def __init__(self, config: TrainConfig, state: TrainState, batch: Batch):
        self.config, self.state, self.batch = config, state, batch
        self.parts, self.optimizer = updates.split(state.params), optimizer_of(config)
        assert isinstance(config.memory.split, int)  # resolved
        self.split, self.num_layers = config.memory.split, config.model.num_layers
        self.group = remat.group_size(self.num_layers) if config.memory.remat == "nested" else 1
        self.slots = quant.slots(self.parts.rest, DTYPES[config.memory.compute])
        self.clip = clip_each(config)
        self.blocks_graph, _ = nnx.split(self.model(self.slots).blocks)

    def model(self, rest_slots: dict) -> Transformer:
        """The model, to be differentiated in what is neither table nor layer."""
        rest = quant.attach(self.parts.rest, rest_slots)
        params = {**rest, **self.parts.tables, "blocks": self.parts.blocks}
        return nnx.merge(graph(self.config), params)

    def block(self, layer: dict, x_BTD: Array) -> Array:
        model, T = self.config.model, x_BTD.shape[1]
        rope = None if model.rope is None else rope_tables(model.rope, model.head_dim, T)
        return nnx.merge(self.blocks_graph, layer)(x_BTD, rope)

    def layer(self, layer: dict, x_BTD: Array) -> Array:
        """`block`, a part of the batch at a time."""
        if self.split == 1:
            return self.block(layer, x_BTD)

        def one(x: Array, a: Array) -> tuple[Array, None]:
            return _put(x, self.block(layer, _take(x, a)), a), None

        return undeal(jax.lax.scan(one, deal(x_BTD, self.split), jnp.arange(self.split))[0])

    def forward(self) -> tuple[Array, Array, Callable]:
        """The last block's output, the input of each group of layers, and what makes the
        rest's gradient of the embedding's."""

        def embed(slots: dict) -> Array:
            return self.model(slots).embed(self.batch.tokens_BT)

        def group(x_BTD: Array, first: Array) -> tuple[Array, Array]:
            def one(i: Array, x: Array) -> Array:
                return self.layer(updates.layer_of(self.parts.blocks, first + i), x)

            return jax.lax.fori_loop(0, self.group, one, x_BTD), self.keep(x_BTD)

        x_BTD, embed_back = jax.vjp(embed, self.slots)
        with jax.named_scope("layers"):
            firsts = jnp.arange(0, self.num_layers, self.group)
            x_BTD, kept = jax.lax.scan(group, x_BTD, firsts)
        return x_BTD, kept, embed_back

    def keep(self, x_BTD: Array) -> Array:
        """What waits for the backward pass, where it is to wait."""
        if not self.config.memory.offloads_residuals:
            return x_BTD
        return jax.device_put(x_BTD, jax.memory.Space.Host)

    def loss(self, x_BTD: Array) -> tuple[Array, Array, Array, Array, dict]:
        """The loss, its gradient in the last block's output, the normed output, the
        log-sum-exp of its logits, and the gradient of the rest."""
        config, batch = self.config, self.batch

        def norm(slots: dict, x_BTD: Array) -> Array:
            return self.model(slots).norm(x_BTD)

        y_BTD, back = jax.vjp(norm, self.slots, x_BTD)
        head_VD = self.model(self.slots).head_VD()
        tokens = (batch.targets_BT, batch.valid_BT, 1 / batch.count)
        static = (config.model.vocab_size, config.memory.loss_chunks)
        loss, dy_BTD, lse_BT = loss_and_x_gradient(
            y_BTD, head_VD, *tokens, *static, config.memory.sequence_parallel
        )
        gradients, dx_BTD = back(dy_BTD)
        return loss, dx_BTD, y_BTD, lse_BT, gradients

    def backward(self, kept: Array, dx_BTD: Array, how: Application) -> tuple:
        """(The layers' new parameters, state), the embedding's gradient, the sum of squares."""

        def layer(i: Array, carry: tuple) -> tuple:
            first, inputs, dx_BTD, stacked, squares = carry
            number = first + self.group - 1 - i
            params, _ = updates.layer_of(stacked, number)
            x_BTD = updates.layer_of(inputs, self.group - 1 - i)
            gradients, dx_BTD = self.gradients(params, x_BTD, dx_BTD)
            with jax.named_scope("update"):
                how_clipped, square = self.clipped(gradients, how)
                stacked = updates.update_layer(
                    self.optimizer, gradients, stacked, number, how_clipped
                )
            return first, inputs, dx_BTD, stacked, squares + square

        def group(carry: tuple, kept: tuple) -> tuple:
            first, x_BTD = kept
            dx_BTD, stacked, squares = carry
            inputs = self.inputs(stacked[0], first, fetch(x_BTD))
            start = (first, inputs, dx_BTD, stacked, squares)
            return jax.lax.fori_loop(0, self.group, layer, start)[2:], None

        stacked = (self.parts.blocks, self.state.opt_state["blocks"])
        firsts = jnp.arange(0, self.num_layers, self.group)
        with jax.named_scope("layers"):
            carry = (dx_BTD, stacked, jnp.float32(0))
            (dx_BTD, stacked, squares), _ = jax.lax.scan(group, carry, (firsts, kept), reverse=True)
        return stacked, dx_BTD, squares

    def inputs(self, blocks: dict, first: Array, x_BTD: Array) -> Array:
        """The inputs of the layers of a group, from that of its first."""
        if self.group == 1:
            return x_BTD[None]

        def one(i: Array, inputs: Array) -> Array:
            x_BTD = updates.layer_of(inputs, i - 1)
            y_BTD = self.layer(updates.layer_of(blocks, first + i - 1), x_BTD)
            return jax.lax.dynamic_update_index_in_dim(inputs, y_BTD, i, axis=0)

        inputs = jnp.broadcast_to(x_BTD, (self.group, *x_BTD.shape))
        return jax.lax.fori_loop(1, self.group, one, inputs)

    def gradients(self, params: dict, x_BTD: Array, dx_BTD: Array) -> tuple[dict, Array]:
        """Of one layer's parameters and input; of several parts, added up in float32."""
        slots = quant.slots(params, DTYPES[self.config.memory.compute])

        def back(x: Array, dx: Array) -> tuple[dict, Array]:
            def block(slots: dict, x: Array) -> Array:
                return self.block(quant.attach(params, slots), x)

            return jax.vjp(block, slots, x)[1](dx)

        if self.split == 1:
            gradients, dx_BTD = back(x_BTD, dx_BTD)
            return jax.tree.map(_in_order, gradients), dx_BTD
        x_parts = deal(x_BTD, self.split)

        def one(carry: tuple, a: Array) -> tuple:
            total, dx = carry
            gradients, dx_a = back(_take(x_parts, a), _take(dx, a))
            total = jax.tree.map(lambda t, g: t + g.astype(t.dtype), total, gradients)
            return (total, _put(dx, dx_a, a)), None

        zeros = jax.tree.map(lambda s: jnp.zeros_like(s, jnp.float32), slots)
        start = (zeros, deal(dx_BTD, self.split))
        (total, dx_BTD), _ = jax.lax.scan(one, start, jnp.arange(self.split))
        return total, undeal(dx_BTD)

    def clipped(
        self, gradients: dict, how: Application, parts: int = 1
    ) -> tuple[Application, Array]:
        """How to apply the gradient of a layer, of the rest, or of one of the `parts` of a
        table; and its sum of squares."""
        norm = updates.global_norm(gradients)
        scale = updates.clip_scale(norm, self.clip / math.sqrt(parts))
        return how._replace(scale=scale), norm * norm

    @jax.named_scope("update")
    def rest(self, gradients: dict, embed_back: Callable, dx_BTD: Array, how: Application) -> tuple:
        """(New parameters, state) of the rest, and the sum of squares."""
        (of_embedding,) = embed_back(dx_BTD)
        gradients = jax.tree.map(jnp.add, gradients, of_embedding)
        how, square = self.clipped(gradients, how.of("rest"))
        state = self.state.opt_state["rest"]
        done = updates.update_part(self.optimizer, gradients, state, self.parts.rest, how)
        return done, square

    def tables(self, y_BTD: Array, lse_BT: Array, dx_BTD: Array, how: Application) -> tuple:
        """({name: new table}, state) by name, and the sum of squares."""
        config, batch = self.config, self.batch
        model, memory, parts = config.model, config.memory, config.model.table_parts
        tokens = (batch.targets_BT, batch.valid_BT, lse_BT, 1 / batch.count)
        with jax.named_scope("loss"):  # gathered once for all parts
            y_BTD, dx_BTD = (reshard(x, activation_spec("BTD")) for x in (y_BTD, dx_BTD))

        def gradient(name: str, table: dict, part: Array) -> Array:
            total, V = jnp.zeros((), y_BTD.dtype), model.padded_vocab_size
            if name == "head" or model.tie_embeddings:
                rows_UD = quant.value(updates.rows_of(table, part, parts)[name], y_BTD.dtype)
                static = {"vocab_size": model.vocab_size, "chunks": memory.loss_chunks}
                total += tables.head_gradient(y_BTD, rows_UD, part, parts, *tokens, **static)
            if name == "embedding":
                total += tables.embedding_gradient(dx_BTD, batch.tokens_BT, part, parts, V)
            return total

        def rows(name: str, carry: tuple, part: Array) -> tuple:
            whole, squares = carry
            with jax.named_scope("loss"):
                gradients = {name: gradient(name, whole[0], part)}
            with jax.named_scope("update"):
                how_clipped, square = self.clipped(gradients, how, parts)
                whole = updates.update_rows(
                    self.optimizer, gradients, whole, part, parts, how_clipped
                )
            return (whole, squares + square), None

        done, squares = {}, jnp.float32(0)
        for name, table in self.parts.tables.items():
            start = (({name: table}, self.state.opt_state["tables"][name]), squares)
            (done[name], squares), _ = jax.lax.scan(partial(rows, name), start, jnp.arange(parts))
        return done, squares


def _in_order(gradient: Array) -> Array:
    """Laid out as the stack that it changes a layer of. Where the matmul that makes it has its
    dimensions in another order, XLA would bring all layers' weights and moments to that one."""
    spec, layout = jax.typeof(gradient).sharding.spec, Layout(tuple(range(gradient.ndim)))
    # On each device's own shard: XLA would put the whole array together for it.
    local = jax.shard_map(
        lambda g: with_layout_constraint(g, layout), in_specs=spec, out_specs=spec
    )
    return local(gradient)


def _take(x: Array, a: Array) -> Array:
    return jax.lax.dynamic_index_in_dim(x, a, axis=1, keepdims=False)


def _put(x: Array, part: Array, a: Array) -> Array:
    return jax.lax.dynamic_update_index_in_dim(x, part, a, axis=1)
