"""A checkpoint onto the mesh and in the number formats of a run, array by array.

Each device's shard is read from the files as the run's own sharding asks for it, whatever mesh
wrote them: no host and no device ever holds more of an array than its shards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax import Array
from jax.sharding import Mesh, NamedSharding

from tpjax import moments, quant
from tpjax.checkpoint import Checkpoint
from tpjax.config import ConfigError, TrainConfig
from tpjax.moments import Factors
from tpjax.precision import LossScale
from tpjax.quant import Quantised
from tpjax.state import TrainState, abstract_state, leaf_name

_LOSS_SCALE = "loss_scale"


class Restoration:
    """What of a checkpoint goes where in a run's state, checked before anything is read.

    Attributes:
        notes: what is converted, a line each.

    Raises:
        ConfigError: the state has arrays of other names or shapes, or in a format that nothing
            can be made of.
    """

    def __init__(self, checkpoint: Checkpoint, config: TrainConfig, mesh: Mesh):
        self._checkpoint, self._config, self._mesh = checkpoint, config, mesh
        self._path = checkpoint.path.absolute()  # Orbax takes no others
        self._target = abstract_state(config, mesh).changing
        handler = ocp.PyTreeCheckpointHandler(enable_pinned_host_transfer=False)
        self._checkpointer = ocp.Checkpointer(handler)
        self._stored = self._read_shapes()
        units, self._structure = jax.tree.flatten_with_path(self._target, is_leaf=_is_unit)
        self._units = [(leaf_name(keys), unit) for keys, unit in units]
        self.notes = self._check()

    def parameters(self) -> Iterator[tuple[str, Array | Quantised]]:
        """Path and array of each parameter, one after the other; nothing else is read."""
        for name, like in self._units:
            if name.startswith("params."):
                yield name.removeprefix("params."), self._unit(name, like)

    def state(self) -> TrainState:
        """The state, on the devices, but for what is frozen; one array at a time, so that beside
        it there is never more than one."""
        units = [self._unit(name, like) for name, like in self._units]
        state = jax.tree.unflatten(self._structure, units)
        seed = jax.device_put(np.uint32(self._config.seed), self._target.seed.sharding)
        return dataclasses.replace(state, seed=seed)

    def _read_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        try:
            metadata: Any = self._checkpointer.metadata(self._path).item_metadata
            if metadata is None:
                raise ValueError("Orbax finds no arrays described in it")
            return {
                str(name): jax.ShapeDtypeStruct(array.shape, array.dtype)
                for name, array in metadata.tree.items()
            }
        except Exception as error:  # whatever untrusted files make Orbax raise
            raise ConfigError(
                f"checkpoint {self._checkpoint.path} cannot be read: {_first_line(error)}. Move "
                "it away to go on from the one before."
            ) from error

    def _check(self) -> list[str]:
        used, notes = set(), []
        for name, like in self._units:
            stored = self._stored_unit(name)
            if stored is None and name.startswith(_LOSS_SCALE):
                notes.append("the loss scale begins anew, as the checkpoint has none")
                continue
            if stored is None:
                raise self._other_model(f"{name} is not in it")
            used |= _parts(name, stored).keys()
            if _format(stored) != _format(like):
                notes.append(self._conversion(name, stored, like))
        over = sorted(n for n in self._stored if n not in used and not n.startswith(_LOSS_SCALE))
        if over:
            more = f" and {len(over) - 1} more arrays" if len(over) > 1 else ""
            raise self._other_model(f"it has {over[0]}{more}, which this one lacks")
        return list(dict.fromkeys(notes))

    def _conversion(self, name: str, stored: Any, like: Any) -> str:
        """What is to be said of a conversion, if there is one."""
        what = {"params": "parameters", "opt_state": "moments"}.get(name.split(".")[0])
        kinds = _kind(stored), _kind(like)
        if "factored" in kinds and kinds[0] != kinds[1]:
            raise ConfigError(
                f"checkpoint {self._checkpoint.path} has {name} {kinds[0]}, which cannot be made "
                f"{kinds[1]}: factored moments are means of other quantities. Keep --moments as "
                "it was."
            )
        if "factored" in kinds or stored.shape != like.shape:
            raise self._other_model(f"its {name} is of another shape")
        floats = [jnp.issubdtype(jnp.dtype(k), jnp.floating) or k in ("int8", "nf4") for k in kinds]
        if what is None or not all(floats):
            raise self._other_model(f"its {name} is {kinds[0]}, not {kinds[1]}")
        try:
            for leaf in jax.tree.leaves(stored):
                self._sharding(like).shard_shape(leaf.shape)
        except ValueError as error:
            raise ConfigError(
                f"checkpoint {self._checkpoint.path} has {name} in int8, and the mesh would cut "
                "its blocks of 8-bit numbers; use a mesh that the run could begin on."
            ) from error
        return f"the {what} are {kinds[0]} in the checkpoint and {kinds[1]} from here on"

    def _other_model(self, how: str) -> ConfigError:
        return ConfigError(
            f"checkpoint {self._checkpoint.path} is of another model: {how}. Start with the model "
            "that it was made with."
        )

    def _stored_unit(self, name: str) -> Any:
        """A weight or a moment as the checkpoint has it, or None."""
        there: Any = self._stored.get
        if f"{name}.codes" in self._stored:
            codes, scales = there(f"{name}.codes"), there(f"{name}.scales")
            if scales is None or len(scales.shape) != len(codes.shape):
                raise self._other_model(f"{name}.scales is not in it as {name}.codes is")
            return Quantised(codes, scales)
        if f"{name}.rows" in self._stored:
            return Factors(there(f"{name}.rows"), there(f"{name}.columns"))
        return there(name)

    def _unit(self, name: str, like: Any) -> Any:
        stored = self._stored_unit(name)
        if stored is None:
            value = getattr(LossScale.initial(), name.removeprefix(f"{_LOSS_SCALE}."))
            return jax.device_put(np.asarray(value), like.sharding)
        if _format(stored) == _format(like):
            return jax.tree.map_with_path(
                lambda keys, leaf: self._read(name + _suffix(keys), leaf.shape, leaf.sharding), like
            )
        return self._converted(name, stored, like)

    def _converted(self, name: str, stored: Any, like: Any) -> Any:
        """Read in the checkpoint's format, on the mesh and in the device's memory; rounded to
        the nearest value of the run's."""
        sharding = self._sharding(like)
        there = jax.tree.map_with_path(
            lambda keys, leaf: self._read(name + _suffix(keys), leaf.shape, sharding), stored
        )
        with jax.set_mesh(self._mesh):
            shardings = jax.tree.map(lambda leaf: leaf.sharding, like)
            return jax.jit(partial(_convert, like=like), out_shardings=shardings)(there)

    def _sharding(self, like: Any) -> NamedSharding:
        """Of a unit's values; its codes and scales have it too."""
        return NamedSharding(self._mesh, jax.tree.leaves(like)[0].sharding.spec)

    def _read(self, name: str, shape: tuple[int, ...], sharding: NamedSharding) -> Array:
        """One array of the files, in buffers that belong to JAX alone and can be donated."""
        args = ocp.ArrayRestoreArgs(sharding=sharding, global_shape=shape)
        restore = ocp.args.PyTreeRestore({name: 0}, restore_args={name: args}, partial_restore=True)
        try:
            array = self._checkpointer.restore(self._path, args=restore)[name]
            return jax.block_until_ready(jax.device_put(array, sharding, may_alias=False))
        except (ValueError, OSError) as error:
            raise ConfigError(
                f"checkpoint {self._checkpoint.path} cannot be read at {name}: "
                f"{_first_line(error)}. Move it away to go on from the one before."
            ) from error


def _is_unit(x: Any) -> bool:
    """A weight or a moment, in however many arrays."""
    return isinstance(x, Quantised | Factors)


def _suffix(keys: tuple) -> str:
    return f".{leaf_name(keys)}" if keys else ""


def _parts(name: str, unit: Any) -> dict[str, Any]:
    """The arrays of a unit, by their names."""
    return {name + _suffix(keys): leaf for keys, leaf in jax.tree.leaves_with_path(unit)}


def _format(unit: Any) -> dict[str, tuple]:
    """What two units share that are stored alike."""
    return {name: (leaf.shape, leaf.dtype) for name, leaf in _parts("", unit).items()}


def _kind(unit: Any) -> str:
    if isinstance(unit, Factors):
        return "factored"
    if isinstance(unit, Quantised):
        return "int8" if unit.bits == 8 else "nf4"
    return str(unit.dtype)


def _convert(stored: Any, like: Any) -> Any:
    """A weight or a moment in the format of another; second moments in 8 bits are roots."""
    if isinstance(stored, Quantised):
        value = quant.dequantise(stored)
        value = jnp.square(value) if stored.codes.dtype == jnp.uint8 else value
    else:
        value = stored.astype(jnp.float32)
    if not isinstance(like, Quantised):
        return value.astype(like.dtype)
    if like.bits == 4:
        return quant.quantise4(value, like.block)
    if like.codes.dtype == jnp.uint8:
        return moments.quantise_second(value, like.block, 0.5)
    return quant.quantise(value, like.block)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
