"""The optimiser's update, in three parts: the stacked layers, one at a time, the vocabulary's
tables, some rows at a time, and the rest; so that what an update needs beside is there once."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from tpjax import precision, quant
from tpjax.optim import tree_keys
from tpjax.quant import Quantised
from tpjax.sharding import beside, deal, fetch, undeal

_TABLES = ("embedding", "head")
_PARTS = ("blocks", "rest", *_TABLES)


class Application(NamedTuple):
    """What all parts of one update share.

    Attributes:
        key: of the stochastic rounding.
        scale: float32, what gradients are multiplied by first.
        ok: bool; where it is false nothing changes.
    """

    key: Array
    scale: Array
    ok: Array

    def of(self, part: str, number: Array | int = 0) -> Application:
        """The same, with the key of a layer, of a part of a table, or of the rest."""
        key = jax.random.fold_in(self.key, _PARTS.index(part))
        return self._replace(key=jax.random.fold_in(key, number))


def exact(params):
    """Parameters as the optimiser sees them: float32, however they are stored."""
    return jax.tree.map(lambda p: quant.value(p, jnp.float32), params, is_leaf=quant.is_quantised)


def init(optimizer: optax.GradientTransformation, params) -> dict:
    """The optimiser's state: of the stacked blocks layer by layer, of each table by itself,
    and of the rest.

    Mapping over the layers gives each its own scalars, so that the state means
    the same whether layers are updated together or one at a time.
    """
    parts = split(params)
    state = {name: optimizer.init(exact({name: table})) for name, table in parts.tables.items()}
    return {
        "rest": optimizer.init(exact(parts.rest)),
        "tables": state,
        "blocks": jax.vmap(lambda layer: optimizer.init(exact(layer)))(parts.blocks),
    }


def update(
    optimizer: optax.GradientTransformation,
    gradients: dict,
    state: dict,
    params: dict,
    how: Application,
    table_parts: int,
) -> tuple[dict, dict]:
    """New parameters and state, in place and one layer or part of a table after the other, so
    that what an update needs beside is there once. Rounding depends on the key, the layer or
    part, and the position."""
    grads, old = split(gradients), split(params)
    num_layers = jax.tree.leaves(old.blocks)[0].shape[0]

    def layer(stacked, numbered):
        number, gradients = numbered
        return update_layer(optimizer, gradients, stacked, number, how), None

    def rows(name: str, stacked, part: Array):
        gradients = {name: rows_of(grads.tables[name], part, table_parts)}
        return update_rows(optimizer, gradients, stacked, part, table_parts, how), None

    layers = (jnp.arange(num_layers), grads.blocks)
    (blocks, block_state), _ = jax.lax.scan(layer, (old.blocks, state["blocks"]), layers)
    rest, rest_state = update_part(optimizer, grads.rest, state["rest"], old.rest, how.of("rest"))
    tables, table_states = {}, {}
    for name, table in old.tables.items():
        start = ({name: table}, state["tables"][name])
        numbers = jnp.arange(table_parts)
        (new, table_states[name]), _ = jax.lax.scan(partial(rows, name), start, numbers)
        tables |= new
    return (
        {**rest, **tables, "blocks": blocks},
        {"rest": rest_state, "tables": table_states, "blocks": block_state},
    )


def update_layer(
    optimizer: optax.GradientTransformation,
    gradients: dict,
    stacked: tuple,
    number: Array,
    how: Application,
) -> tuple:
    """Layer `number` of the stacked (parameters, state) updated in its place."""
    params, state = layer_of(stacked, number)
    new = update_part(optimizer, gradients, state, params, how.of("blocks", number))

    def put(all: Array, one: Array) -> Array:
        return jax.lax.dynamic_update_index_in_dim(all, beside(one, all), number, axis=0)

    return jax.tree.map(put, stacked, new)


def layer_of(stacked, number: Array):
    """Layer `number` of a stacked tree, on the device."""

    def take(all: Array) -> Array:
        return fetch(jax.lax.dynamic_index_in_dim(all, number, axis=0, keepdims=False))

    return jax.tree.map(take, stacked)


def update_rows(
    optimizer: optax.GradientTransformation,
    gradients: dict,
    whole: tuple,
    part: Array,
    parts: int,
    how: Application,
) -> tuple:
    """Rows `part`, `part` + `parts`, … of a table, its ({name: table}, state) updated in place.
    What the state has beside rows is that of the last part."""
    (name,) = gradients
    params, state = rows_of(whole, part, parts)
    new = update_part(optimizer, gradients, state, params, how.of(name, part))

    def put(all: Array, one: Array) -> Array:
        if all.ndim == 0:
            return jnp.where(part == parts - 1, one, all)
        one, dealt = beside(one, all), deal(all, parts)
        return undeal(jax.lax.dynamic_update_index_in_dim(dealt, one, part, axis=1))

    return jax.tree.map(put, whole, new)


def rows_of(tree, part: Array, parts: int):
    """Those rows of a tree's arrays, on the device; scalars as they are."""

    def take(leaf: Array) -> Array:
        if leaf.ndim == 0:
            return leaf
        return fetch(jax.lax.dynamic_index_in_dim(deal(leaf, parts), part, axis=1, keepdims=False))

    return jax.tree.map(take, tree)


def update_part(
    optimizer: optax.GradientTransformation, gradients, state, params, how: Application
) -> tuple:
    """`update` of one layer, or of the rest: added in float32, stored as parameters are."""
    update_key, store_key = jax.random.split(how.key)
    gradients = jax.tree.map(lambda g: g.astype(jnp.float32) * how.scale, gradients)
    values = exact(params)
    optimizer = optax.with_extra_args_support(optimizer)
    updates, new_state = optimizer.update(gradients, state, values, key=update_key)
    leaves, structure = jax.tree.flatten(params, is_leaf=quant.is_quantised)
    rows = zip(
        leaves,
        jax.tree.leaves(values),
        jax.tree.leaves(updates),
        tree_keys(store_key, params),
        strict=True,
    )
    new = structure.unflatten([_store(p, x + u, leaf_key) for p, x, u, leaf_key in rows])
    keep = partial(jnp.where, how.ok)
    return jax.tree.map(keep, new, params), jax.tree.map(keep, new_state, state)


def _store(old: Array | Quantised, new: Array, key: Array) -> Array | Quantised:
    """A new parameter (float32) kept as the old one is."""
    if isinstance(old, Quantised):
        bits, _ = precision.noise(key, new)
        return quant.quantise(new, old.block, precision.uniform(bits))
    if old.dtype == jnp.bfloat16:
        return precision.stochastic_round(new, precision.noise(key, new)[0])
    return new.astype(old.dtype)


class Parts(NamedTuple):
    """A tree like that of the parameters in three: what is neither, the vocabulary's tables,
    and the stacked layers."""

    rest: dict
    tables: dict
    blocks: dict


def split(params: dict) -> Parts:
    """The three parts of the parameters."""
    tables = {name: params[name] for name in _TABLES if name in params}
    rest = {name: value for name, value in params.items() if name not in (*tables, "blocks")}
    return Parts(rest, tables, params["blocks"])


def global_norm(tree) -> Array:
    """√ of the sum of all squares, in float32; the same on every mesh."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, jnp.float32(0)))


def clip_scale(norm: Array, clip: float) -> Array:
    """The factor that brings a gradient of this norm to at most `clip` (0: never)."""
    return jnp.minimum(1.0, clip / jnp.maximum(norm, 1e-12)) if clip else jnp.float32(1)
