"""What a step takes and gives: the train state and a batch, abstract or real.

One abstract state (shapes, dtypes, shardings) feeds initialisation and the
compilation of the step for devices that are there or are not.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpjax import optim, updates
from tpjax.config import MeshConfig, ModelConfig, TrainConfig
from tpjax.mesh import is_absent, make_mesh
from tpjax.model import Transformer
from tpjax.precision import LossScale
from tpjax.sharding import activation_spec


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that a step changes, and the seed of its rounding.

    Attributes:
        step: int32 scalar, steps taken.
        seed: uint32 scalar.
        params: the model's parameters, nested dicts by name.
        opt_state: `updates.init` of them.
        loss_scale: of fp16 compute, or None.
        frozen: parameters that no step changes, beside adapters that are trained: `params` are
            those then.
    """

    step: Array
    seed: Array
    params: dict
    opt_state: dict
    loss_scale: LossScale | None
    frozen: dict = dataclasses.field(default_factory=dict)

    @property
    def weights(self) -> dict:
        """All parameters of the model."""
        return joined(self.params, self.frozen)

    @property
    def changing(self) -> TrainState:
        """What a checkpoint has to hold."""
        return dataclasses.replace(self, frozen={})


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """Tokens to read, tokens to predict, and which predictions count (bool)."""

    tokens_BT: Array
    targets_BT: Array
    valid_BT: Array

    @property
    def count(self) -> Array:
        """Positions that count, float32, and 1 where there are none: to divide by."""
        return jnp.maximum(self.valid_BT.sum(), 1).astype(jnp.float32)


_PURPOSES = ("init", "rounding", "sampling")


def purpose_key(seed: Array | int, purpose: str) -> Array:
    """The run's key for one use of chance; no two uses share a key."""
    return jax.random.fold_in(jax.random.key(seed), _PURPOSES.index(purpose))


def joined(params: dict, frozen: dict) -> dict:
    """The parameters that are trained and those that are not, in one tree."""
    if not frozen:
        return params
    both = {name: joined(params[name], frozen[name]) for name in params.keys() & frozen.keys()}
    return {**frozen, **params, **both}


def _parted(model: ModelConfig, params: dict) -> tuple[dict, dict]:
    """What is trained, and what is not."""
    if not model.adapted:
        return params, {}
    trained, frozen = {}, {}
    for name, value in params.items():
        if name == "adapters":
            trained[name] = value
        elif isinstance(value, dict):
            inner_trained, inner_frozen = _parted(model, value)
            trained |= {name: inner_trained} if inner_trained else {}
            frozen |= {name: inner_frozen} if inner_frozen else {}
        else:
            frozen[name] = value
    return trained, frozen


def graph(config: TrainConfig) -> nnx.GraphDef:
    """The model without its arrays; `nnx.merge` puts parameters back in. Needs the mesh set."""
    return jax.eval_shape(partial(_split_model, config), 0)[0]


def _split_model(config: TrainConfig, seed: Array | int) -> tuple[nnx.GraphDef, dict]:
    rngs = nnx.Rngs(params=purpose_key(seed, "init"))
    graph, params = nnx.split(Transformer(config.model, config.memory, rngs))
    return graph, nnx.to_pure_dict(params)


def optimizer_of(config: TrainConfig):
    """The optimiser that a resolved configuration asks for."""
    storage = optim.moment_storage(config.model, config.memory.moments)
    return optim.make_optimizer(config.optim, config.steps, storage)


def _init(config: TrainConfig, seed: Array) -> TrainState:
    params, frozen = _parted(config.model, _split_model(config, seed)[1])
    opt_state = updates.init(optimizer_of(config), params)
    state = _scalars(config, seed)
    return dataclasses.replace(state, params=params, opt_state=opt_state, frozen=frozen)


def _scalars(config: TrainConfig, seed: Array) -> TrainState:
    """A new state, but for its parameters and moments."""
    loss_scale = LossScale.initial() if config.memory.compute == "fp16" else None
    return TrainState(jnp.zeros((), jnp.int32), seed, {}, {}, loss_scale)


def abstract_state(config: TrainConfig, mesh: Mesh) -> TrainState:
    """Shape, dtype and sharding of every array of the state; nothing is made."""
    with jax.set_mesh(mesh):
        state = jax.eval_shape(partial(_init, config), jax.ShapeDtypeStruct((), jnp.uint32))

    def place(leaf: jax.ShapeDtypeStruct, offloads: bool = False) -> jax.ShapeDtypeStruct:
        spec = P() if leaf.sharding is None else leaf.sharding.spec  # None: a scalar
        sharding = NamedSharding(mesh, spec)
        if offloads and len(leaf.shape) > 1:  # what is less is too small to be worth it
            sharding = host_sharding(mesh, spec)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

    moments = partial(place, offloads=config.memory.offloads_moments)
    placed = jax.tree.map(place, state)
    opt_state = jax.tree.map(moments, state.opt_state)
    return dataclasses.replace(placed, opt_state=opt_state)


def host_sharding(mesh: Mesh, spec: P) -> NamedSharding:
    """Shards that wait in the pinned memory of each device's host."""
    # Devices that are only compiled for know no memories; without them JAX asks nobody.
    where = mesh.abstract_mesh if is_absent(mesh.devices.flat[0]) else mesh
    return NamedSharding(where, spec, memory_kind="pinned_host")


def abstract_batch(config: TrainConfig, mesh: Mesh, rows: int) -> Batch:
    """Shape, dtype and sharding of a global batch of `rows` sequences."""
    shape = (rows, config.data.seq_len)
    sharding = NamedSharding(mesh, activation_spec("BT"))
    tokens: Any = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
    valid: Any = jax.ShapeDtypeStruct(shape, jnp.bool_, sharding=sharding)
    return Batch(tokens, tokens, valid)


def leaf_name(keys: tuple) -> str:
    """What an array of the state is called: where it is, with dots between."""
    return jax.tree_util.keystr(keys, simple=True, separator=".")


def lower_init(config: TrainConfig, mesh: Mesh) -> jax.stages.Lowered:
    """The program that makes the state from a seed: each shard where it belongs or, where
    `init` is eager, all of it on the mesh's first device."""
    if config.memory.init == "eager":
        mesh = make_mesh(MeshConfig(), config.model, [mesh.devices.flat[0]])
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, mesh))
    with jax.set_mesh(mesh):
        init = jax.jit(partial(_init, config), out_shardings=shardings)
        return init.lower(jax.ShapeDtypeStruct((), jnp.uint32))


def create_state(config: TrainConfig, mesh: Mesh) -> TrainState:
    """A new state. No host or device ever holds a whole parameter of it, unless `init` is
    eager: then it is whole on the first device, and moved from there to its shards."""
    state = lower_init(config, mesh).compile()(np.uint32(config.seed))
    if config.memory.init == "lazy":
        return state
    shards = abstract_state(config, mesh)
    return jax.device_put(state, jax.tree.map(lambda leaf: leaf.sharding, shards))


def state_with(config: TrainConfig, mesh: Mesh, base: dict) -> TrainState:
    """A new state around a model's parameters, which are there already; nothing of them is
    copied. With adapters they are what is frozen."""
    adapts, abstract = bool(config.model.adapted), abstract_state(config, mesh)

    def beside(params: dict) -> TrainState:
        if adapts:
            params = _parted(config.model, _split_model(config, config.seed)[1])[0]
        opt_state = updates.init(optimizer_of(config), params)
        state = _scalars(config, jnp.uint32(config.seed))
        return dataclasses.replace(state, params=params if adapts else {}, opt_state=opt_state)

    made = dataclasses.replace(abstract, frozen={}, params=abstract.params if adapts else {})
    shardings = jax.tree.map(lambda leaf: leaf.sharding, made)
    with jax.set_mesh(mesh):
        state = jax.jit(beside, out_shardings=shardings)({} if adapts else base)
    return dataclasses.replace(state, **{"frozen" if adapts else "params": base})
