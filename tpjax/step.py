"""One training step and one evaluation step, pure and compiled once.

Letters: B batch, T sequence; A parts of the batch (gradient accumulation).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpjax import layerwise, optim, quant, updates
from tpjax.config import TrainConfig
from tpjax.loss import next_token_loss
from tpjax.precision import DTYPES
from tpjax.sharding import deal
from tpjax.state import (
    Batch,
    TrainState,
    abstract_batch,
    abstract_state,
    graph,
    joined,
    optimizer_of,
    purpose_key,
)


def loss_sum(config: TrainConfig, params: dict, batch: Batch, scale: Array) -> Array:
    """−log p(target), summed over the batch's valid positions, times `scale`."""
    model = nnx.merge(graph(config), params)
    return next_token_loss(
        model(batch.tokens_BT),
        model.head_VD(),
        batch.targets_BT,
        batch.valid_BT,
        scale,
        config.model.vocab_size,
        config.memory.loss_chunks,
        config.memory.sequence_parallel,
    )


def loss_and_gradients(
    config: TrainConfig,
    params: dict,
    batch: Batch,
    loss_scale: Array | float = 1.0,
    frozen: dict | None = None,
) -> tuple[Array, dict]:
    """`loss_scale` times the mean loss over the valid positions of the whole batch, and its
    gradients; those of parameters in int8 are in the compute dtype.

    With accumulation, parts of the batch are swept one after the other and
    their gradients added in float32: the same sums in another order.
    """
    scale = loss_scale / batch.count
    slots = quant.slots(params, DTYPES[config.memory.compute])

    def of_part(part: Batch) -> tuple[Array, dict]:
        def loss(slots):
            trained = quant.attach(params, slots)
            return loss_sum(config, joined(trained, frozen or {}), part, scale)

        return jax.value_and_grad(loss)(slots)

    A = config.data.accumulate
    if A == 1:
        return of_part(batch)

    dealt = jax.tree.map(lambda x: deal(x, A), batch)

    def add_part(total, number: Array):
        take = partial(jax.lax.dynamic_index_in_dim, index=number, axis=1, keepdims=False)
        one = of_part(jax.tree.map(take, dealt))
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, one), None

    zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), slots)
    total, _ = jax.lax.scan(add_part, (jnp.float32(0), zeros), jnp.arange(A))
    return total


def train_step(
    config: TrainConfig, state: TrainState, batch: Batch
) -> tuple[TrainState, dict[str, Array]]:
    """The state after one more step, and the step's scalars.

    A step whose loss or gradient is not finite leaves parameters and moments as they are.

    Metrics: `loss` (mean over valid positions), `grad_norm` (before clipping), `lr`,
    `tokens` (valid positions), and with fp16 compute `loss_scale`.
    """
    update = layerwise.update if config.memory.update == "layerwise" else _update_whole
    key = jax.random.fold_in(purpose_key(state.seed, "rounding"), state.step)
    params, opt_state, loss, norm = update(config, state, batch, key)
    metrics = {
        "loss": loss,
        "grad_norm": norm,
        "lr": _learning_rate(config, state),
        "tokens": batch.valid_BT.sum(),
    }
    loss_scale = state.loss_scale
    if loss_scale is not None:
        metrics["loss_scale"] = loss_scale.scale
        # No scale mends a loss that is not finite itself.
        loss_scale = loss_scale.after(jnp.isfinite(norm) | ~jnp.isfinite(loss))
    new = TrainState(state.step + 1, state.seed, params, opt_state, loss_scale, state.frozen)
    return new, metrics


def _learning_rate(config: TrainConfig, state: TrainState) -> Array:
    """By the optimiser's own count of steps, which leaves out those that changed nothing."""
    count = optax.tree_utils.tree_get(state.opt_state["rest"], "count", state.step)
    return jnp.asarray(optim.schedule(config.optim, config.steps)(count))


def _update_whole(
    config: TrainConfig, state: TrainState, batch: Batch, key: Array
) -> tuple[dict, dict, Array, Array]:
    """New parameters, new optimiser state, mean loss and global norm of the gradient."""
    scale = jnp.float32(1) if state.loss_scale is None else state.loss_scale.scale
    loss, gradients = loss_and_gradients(config, state.params, batch, scale, state.frozen)
    norm = updates.global_norm(gradients) / scale
    how = updates.Application(
        key=key,
        scale=updates.clip_scale(norm, config.optim.clip) / scale,
        ok=jnp.isfinite(loss) & jnp.isfinite(norm),
    )
    optimizer = optimizer_of(config)
    with jax.named_scope("update"):
        params, opt_state = updates.update(
            optimizer, gradients, state.opt_state, state.params, how, config.model.table_parts
        )
    return params, opt_state, loss / scale, norm


def eval_step(
    config: TrainConfig, params: dict, totals: tuple[Array, Array], batch: Batch
) -> tuple[Array, Array]:
    """`totals` (loss summed over valid positions, their count) with a batch added."""
    loss, count = totals
    one = loss_sum(config, params, batch, jnp.float32(1))
    return loss + one, count + batch.valid_BT.sum()


def lower_train_step(config: TrainConfig, mesh: Mesh) -> jax.stages.Lowered:
    """`train_step` for the mesh, its state updated in place where `donate` is on.

    The state's shardings are the same going in and coming out, so that every
    buffer can be reused and nothing ever compiles a second time.
    """
    state = abstract_state(config, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    with jax.set_mesh(mesh):
        step = jax.jit(
            partial(train_step, config),
            donate_argnums=0 if config.memory.donate else (),
            out_shardings=(shardings, None),
            compiler_options=_options(config, mesh),
        )
        return step.lower(state, abstract_batch(config, mesh, config.data.batch_size))


def lower_eval_step(config: TrainConfig, mesh: Mesh) -> jax.stages.Lowered:
    """`eval_step` for the mesh, on as many rows as a part of the step's batch has."""
    whole = NamedSharding(mesh, P())
    totals = (
        jax.ShapeDtypeStruct((), jnp.float32, sharding=whole),
        jax.ShapeDtypeStruct((), jnp.int32, sharding=whole),
    )
    params = abstract_state(config, mesh).weights
    with jax.set_mesh(mesh):
        step = jax.jit(
            partial(eval_step, config),
            out_shardings=(whole, whole),
            compiler_options=_options(config, mesh),
        )
        return step.lower(params, totals, abstract_batch(config, mesh, config.data.part_size))


def _options(config: TrainConfig, mesh: Mesh) -> dict:
    """Compiler options of a run. XLA's programs for the CPU are deterministic as they are; those
    for a GPU may add up with atomics, and choose kernels by timing them."""
    if not config.deterministic or mesh.devices.flat[0].platform != "gpu":
        return {}
    return {"xla_gpu_deterministic_ops": True, "xla_gpu_autotune_level": 0}
