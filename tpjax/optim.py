"""AdamW with low-precision moments, as optax transformations, and its schedule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import Array

from tpjax import moments, precision, quant
from tpjax.config import ModelConfig, OptimConfig
from tpjax.layers import PARAMETERS, block_of
from tpjax.moments import Blocks, Factored, Plain, Rates, Storage

ADAM_EPS = 1e-8


class AdamState(NamedTuple):
    """Adam's memory: steps taken, and the decayed means of g and g², as stored."""

    step: Array
    mu: Any
    nu: Any


def tree_keys(key: Array, tree) -> list[Array]:
    """A key for every leaf, from its position in the tree."""
    count = len(jax.tree.leaves(tree, is_leaf=quant.is_quantised))
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
                leaves, *stored, tree_keys(key, updates), strict=True
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
        block = block_of(model, name)
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
