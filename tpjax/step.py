"""One training step and one evaluation step, pure and compiled once.

Letters: B batch, T sequence; A parts of the batch (gradient accumulation).
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpjax import optim
from tpjax.config import TrainConfig
from tpjax.loss import next_token_loss
from tpjax.sharding import activation_spec
from tpjax.state import (
    Batch,
    TrainState,
    abstract_batch,
    abstract_state,
    graph,
    optimizer_of,
    purpose_key,
)


def loss_sum(config: TrainConfig, params: dict, batch: Batch) -> Array:
    """−log p(target), summed over the batch's valid positions."""
    model = nnx.merge(graph(config), params)
    return next_token_loss(
        model(batch.tokens_BT),
        model.head_VD(),
        batch.targets_BT,
        batch.valid_BT,
        config.model.vocab_size,
        config.memory.loss_chunks,
        config.memory.sequence_parallel,
    )


def loss_and_gradients(config: TrainConfig, params: dict, batch: Batch) -> tuple[Array, dict]:
    """The mean loss over the valid positions of the whole batch, and its gradients.

    With accumulation, parts of the batch are swept one after the other and
    their gradients added in float32: the same sums in another order.
    """
    tokens = batch.valid_BT.sum()
    count = jnp.maximum(tokens, 1).astype(jnp.float32)

    def of_part(part: Batch) -> tuple[Array, dict]:
        return jax.value_and_grad(lambda p: loss_sum(config, p, part) / count)(params)

    A = config.data.accumulate
    if A == 1:
        return of_part(batch)

    def add_part(total, part: Batch):
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, of_part(part)), None

    zeros = jax.tree.map(lambda p: jnp.zeros_like(p, jnp.float32), params)
    parts = jax.tree.map(partial(_parts, A), batch)
    total, _ = jax.lax.scan(add_part, (jnp.float32(0), zeros), parts)
    return total


def _parts(A: int, x_BT: Array) -> Array:
    """[A, B/A, T]: rows are dealt out in turn, so that every part lies on all devices as
    the batch does and no row moves."""
    B, T = x_BT.shape
    spec = P(*activation_spec("B"), None, None)
    return jnp.moveaxis(jax.lax.reshape(x_BT, (B // A, A, T), out_sharding=spec), 1, 0)


def train_step(
    config: TrainConfig, state: TrainState, batch: Batch
) -> tuple[TrainState, dict[str, Array]]:
    """The state after one more step, and the step's scalars.

    Metrics: `loss` (mean over valid positions), `grad_norm` (before clipping),
    `lr`, `tokens` (valid positions).
    """
    loss, gradients = loss_and_gradients(config, state.params, batch)
    norm = optim.global_norm(gradients)
    scale = optim.clip_scale(norm, config.optim.clip)
    gradients = jax.tree.map(lambda g: g.astype(jnp.float32) * scale, gradients)
    key = jax.random.fold_in(purpose_key(state.seed, "rounding"), state.step)
    with jax.named_scope("update"):
        params, opt_state = optim.update(
            optimizer_of(config), gradients, state.opt_state, state.params, key
        )
    metrics = {
        "loss": loss,
        "grad_norm": norm,
        "lr": optim.schedule(config.optim, config.steps)(state.step),
        "tokens": batch.valid_BT.sum(),
    }
    return TrainState(state.step + 1, state.seed, params, opt_state), metrics


def eval_step(
    config: TrainConfig, params: dict, totals: tuple[Array, Array], batch: Batch
) -> tuple[Array, Array]:
    """`totals` (loss summed over valid positions, their count) with a batch added."""
    loss, count = totals
    return loss + loss_sum(config, params, batch), count + batch.valid_BT.sum()


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
        )
        return step.lower(state, abstract_batch(config, mesh, config.data.batch_size))


def lower_eval_step(config: TrainConfig, mesh: Mesh) -> jax.stages.Lowered:
    """`eval_step` for the mesh, on as many rows as a part of the step's batch has."""
    whole = NamedSharding(mesh, P())
    totals = (
        jax.ShapeDtypeStruct((), jnp.float32, sharding=whole),
        jax.ShapeDtypeStruct((), jnp.int32, sharding=whole),
    )
    params = abstract_state(config, mesh).params
    with jax.set_mesh(mesh):
        step = jax.jit(partial(eval_step, config), out_shardings=(whole, whole))
        return step.lower(params, totals, abstract_batch(config, mesh, config.data.part_size))
