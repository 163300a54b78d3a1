"""AdamW with low-precision moments, as optax transformations, and its schedule."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from tpjax import moments, precision, quant
from tpjax.config import ModelConfig, OptimConfig
from tpjax.layers import PARAMETERS, int8_block
from tpjax.moments import Blocks, Factored, Plain, Rates, Storage
from tpjax.quant import Int8
from tpjax.sharding import beside, deal, fetch, undeal

ADAM_EPS = 1e-8


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


class AdamState(NamedTuple):
    """Adam's memory: steps taken, and the decayed means of g and g², as stored."""

    step: Array
    mu: Any
    nu: Any


def _tree_keys(key: Array, tree) -> list[Array]:
    """A key for every leaf, from its position in the tree."""
    count = len(jax.tree.leaves(tree, is_leaf=quant.is_int8))
    return [jax.random.fold_in(key, i) for i in range(count)]


def scale_by_adam(
    b1: float, b2: float, eps: float, storage: Callable[[Any, Any], Storage] = moments.fp32
) -> optax.GradientTransformationExtraArgs:
    """Adam (arXiv:1412.6980) whose moments are stored as `storage` says.

    Arithmetic and the updates returned are float32 whatever is stored and whatever the
    gradients are. Works in any optax chain, leaf by leaf, and under `jax.vmap` over
    stacked layers.

    Args:
        storage: (path, parameter) → how its moments are kept, such as `moments.int8`.

    `update` takes `key`, the source of stochastic rounding; without one it is made
    from the number of the step.
    """

    def init(params) -> AdamState:
        leaves, structure = jax.tree_util.tree_flatten_with_path(params)
        zeros = [storage(path, leaf).zeros(leaf) for path, leaf in leaves]
        mu, nu = (structure.unflatten([pair[i] for pair in zeros]) for i in range(2))
        return AdamState(jnp.zeros((), jnp.int32), mu, nu)

    def update(updates, state, params=None, *, key: Array | None = None, **extra):
        count = state.step + 1
        key = jax.random.fold_in(jax.random.key(0), count) if key is None else key
        rates = Rates(b1, b2, 1 - b1**count, 1 - b2**count, eps)
        leaves, structure = jax.tree_util.tree_flatten_with_path(updates)
        stored = structure.flatten_up_to(state.mu), structure.flatten_up_to(state.nu)
        done = [
            storage(path, g).step(g.astype(jnp.float32), mu, nu, rates, leaf_key)
            for (path, g), mu, nu, leaf_key in zip(
                leaves, *stored, _tree_keys(key, updates), strict=True
            )
        ]
        steps, mu, nu = (structure.unflatten([leaf[i] for leaf in done]) for i in range(3))
        return steps, AdamState(count, mu, nu)

    return optax.GradientTransformationExtraArgs(init, update)


def schedule(config: OptimConfig, steps: int) -> optax.Schedule:
    """Linear warm-up to `lr`, then a cosine to `min_lr` at the last step."""
    warmup = config.warmup or 0
    return optax.warmup_cosine_decay_schedule(
        init_value=config.lr / (warmup + 1),
        peak_value=config.lr,
        warmup_steps=warmup,
        decay_steps=max(steps - 1, warmup + 1),
        end_value=config.min_lr,
    )


def decays(params):
    """True for the parameters that decay: matrices, by their name in the table."""
    return jax.tree.map_with_path(lambda path, _: PARAMETERS[path[-1].key].decays, params)


def moment_storage(model: ModelConfig, kind: str) -> Callable[[Any, Any], Storage]:
    """How the model's parameters keep their moments: as `kind` of MemoryConfig says, but
    vectors never in 8 bits."""

    def storage(path, leaf) -> Storage:
        name = path[-1].key
        if kind in ("fp32", "bf16"):
            return Plain(precision.DTYPES[kind])
        row = PARAMETERS[name]
        if not row.decays:
            return Plain(precision.DTYPES["fp32"])
        block = int8_block(model, name)
        return Factored(block, row.is_table) if kind == "factored" else Blocks(block)

    return storage


def make_optimizer(
    config: OptimConfig, steps: int, storage: Callable[[Any, Any], Storage] = moments.fp32
) -> optax.GradientTransformationExtraArgs:
    """AdamW for gradients already clipped; `update` takes `key`."""
    return optax.chain(
        scale_by_adam(config.beta1, config.beta2, ADAM_EPS, storage),
        optax.add_decayed_weights(config.weight_decay, mask=decays),
        optax.scale_by_learning_rate(schedule(config, steps)),
    )


def exact(params):
    """Parameters as the optimiser sees them: float32, however they are stored."""
    return jax.tree.map(lambda p: quant.value(p, jnp.float32), params, is_leaf=quant.is_int8)


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
    leaves, structure = jax.tree.flatten(params, is_leaf=quant.is_int8)
    rows = zip(
        leaves,
        jax.tree.leaves(values),
        jax.tree.leaves(updates),
        _tree_keys(store_key, params),
        strict=True,
    )
    new = structure.unflatten([_store(p, x + u, leaf_key) for p, x, u, leaf_key in rows])
    keep = partial(jnp.where, how.ok)
    return jax.tree.map(keep, new, params), jax.tree.map(keep, new_state, state)


def _store(old: Array | Int8, new: Array, key: Array) -> Array | Int8:
    """A new parameter (float32) kept as the old one is."""
    if isinstance(old, Int8):
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
