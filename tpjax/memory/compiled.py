"""What XLA's compiler says of a step: its peak memory and its collectives.

For GPUs that are not there too: their compiler runs on any machine.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from dataclasses import dataclass

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh

from tpjax.config import ConfigError, MeshConfig, TrainConfig
from tpjax.gpus import gpu as find_gpu
from tpjax.mesh import make_mesh
from tpjax.resolve import resolve
from tpjax.step import lower_train_step

# Nothing can be timed on a GPU that is not there, and Triton's matmuls need timing.
ABSENT_GPU_OPTIONS = {"xla_gpu_autotune_level": 0, "xla_gpu_enable_triton_gemm": False}

_ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2}
_ITEM_BYTES |= {"s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8}
_ITEM_BYTES |= {"f8e4m3fn": 1, "f8e5m2": 1}

_COLLECTIVE = re.compile(
    r"= (?P<result>.*?) (?P<kind>all-gather|all-reduce|reduce-scatter|all-to-all|"
    r"ragged-all-to-all|collective-permute|collective-broadcast)(-start)?\((?P<operands>[^)]*)\)"
)
_NAMED_GROUPS = re.compile(
    r"replica_groups=mesh\[(.*?)\]"
    r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{(.*?)\}"
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective instruction of a compiled program.

    Attributes:
        kind: XLA's name, such as "all-gather".
        axes: the mesh axes it runs over.
        group_size: how many devices talk to each other.
        dtype, shape: of its larger side (gathered, or before scattering), per device.
        bytes: of its larger side, per device and run.
        per_step: times it runs per call of the program.
        source: the operation it comes from.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    per_step: int
    source: str

    @property
    def wire_bytes(self) -> int:
        """What one device sends per call of the program, all runs together, by ring
        algorithms: (n-1)/n of the larger side, and for an all-reduce twice that."""
        share = (self.group_size - 1) / self.group_size
        if self.kind == "all-reduce":
            share *= 2
        elif self.kind == "collective-permute":
            share = 1
        return round(self.bytes * share * self.per_step)


def absent_devices(gpu: str, num_devices: int) -> list:
    """Compile-only devices: `num_devices` GPUs of a kind, on one host.

    Raises:
        ConfigError: the kind is unknown, or the compiler for GPUs is not installed.
    """
    target = find_gpu(gpu).target_description()
    try:
        topology = topologies.get_topology_desc(
            gpu, "cuda", topology=f"1x1x{num_devices}", target_config=target
        )
    except Exception as error:
        raise ConfigError(
            "JAX's compiler for GPUs is not here; install it with: pip install 'tpjax[plan]' "
            f"({' '.join(str(error).split())[:200]})"
        ) from error
    return list(topology.devices)


def compile_for(config: TrainConfig, *, gpu: str) -> tuple[jax.stages.Compiled, Mesh]:
    """The run's training step compiled for GPUs that need not be there.

    Nothing is allocated: the step is lowered from shapes and shardings, on a
    mesh of `config.mesh` (one device where it is None).

    Raises:
        ConfigError: as `resolve` and `absent_devices`.
    """
    num_devices = (config.mesh or MeshConfig()).num_devices
    config = resolve(config, num_devices=num_devices, platform="gpu")
    assert config.mesh is not None  # resolved
    mesh = make_mesh(config.mesh, config.model, absent_devices(gpu, num_devices))
    lowered = lower_train_step(config, mesh)
    return lowered.compile(compiler_options=dict(ABSENT_GPU_OPTIONS)), mesh


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


def collectives(compiled: jax.stages.Compiled, mesh: Mesh) -> list[Collective]:
    """Every collective of a compiled program, in the order of its text."""
    computations = _computations(compiled.as_text() or "")
    runs = _runs_per_step(computations)
    return [
        collective
        for name, lines in computations.items()
        for line in lines
        if runs[name] and (match := _COLLECTIVE.search(line))
        for collective in _collectives(match, runs[name], line, mesh)
    ]


def _computations(text: str) -> dict[str, list[str]]:
    """Instructions by computation; the entry's name is ""."""
    computations: dict[str, list[str]] = defaultdict(list)
    name = None
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if header and not line.startswith(" "):
            name = "" if header[1] else header[2]
        elif line.startswith("}"):
            name = None
        elif name is not None:
            computations[name].append(line)
    return computations


def _runs_per_step(computations: dict[str, list[str]]) -> dict[str, int]:
    """How often each computation runs: loops multiply, calls hand on."""
    runs: dict[str, int] = defaultdict(int)

    def visit(name: str, times: int) -> None:
        runs[name] += times
        for line in computations.get(name, ()):
            if body := re.search(r" while\(.*body=%?([\w.\-]+)", line):
                trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                if trips is None:
                    raise ValueError(f"a loop of unknown length: {line.strip()[:200]}")
                visit(body[1], times * int(trips[1]))
            for called in re.findall(
                r"(?:calls|async_wrapped|branch_computations)=(\{[^}]*\}|%?[\w.\-]+)", line
            ):
                for name_called in re.findall(r"[\w.\-]+", called):
                    visit(name_called, times)

    visit("", 1)
    return runs


def _collectives(match: re.Match, runs: int, line: str, mesh: Mesh) -> list[Collective]:
    """One entry for each array that the instruction moves."""
    kind, groups = match["kind"], _replica_groups(line)
    group_size = groups.shape[1]
    arrays = [
        (dtype, [int(d) for d in dims.split(",") if d])
        for dtype, dims in _ARRAY.findall(match["result"])
    ]
    operands = match["operands"].count("%")
    if len(arrays) >= 2 * operands:  # an asynchronous one may show operands, then results
        arrays = arrays[:operands] if kind == "reduce-scatter" else arrays[operands : 2 * operands]
    elif kind == "reduce-scatter":  # shows results, the smaller side
        scattered = re.search(r"dimensions=\{(\d+)\}", line)
        assert scattered is not None, line
        for _, shape in arrays:
            shape[int(scattered[1])] *= group_size
    source = re.search(r'op_name="([^"]*)"', line)
    return [
        Collective(
            kind=kind,
            axes=_axes(groups[0], mesh),
            group_size=group_size,
            dtype=dtype,
            shape=tuple(shape),
            bytes=math.prod(shape) * _ITEM_BYTES[dtype],
            per_step=runs,
            source=source[1] if source else "",
        )
        for dtype, shape in arrays
    ]


def _replica_groups(line: str) -> np.ndarray:
    """Which devices talk: [groups, devices of one], in any of XLA's three notations."""
    if named := _NAMED_GROUPS.search(line):
        sizes = {axis: int(n) for axis, n in re.findall(r"'([^']+)'=(\d+)", named[1])}
        inside = re.findall(r"'([^']+)'", named[4])
        ids = _iota(named[2], named[3]) if named[2] else np.arange(math.prod(sizes.values()))
        grid = ids.reshape(tuple(sizes.values()))
        order = list(sizes)
        last = [order.index(axis) for axis in inside]
        first = [i for i in range(len(order)) if i not in last]
        n = math.prod(sizes[axis] for axis in inside)
        return grid.transpose(first + last).reshape(-1, n)
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line):
        return _iota(iota[3], iota[4]).reshape(int(iota[1]), int(iota[2]))
    if listed := re.search(r"replica_groups=\{(\{[\d,{}]*\})\}", line):
        groups = re.findall(r"\{([\d,]+)\}", listed[1])
        return np.array([[int(d) for d in group.split(",")] for group in groups])
    if pairs := re.search(r"source_target_pairs=\{(\{[\d,{}]*\})\}", line):
        return np.array(
            [[int(d) for d in p.split(",")] for p in re.findall(r"\{([\d,]+)\}", pairs[1])]
        )
    raise ValueError(f"a collective without replica groups: {line.strip()[:200]}")


def _iota(dims: str, order: str | None) -> np.ndarray:
    """XLA's shorthand for a list of devices: 0, 1, … in a grid, maybe transposed."""
    shape = [int(d) for d in dims.split(",")]
    grid = np.arange(math.prod(shape)).reshape(shape)
    return grid.transpose([int(d) for d in order.split(",")]) if order else grid


def _axes(group: np.ndarray, mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes on which the devices of one group differ."""
    places = np.unravel_index(group, mesh.devices.shape)
    return tuple(
        axis for axis, where in zip(mesh.axis_names, places, strict=True) if len(set(where)) > 1
    )
