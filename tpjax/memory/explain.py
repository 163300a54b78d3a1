"""A report on any jitted function: what it holds, when, and what it moves."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpjax.config import ConfigError, PoolConfig, TrainConfig
from tpjax.flops import step_flops
from tpjax.gpus import GPUS, Outside, kind_of, outside_pool
from tpjax.memory.compiled import (
    Compilation,
    absent_mesh,
    compile_for,
    compile_lowered,
)
from tpjax.memory.lint import lint
from tpjax.memory.needs import audit
from tpjax.memory.records import Finding, MemoryReport
from tpjax.mesh import make_mesh, start_devices
from tpjax.resolve import resolve
from tpjax.step import lower_train_step

HOST_MEMORY = "pinned_host"  # JAX's name


def report(
    jitted: Any, *args: Any, gpu: str | None = None, mesh: Mesh | None = None, **kwargs: Any
) -> MemoryReport:
    """What a jitted function needs of each device, called with these arguments; it is not run.

    Compiled for the devices there are, or, where `gpu` names a kind, for GPUs that
    need not be there: arguments with a `NamedSharding` keep its spec on a mesh of
    the same shape of such GPUs, others are taken to be on all of them.

    Args:
        jitted: what `jax.jit` returned.
        args, kwargs: arrays or `jax.ShapeDtypeStruct`s, as the function takes them.
        gpu: a name of `tpjax.gpus.GPUS`, such as "h100".
        mesh: the mesh to compile under, as `jax.set_mesh` would set it, such as an
            `absent_mesh`; by default that of the arguments.

    Raises:
        ConfigError: not a jitted function, or one that holds fast to other devices.
    """
    if not hasattr(jitted, "lower"):
        raise ConfigError(f"{repr(jitted)[:60]} is no jitted function; pass jax.jit(f).")
    mesh = mesh or _mesh_of((args, kwargs)) or _mesh_set()
    if gpu is not None and (mesh is None or _gpu(mesh) != gpu):
        mesh = _retarget(mesh, gpu)
    if mesh is not None:
        args, kwargs = jax.tree.map(lambda leaf: _abstract(leaf, mesh), (args, kwargs))
    name = getattr(jitted, "__name__", "function")
    with warnings.catch_warnings():  # the findings say it
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        compilation = compile_lowered(_lower(jitted, args, kwargs, mesh, name), mesh)
    return explain(compilation, title=name, findings=lint(compilation), flops=None)


def _lower(
    jitted: Any, args: Sequence, kwargs: dict, mesh: Mesh | None, name: str
) -> jax.stages.Lowered:
    try:
        with contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh):
            lowered = jitted.lower(*args, **kwargs)
        return getattr(lowered, "lowered", lowered)  # nnx.jit wraps JAX's
    except RuntimeError as error:
        if "Unknown backend" not in str(error):
            raise
        raise ConfigError(
            f"{name} calls back to Python (jax.debug.print, pure_callback, …), which cannot be "
            "compiled for GPUs that are not there; leave the callbacks out."
        ) from error
    except ValueError as error:
        if "incompatible devices" not in str(error) and "context mesh" not in str(error):
            raise
        raise ConfigError(
            f"{name} cannot be compiled for other devices: it has captured a mesh or sharding of "
            "those it was written on. Pass shardings with the arguments, or name them by "
            f"PartitionSpec under jax.set_mesh. ({' '.join(str(error).split())[:200]})"
        ) from error


def _mesh_of(args: Any) -> Mesh | None:
    """The mesh that arguments are sharded on, if any is."""
    for leaf in jax.tree.leaves(args):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
            return sharding.mesh
    return None


def _mesh_set() -> Mesh | None:
    """The mesh that `jax.set_mesh` has set, if any is."""
    mesh = jax.sharding.get_mesh()
    return None if mesh.empty else mesh


def _retarget(mesh: Mesh | None, gpu: str) -> Mesh:
    """A mesh of the same shape of GPUs that need not be there; of one without a mesh."""
    if mesh is None:
        return absent_mesh(gpu, {"device": 1})
    return absent_mesh(gpu, dict(mesh.shape), axis_types=mesh.axis_types)


def _abstract(leaf: Any, mesh: Mesh) -> Any:
    """An argument's shape and dtype, with its spec on the mesh."""
    if not isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic):
        return leaf
    sharding = getattr(leaf, "sharding", None)
    spec = sharding.spec if isinstance(sharding, NamedSharding) else P()
    if getattr(sharding, "memory_kind", None) == HOST_MEMORY:
        # On absent devices themselves JAX drops the kind.
        placed = NamedSharding(mesh.abstract_mesh, spec, memory_kind=HOST_MEMORY)
    else:
        placed = NamedSharding(mesh, spec)
    weak = getattr(leaf, "weak_type", False)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=placed, weak_type=weak)


def report_run(config: TrainConfig, *, gpu: str | None = None, nodes: int = 1) -> MemoryReport:
    """The report on a run's training step, for GPUs that need not be there, or (`gpu` is
    None) for the devices that are.

    Raises:
        ConfigError: as `compile_for`.
    """
    if gpu is None:
        devices = start_devices(config.devices, config.pool)
        config = resolve(config, num_devices=len(devices), platform=devices[0].platform)
        assert config.mesh is not None  # resolved
        mesh = make_mesh(config.mesh, config.model, devices)
        compilation = compile_lowered(lower_train_step(config, mesh), mesh)
    else:
        compilation = compile_for(config, gpu, nodes)
        assert compilation.mesh is not None
        config = resolve(config, num_devices=compilation.mesh.size, platform="gpu")
    # Which weights have to be gathered the audit knows better than the general rule.
    general = [finding for finding in lint(compilation) if finding.rule != "gathered-weight"]
    return explain(
        compilation,
        title=f"{config.model.name}, {config.data.batch_size} × {config.data.seq_len} tokens, "
        f"{config.mesh} × {gpu or jax.devices()[0].device_kind}, remat {config.memory.remat}, "
        f"parameters {config.memory.params}, moments {config.memory.moments}, "
        f"update {config.memory.update}, offload {config.memory.offload}",
        findings=[*general, *audit(config, compilation.collectives)],
        flops=step_flops(config),
        pool=config.pool,
    )


def explain(
    compilation: Compilation,
    *,
    title: str,
    findings: Sequence[Finding],
    flops: float | None,
    pool: PoolConfig | None = None,
) -> MemoryReport:
    """The report on a compiled program and the findings made of it, for devices with a
    pool as asked for."""
    mesh, sizes = compilation.mesh, compilation.executable.memory_analysis()
    assert sizes is not None
    gpu = _gpu(mesh)
    axes = {tuple(c.axis.split(",")) for c in compilation.collectives}
    num_devices = 1 if mesh is None else mesh.size
    outside = (
        outside_pool(GPUS[gpu], num_devices=num_devices, communicators=max(1, len(axes)))
        if gpu
        else ()
    )
    if gpu and (captured := compilation.assignment.constant_bytes) >= compilation.large_bytes:
        part = Outside(what="arrays that the function captured", bytes=captured, source="compiled")
        outside = (*outside, part)
    ledger = compilation.ledger
    return MemoryReport(
        title=title,
        gpu=gpu,
        mesh={} if mesh is None else {a: n for a, n in mesh.shape.items() if n > 1},
        num_devices=num_devices,
        argument_bytes=sizes.argument_size_in_bytes,
        output_bytes=sizes.output_size_in_bytes,
        alias_bytes=sizes.alias_size_in_bytes,
        temp_bytes=sizes.temp_size_in_bytes,
        host_bytes=compilation.host_bytes,
        outside_pool=tuple(outside),
        capacity_bytes=GPUS[gpu].memory_bytes if gpu else None,
        pool=pool or PoolConfig(),
        ledger=ledger.lines,
        host_ledger=ledger.host_lines,
        timeline=ledger.timeline,
        collectives=tuple(compilation.collectives),
        findings=tuple(sorted(findings, key=lambda finding: -(finding.bytes or 0))),
        flops=flops,
    )


def _gpu(mesh: Mesh | None) -> str | None:
    """The name of the mesh's kind of GPU, or None where it is unknown."""
    kind = jax.devices()[0].device_kind if mesh is None else mesh.devices.flat[0].device_kind
    return kind_of(kind)
