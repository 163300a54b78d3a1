"""What loops and rematerialisation of a compiled program keep, or repeat, for nothing."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tpjax.memory.compiled import Compilation
from tpjax.memory.hlo import Instruction
from tpjax.memory.records import Finding, gib

AROUND_SHARE = 0.1  # of the peak: stacks of a scan that is repeated as a whole


def remat(compilation: Compilation) -> Iterator[Finding]:
    """Rematerialisation that repeats nothing, or that repeats a whole loop and its stacks."""
    paths = {one.op_name for one in compilation.program.instructions.values() if one.op_name}
    repeated = [path for path in paths if "rematted_computation" in path.split("/")]
    if not repeated and any("checkpoint" in path.split("/") for path in paths):
        yield Finding(
            rule="remat-saved-nothing",
            name="jax.checkpoint",
            message="jax.checkpoint is there, and nothing is computed a second time: its "
            "policy keeps everything, or the compiler undid it.",
            remedy="Name tensors that exist in the policy, and apply it to the body of a scan.",
        )
    for loop in compilation.program.instructions.values():
        before, _, after = loop.op_name.partition("rematted_computation")
        if loop.opcode != "while" or not after or "while" in before.split("/"):
            continue
        cost = sum(stack.bytes for stack in _stacks(compilation, loop))
        if cost >= AROUND_SHARE * compilation.peak_bytes:
            yield Finding(
                rule="remat-around-scan",
                name="jax.checkpoint",
                message="jax.checkpoint is around a scan: the backward pass runs the whole scan "
                f"again and keeps all of its {gib(cost)}.",
                remedy="Apply jax.checkpoint to the scan's body.",
                bytes=cost,
            )


def gradient_copies(compilation: Compilation) -> Iterator[Finding]:
    """float32 copies of gradients that exist in bf16."""
    found: dict[str, int] = {}
    for segment, description in compilation.ledger.moving:
        value = segment.values[0]
        if description.kind != "gradients" or value.dtype != "f32":
            continue
        path = compilation.program.origin(value.instruction, value.index).path
        whole = itertools.takewhile(lambda one: one.opcode != "dynamic-update-slice", path)
        casts = [one for one in whole if one.opcode == "convert" and one.result.startswith("f32")]
        narrow = any(
            compilation.program.instructions[cast.operands[0]].result.startswith("bf16")
            for cast in casts
        )
        if narrow and segment.size >= compilation.large_bytes:
            found[description.name] = max(found.get(description.name, 0), segment.size)
    if found:
        total = sum(found.values())
        yield Finding(
            rule="float32-gradients",
            name=", ".join(found),
            message=f"In bf16, and copied whole to float32 ({gib(total)}): {', '.join(found)}.",
            remedy="Cast inside the optimiser's arithmetic, leaf by leaf, where XLA fuses it.",
            bytes=total,
        )


@dataclass(frozen=True)
class _Stack:
    """A loop's result that keeps one array per iteration."""

    number: int
    bytes: int
    kept: tuple[Instruction, ...]  # from what is kept back to where it was made


def _stacks(compilation: Compilation, loop: Instruction) -> list[_Stack]:
    program, body = compilation.program, loop.attribute("body") or ""
    shapes = re.findall(r"(\w+)\[([\d,]*)\]", loop.result)
    found = []
    for number, name in enumerate(program.roots[body].operands):
        origin = program.origin(name)
        if not origin.stored or program.unchanged(name, number):
            continue
        sizes = [
            v.size
            for allocation in compilation.assignment.allocations
            for v in allocation.values
            if v.instruction == loop.name and v.index == (number,)
        ]
        if sizes and number < len(shapes):
            found.append(_Stack(number, sizes[0], origin.path))
    return found


def scan_copies(compilation: Compilation) -> Iterator[Finding]:
    """Stacks of a scan that hold what is there already."""
    program = compilation.program
    kept: dict[str, int] = {}
    for loop in program.instructions.values():
        if loop.opcode != "while":
            continue
        for stack in _stacks(compilation, loop):
            maker = stack.kept[-1]
            computed = maker.computation != "" and maker.opcode not in ("constant", "iota")
            if stack.bytes < compilation.large_bytes or computed or maker.opcode == "broadcast":
                continue
            kept[compilation.namer.value_name(loop.name, (stack.number,))] = stack.bytes
    if kept:
        yield Finding(
            rule="scan-keeps-copies",
            name=", ".join(kept),
            message=f"A scan keeps {gib(sum(kept.values()))} of what is there already outside of "
            f"it: {', '.join(kept)}.",
            remedy="Close over it or pass it in as xs, and recompute casts of it in the "
            "backward pass (jax.checkpoint on the body).",
            bytes=sum(kept.values()),
        )
