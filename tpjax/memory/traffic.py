"""The collectives of a compiled program: what moves between devices, how often, over which axis."""

from __future__ import annotations

import math
import re

import numpy as np
from jax.sharding import Mesh

from tpjax.memory.hlo import Instruction, Program
from tpjax.memory.names import Namer
from tpjax.memory.records import Collective

ITEM_BYTES = {"pred": 1, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "f16": 2, "bf16": 2}
ITEM_BYTES |= {"s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16}

_NAMED_GROUPS = re.compile(
    r"replica_groups=mesh\[(.*?)\]"
    r"(?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{(.*?)\}"
)
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


def collectives(program: Program, namer: Namer, mesh: Mesh | None) -> list[Collective]:
    """Every collective, one entry for each array that it moves, in the order of the text."""
    return [
        collective
        for computation, runs in program.runs.items()
        for one in program.by_computation[computation]
        if runs != 0 and one.collective is not None
        for collective in _of_instruction(program, namer, one, runs, mesh)
    ]


def _of_instruction(
    program: Program, namer: Namer, one: Instruction, runs: int | None, mesh: Mesh | None
) -> list[Collective]:
    kind = one.collective
    assert kind is not None
    groups = _replica_groups(one.text, 1 if mesh is None else mesh.size)
    group_size = groups.shape[1]
    if (groups == groups[:, :1]).all():  # XLA leaves some in, each device with itself
        return []
    arrays = [
        (dtype, [int(d) for d in dims.split(",") if d])
        for dtype, dims in _ARRAY.findall(one.result)
    ]
    operands = len(one.operands)
    if len(arrays) >= 2 * operands:  # an asynchronous one may show operands, then results
        arrays = arrays[:operands] if kind == "reduce-scatter" else arrays[operands : 2 * operands]
    elif kind == "reduce-scatter":  # shows results, the smaller side
        scattered = re.search(r"dimensions=\{(\d+)\}", one.text)
        assert scattered is not None, one.text
        for _, shape in arrays:
            shape[int(scattered[1])] *= group_size
    found = []
    for number, (dtype, shape) in enumerate(arrays):
        moved = namer.operand(one, number, tuple(shape))
        found.append(
            Collective(
                op=kind,
                axis=",".join(_axes(groups, mesh)) if mesh is not None else "",
                group_size=group_size,
                dtype=dtype,
                shape=tuple(shape),
                bytes=math.prod(shape) * item_bytes(dtype),
                count=runs,
                in_scan=program.in_loop(one.computation),
                asynchronous=_asynchronous(program, one),
                kind=moved.kind,
                name=moved.name,
                source=program.source(one) or moved.source,
            )
        )
    return found


def item_bytes(dtype: str) -> int:
    """Bytes of one element of XLA's dtype."""
    return ITEM_BYTES.get(dtype, 1 if dtype.startswith("f8") else 4)


def _asynchronous(program: Program, one: Instruction) -> bool:
    """Whether XLA starts it and waits for it apart, and runs it beside other work."""
    start = one
    if not one.opcode.endswith("-start"):
        caller = program.callers.get(one.computation)
        if caller is None or caller.opcode != "async-start":
            return False
        start = caller
    return '"is_sync":true' not in start.text


def _replica_groups(text: str, num_devices: int) -> np.ndarray:
    """Which devices talk: [groups, devices of one], in any of XLA's notations."""
    if named := _NAMED_GROUPS.search(text):
        sizes = {axis: int(n) for axis, n in re.findall(r"'([^']+)'=(\d+)", named[1])}
        inside = re.findall(r"'([^']+)'", named[4])
        ids = _iota(named[2], named[3]) if named[2] else np.arange(math.prod(sizes.values()))
        grid = ids.reshape(tuple(sizes.values()))
        order = list(sizes)
        last = [order.index(axis) for axis in inside]
        first = [i for i in range(len(order)) if i not in last]
        n = math.prod(sizes[axis] for axis in inside)
        return grid.transpose(first + last).reshape(-1, n)
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text):
        return _iota(iota[3], iota[4]).reshape(int(iota[1]), int(iota[2]))
    if listed := re.search(r"(?:replica_groups|source_target_pairs)=\{([\d,{}]*)\}", text):
        groups = re.findall(r"\{([\d,]+)\}", listed[1])
        if groups:
            return np.array([[int(d) for d in group.split(",")] for group in groups])
        everyone = "replica_groups" in listed[0]  # XLA's {}: all devices are one group
        return np.arange(num_devices if everyone else 0).reshape(1, -1)
    raise ValueError(f"a collective without replica groups: {text.strip()[:200]}")


def _iota(dims: str, order: str | None) -> np.ndarray:
    """XLA's shorthand for a list of devices: 0, 1, … in a grid, maybe transposed."""
    shape = [int(d) for d in dims.split(",")]
    grid = np.arange(math.prod(shape)).reshape(shape)
    return grid.transpose([int(d) for d in order.split(",")]) if order else grid


def _axes(groups: np.ndarray, mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes on which the devices of a group differ."""
    places = np.unravel_index(groups, mesh.devices.shape)
    return tuple(
        axis
        for axis, where in zip(mesh.axis_names, places, strict=True)
        if (where != where[:, :1]).any()
    )
