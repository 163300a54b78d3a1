"""AdamW with low-precision moments, as optax transformations, and its schedule."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from tpjax import precision
from tpjax.config import OptimConfig
from tpjax.layers import PARAMETERS

ADAM_EPS = 1e-8


class AdamState(NamedTuple):
    """Adam's memory: steps taken, and the decayed means of g and g², as stored."""

    step: Array
    mu: Any
    nu: Any


def _tree_keys(key: Array, tree):
    """A key for every leaf, from its position in the tree."""
    leaves, structure = jax.tree.flatten(tree)
    return jax.tree.unflatten(structure, [jax.random.fold_in(key, i) for i in range(len(leaves))])


def scale_by_adam(
    b1: float, b2: float, eps: float, dtype: jnp.dtype
) -> optax.GradientTransformationExtraArgs:
    """Adam (arXiv:1412.6980) with moments stored in `dtype`.

    Arithmetic and the updates returned are float32 whatever `dtype` and the
    gradients are. bfloat16 moments are rounded stochastically: rounded to
    nearest, a mean that changes by a thousandth per step would never move.
    `update` takes `key`, the source of that rounding.
    """

    def init(params) -> AdamState:
        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, dtype), params)
        return AdamState(jnp.zeros((), jnp.int32), zeros, jax.tree.map(jnp.copy, zeros))

    def update(updates, state, params=None, **extra):
        count, key = state.step + 1, extra["key"]
        bias1, bias2 = 1 - b1**count, 1 - b2**count

        def one(g: Array, mu: Array, nu: Array, key: Array):
            g, key1, key2 = g.astype(jnp.float32), *jax.random.split(key)
            mu = b1 * mu.astype(jnp.float32) + (1 - b1) * g
            nu = b2 * nu.astype(jnp.float32) + (1 - b2) * g * g
            step = (mu / bias1) / (jnp.sqrt(nu / bias2) + eps)
            return step, precision.store(mu, dtype, key1), precision.store(nu, dtype, key2)

        leaves, structure = jax.tree.flatten(updates)
        keys = jax.tree.leaves(_tree_keys(key, updates))
        done = list(map(one, leaves, jax.tree.leaves(state.mu), jax.tree.leaves(state.nu), keys))
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


def make_optimizer(
    config: OptimConfig, steps: int, moments: jnp.dtype
) -> optax.GradientTransformationExtraArgs:
    """AdamW for gradients already clipped; `update` takes `key`."""
    return optax.chain(
        scale_by_adam(config.beta1, config.beta2, ADAM_EPS, moments),
        optax.add_decayed_weights(config.weight_decay, mask=decays),
        optax.scale_by_learning_rate(schedule(config, steps)),
    )


def init(optimizer: optax.GradientTransformation, params) -> dict:
    """The optimiser's state: of the stacked blocks layer by layer, and of the rest.

    Mapping over the layers gives each its own scalars, so that the state means
    the same whether layers are updated together or one at a time.
    """
    rest, blocks = _split(params)
    return {"rest": optimizer.init(rest), "blocks": jax.vmap(optimizer.init)(blocks)}


def update(
    optimizer: optax.GradientTransformationExtraArgs, gradients, state: dict, params, key: Array
) -> tuple:
    """New parameters and state. Rounding depends on `key`, the layer and the position."""
    rest_gradients, block_gradients = _split(gradients)
    rest, blocks = _split(params)
    num_layers = jax.tree.leaves(blocks)[0].shape[0]
    keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(num_layers + 1))
    one = partial(update_layer, optimizer)
    blocks, block_state = jax.vmap(one)(block_gradients, state["blocks"], blocks, keys[:-1])
    rest, rest_state = one(rest_gradients, state["rest"], rest, keys[-1])
    return {**rest, "blocks": blocks}, {"rest": rest_state, "blocks": block_state}


def update_layer(
    optimizer: optax.GradientTransformationExtraArgs, gradients, state, params, key: Array
) -> tuple:
    """`update` of one layer or of the rest: added in float32, stored as parameters are."""
    update_key, store_key = jax.random.split(key)
    exact = jax.tree.map(lambda p: p.astype(jnp.float32), params)
    updates, state = optimizer.update(gradients, state, exact, key=update_key)
    params = jax.tree.map(
        lambda p, x, u, key: precision.store(x + u, p.dtype, key),
        params,
        exact,
        updates,
        _tree_keys(store_key, params),
    )
    return params, state


def _split(params: dict) -> tuple[dict, dict]:
    rest = {name: value for name, value in params.items() if name != "blocks"}
    return rest, params["blocks"]


def global_norm(tree) -> Array:
    """√ of the sum of all squares, in float32; the same on every mesh."""
    squares = [jnp.sum(jnp.square(leaf.astype(jnp.float32))) for leaf in jax.tree.leaves(tree)]
    return jnp.sqrt(sum(squares, jnp.float32(0)))


def clip_scale(norm: Array, clip: float) -> Array:
    """The factor that brings a gradient of this norm to at most `clip` (0: never)."""
    return jnp.minimum(1.0, clip / jnp.maximum(norm, 1e-12)) if clip else jnp.float32(1)
