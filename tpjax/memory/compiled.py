"""What XLA's compiler says of a program, for GPUs that are not there too.

The compiler for GPUs runs on any machine. It is told the kind of GPU in a
description, and asked to write down where it puts every buffer.
"""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

import jax
import numpy as np
from jax.experimental import topologies
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import AxisType, Mesh

from tpjax.config import ConfigError, MeshConfig, TrainConfig, require
from tpjax.gpus import gpu as find_gpu
from tpjax.memory.buffers import Assignment, read_assignment
from tpjax.memory.hlo import Program
from tpjax.memory.ledger import Ledger, make_ledger
from tpjax.memory.names import Namer
from tpjax.memory.paths import readable
from tpjax.memory.records import Collective
from tpjax.memory.traffic import collectives
from tpjax.mesh import is_absent, make_mesh, stay_off_missing_gpus
from tpjax.resolve import resolve
from tpjax.sharding import bytes_per_device
from tpjax.state import TrainState, abstract_state, lower_init
from tpjax.step import lower_train_step

# Nothing can be timed on a GPU that is not there, and Triton's matmuls need timing.
ABSENT_GPU_OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}

LARGE_BYTES, LARGE_SHARE = 1024**2, 0.001  # the latter of the peak


def absent_devices(gpu: str, num_devices: int, nodes: int = 1) -> list:
    """Compile-only devices: `num_devices` GPUs of a kind, in `nodes` machines.

    Raises:
        ConfigError: the kind is unknown, the machines do not share the GPUs evenly, or
            the compiler for GPUs is not installed.
    """
    target = find_gpu(gpu).target_description()
    require(
        nodes > 0 and num_devices % nodes == 0,
        f"nodes={nodes} does not divide the {num_devices} devices of the mesh evenly.",
    )
    describe = partial(
        topologies.get_topology_desc,
        gpu,
        "cuda",
        topology=f"1x{nodes}x{num_devices // nodes}",
        target_config=target,
    )
    stay_off_missing_gpus()
    try:
        try:
            topology = describe()
        except NotImplementedError:
            _register_compiler()
            topology = describe()
    except Exception as error:
        raise ConfigError(
            "JAX's compiler for GPUs is not here; install it with: pip install 'tpjax[plan]' "
            f"({' '.join(str(error).split())[:200]})"
        ) from error
    return list(topology.devices)


def _register_compiler() -> None:
    """Gives JAX the compiler of its CUDA plugin, which it passes over if it starts without a
    driver and is not told to stay on the CPU."""
    plugins = importlib.import_module("jax_plugins")
    for module in pkgutil.iter_modules(plugins.__path__, "jax_plugins."):
        if "cuda" in module.name:
            importlib.import_module(module.name).initialize()


def absent_mesh(
    gpu: str,
    axes: dict[str, int],
    *,
    nodes: int = 1,
    axis_types: Sequence[AxisType] | None = None,
) -> Mesh:
    """A mesh of GPUs that need not be there, such as `absent_mesh("h100", {"data": 4})`.

    Its shardings go on abstract arguments (`jax.ShapeDtypeStruct`); nothing can run on it.

    Raises:
        ConfigError: as `absent_devices`.
    """
    sizes = tuple(axes.values())
    require(all(size > 0 for size in sizes), f"axes of {axes} must be greater than 0.")
    devices = absent_devices(gpu, int(np.prod(sizes)), nodes)
    grid = np.asarray(devices, dtype=object).reshape(sizes)
    return Mesh(grid, tuple(axes), axis_types=tuple(axis_types) if axis_types else None)


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """A compiled program with all that its compiler says of it.

    Attributes:
        lowered, executable: JAX's.
        mesh: that its collectives run over, or None.
        program: its text at the time buffers were assigned.
        assignment: where its buffers are.
    """

    lowered: jax.stages.Lowered
    executable: jax.stages.Compiled
    mesh: Mesh | None
    program: Program = field(repr=False)
    assignment: Assignment = field(repr=False)

    @cached_property
    def namer(self) -> Namer:
        """What the program's values are called."""
        paths = jax.tree_util.tree_leaves_with_path(self.lowered.out_info)
        names = [result_name(path) for path, _ in paths]
        axis_sizes = () if self.mesh is None else self.mesh.devices.shape
        return Namer(self.program, names, axis_sizes)

    @cached_property
    def ledger(self) -> Ledger:
        """Where each device's memory goes."""
        return make_ledger(self.program, self.assignment, self.namer)

    @cached_property
    def collectives(self) -> list[Collective]:
        """What moves between devices."""
        return collectives(self.program, self.namer, self.mesh)

    @cached_property
    def large_bytes(self) -> float:
        """What is smaller than this is not worth a finding."""
        return max(LARGE_BYTES, LARGE_SHARE * self.peak_bytes)

    @property
    def host_bytes(self) -> int:
        """As `host_bytes`."""
        return host_bytes(self.executable)

    @cached_property
    def peak_bytes(self) -> int:
        """As `peak_bytes`."""
        return peak_bytes(self.executable)


def compile_lowered(lowered: jax.stages.Lowered, mesh: Mesh | None) -> Compilation:
    """Compiles, and reads what XLA says of it; for absent GPUs where the mesh is of such."""
    with tempfile.TemporaryDirectory(prefix="tpjax-") as folder, _no_cache():
        executable = lowered.compile(compiler_options={**_options(mesh), "xla_dump_to": folder})
        module = re.match(r"HloModule ([^,\s]+)", executable.as_text() or "")
        assert module is not None, "XLA names every module"
        assignment = read_assignment(Path(folder), module[1])
        program = Program.parse(assignment.text)
    return Compilation(
        lowered=lowered,
        executable=executable,
        mesh=mesh,
        program=program,
        assignment=assignment,
    )


def _options(mesh: Mesh | None) -> dict:
    """Compiler options that the mesh's devices need."""
    return dict(ABSENT_GPU_OPTIONS) if mesh is not None and is_absent(mesh.devices.flat[0]) else {}


def result_name(path: tuple) -> str:
    """What a result of a program is called, from its place in what the function returns."""
    return readable(f"result{jax.tree_util.keystr(path)}")


@contextlib.contextmanager
def _no_cache():
    """A program from JAX's cache on disk is not compiled, and nothing is said of it."""
    if not jax.config.values["jax_enable_compilation_cache"]:
        yield
        return
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
        compilation_cache.reset_cache()


def compile_for(config: TrainConfig, gpu: str = "h100", nodes: int = 1) -> Compilation:
    """The run's training step, compiled for GPUs that need not be there.

    Nothing is allocated: the step is lowered from shapes and shardings, on a
    mesh of `config.mesh` (where it is None, of one device) in `nodes` machines.

    Raises:
        ConfigError: as `resolve` and `absent_devices`.
    """
    num_devices = (config.mesh or MeshConfig()).num_devices
    config = resolve(config, num_devices=num_devices, platform="gpu")
    assert config.mesh is not None  # resolved
    mesh = make_mesh(config.mesh, config.model, absent_devices(gpu, num_devices, nodes))
    return compile_lowered(lower_train_step(config, mesh), mesh)


def compile_step(config: TrainConfig, mesh: Mesh) -> jax.stages.Compiled:
    """A resolved run's training step for a mesh of any devices, its sizes alone wanted."""
    return lower_train_step(config, mesh).compile(compiler_options=_options(mesh))


def init_peak_bytes(config: TrainConfig, mesh: Mesh) -> int:
    """Bytes at the peak of making a resolved run's state, on the device that holds most.

    Compiled for a mesh of any devices. Where `init` is eager, that is the first: it makes
    the whole state, and still has it when its own shards of it are there too.
    """
    lowered = lower_init(config, mesh)
    peak = peak_bytes(lowered.compile(compiler_options=_options(mesh)))
    if config.memory.init == "lazy" or mesh.size == 1:
        return peak
    first = make_mesh(MeshConfig(), config.model, [mesh.devices.flat[0]])
    whole, shards = (_on_device(abstract_state(config, one)) for one in (first, mesh))
    return max(peak, whole + shards)


def _on_device(state: TrainState) -> int:
    """Bytes of an abstract state on one device, without what waits in its host's memory."""
    leaves = jax.tree.leaves(state)
    return bytes_per_device([x for x in leaves if x.sharding.memory_kind != "pinned_host"])


def peak_bytes(compiled: jax.stages.Compiled) -> int:
    """Bytes a device holds at the peak of the program: arguments, results and temporaries.

    Computed from the sizes and not from XLA's own peak, which does not move
    with the temporaries on the CPU.
    """
    sizes = compiled.memory_analysis()
    assert sizes is not None, "XLA reports the sizes of every program it compiles"
    return (
        sizes.argument_size_in_bytes
        + sizes.output_size_in_bytes
        - sizes.alias_size_in_bytes
        + sizes.temp_size_in_bytes
    )


def host_bytes(compiled: jax.stages.Compiled) -> int:
    """Pinned host memory that one device's part of the program needs."""
    sizes = compiled.memory_analysis()
    assert sizes is not None, "XLA reports the sizes of every program it compiles"
    return (
        sizes.host_argument_size_in_bytes
        + sizes.host_output_size_in_bytes
        - sizes.host_alias_size_in_bytes
        + sizes.host_temp_size_in_bytes
    )
