"""What loops and rematerialisation of a compiled program keep, or repeat, for nothing."""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from tpjax.memory.compiled import Compilation
from tpjax.memory.hlo import Instruction, Program, trip_count
from tpjax.memory.records import Finding, gib

AROUND_SHARE = 0.1  # of the peak: stacks of a scan that is repeated as a whole


def has_backward(program: Program) -> bool:
    """Whether the program differentiates."""
    return any("transpose(" in one.op_name for one in program.instructions.values())


def trip_counts(program: Program) -> set[int | None]:
    """How often the program's loops run."""
    return {trip_count(one) for one in program.instructions.values() if one.opcode == "while"}


def remat(compilation: Compilation) -> Iterator[Finding]:
    """Rematerialisation that repeats nothing, or that repeats a whole loop and its stacks."""
    paths = {one.op_name for one in compilation.program.instructions.values() if one.op_name}
    repeated = [path for path in paths if "rematted_computation" in path.split("/")]
    asked = any("checkpoint" in path.split("/") for path in paths)
    if asked and not repeated and has_backward(compilation.program):
        yield Finding(
            rule="remat-saved-nothing",
            name="jax.checkpoint",
            message="jax.checkpoint is there, and nothing is computed a second time: its "
            "policy keeps everything, or the compiler undid it.",
            remedy="Name tensors that exist in the policy, and apply it to the body of a scan.",
        )
    for loop in compilation.program.instructions.values():
        before, _, after = loop.op_name.partition("rematted_computation")
        # A loop between is the scan over layers: the checkpoint is where it should be.
        inside_scan = "while" in before.rpartition("transpose(")[2].split("/")
        if loop.opcode != "while" or not after or inside_scan:
            continue
        cost = sum(stack.bytes for stack in _stacks(compilation, loop))
        if cost >= max(AROUND_SHARE * compilation.peak_bytes, compilation.large_bytes):
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
    found: dict[str, dict[tuple, int]] = {}  # name → its buffers
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
            buffers = found.setdefault(description.name, {})
            buffers[value.instruction, value.index] = segment.size
    if found:
        total = sum(sum(buffers.values()) for buffers in found.values())
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
    elements: int
    kept: tuple[Instruction, ...]  # from what is kept back to where it was made


def _stacks(compilation: Compilation, loop: Instruction) -> list[_Stack]:
    program, body = compilation.program, loop.attribute("body") or ""
    shapes = re.findall(r"\w+\[[\d,]*\]", loop.result)
    found = []
    for number, name in enumerate(program.roots[body].operands):
        origin = program.origin(name)
        if not origin.stored or program.unchanged(name, number):
            continue
        path = origin.path
        while (maker := origin.instruction).collective == "all-gather":
            origin = program.origin(maker.operands[origin.operand_number])
            path += origin.path
        sizes = [
            v.size
            for allocation in compilation.assignment.allocations
            for v in allocation.values
            if v.instruction == loop.name and v.index == (number,)
        ]
        if sizes and number < len(shapes):
            found.append(_Stack(number, sizes[0], _elements(shapes[number]), path))
    return found


def _inside(program: Program, one: Instruction, loop: Instruction) -> bool:
    """Whether an instruction is part of a loop's body, or called from there."""
    body, name = loop.attribute("body"), one.computation
    while name != body and name in program.callers:
        name = program.callers[name].computation
    return name == body


def scan_copies(compilation: Compilation) -> Iterator[Finding]:
    """Stacks of a scan that hold what is there already."""
    program = compilation.program
    kept: dict[str, int] = {}
    for loop in program.instructions.values():
        if loop.opcode != "while":
            continue
        for stack in _stacks(compilation, loop):
            # Nothing on the way back to its making left the loop: the loop computes it.
            computed = all(_inside(program, one, loop) for one in stack.kept)
            zeros = stack.kept[-1].opcode == "broadcast"
            if stack.bytes < compilation.large_bytes or computed or zeros:
                continue
            name = compilation.namer.value_name(loop.name, (stack.number,))
            kept[name] = kept.get(name, 0) + stack.bytes
    if kept:
        yield Finding(
            rule="scan-keeps-copies",
            name=", ".join(kept),
            message=f"A scan keeps {gib(sum(kept.values()))} of what is there already outside of "
            f"it: {', '.join(kept)}.",
            remedy="Close over it or pass it in as xs, and make casts and gathers of it again in "
            "the backward pass (jax.checkpoint on the body).",
            bytes=sum(kept.values()),
        )


def unread_stacks(compilation: Compilation) -> Iterator[Finding]:
    """Stacks of a scan of which most is never read, such as that of `scan(...)[1][-1]`."""
    readers = _Readers(compilation.program)
    for loop in compilation.program.instructions.values():
        for stack in _stacks(compilation, loop) if loop.opcode == "while" else ():
            if stack.bytes < compilation.large_bytes:
                continue
            read = readers.elements_read(loop, stack.number)
            if 2 * read <= stack.elements:
                yield Finding(
                    rule="scan-keeps-unread",
                    name=compilation.namer.value_name(loop.name, (stack.number,)),
                    message=f"A scan keeps {gib(stack.bytes)}, one array per iteration, of which "
                    f"{read / stack.elements:.0%} is read.",
                    remedy="Hand it on in the carry, where each iteration takes the place of the "
                    "one before.",
                    bytes=stack.bytes,
                )


class _Readers:
    """Who reads the values of a program, and how much of them."""

    def __init__(self, program: Program):
        self.program = program
        self.users: dict[str, list[Instruction]] = defaultdict(list)
        self._known: dict[tuple[str, str], float] = {}
        for one in program.instructions.values():
            for name in dict.fromkeys(one.operands):
                self.users[name].append(one)

    def elements_read(self, loop: Instruction, number: int) -> float:
        """Of a place of a loop's carry, in the loop and after it; infinite where that is
        not plain to see."""
        body = loop.attribute("body") or ""
        carry = next(p for p in self.program.by_computation[body] if p.opcode == "parameter")
        handed_on = self.program.roots[body]
        return sum(
            self._read(get, handed_on)
            for whole in (carry, loop)
            for get in self.users[whole.name]
            if f"index={number}," in f"{get.text},"
        )

    def _read(self, one: Instruction, handed_on: Instruction) -> float:
        """As `_count`, asked once of each instruction."""
        asked = (one.name, handed_on.name)
        if asked not in self._known:
            self._known[asked] = math.inf  # while it is being found out
            self._known[asked] = self._count(one, handed_on)
        return self._known[asked]

    def _count(self, one: Instruction, handed_on: Instruction) -> float:
        calls = ("fusion", "async-start")
        caller = self.program.callers.get(one.computation)
        is_result = self.program.roots[one.computation] is one
        total = math.inf if is_result and (caller is None or caller.opcode not in calls) else 0.0
        for user in self.users[one.name]:
            if total == math.inf:
                break
            writes_to_it = user.opcode == "dynamic-update-slice" and user.operands[0] == one.name
            if user.opcode in ("bitcast", "copy", "async-done") or writes_to_it:
                total += self._read(user, handed_on)
            elif user.opcode in ("slice", "dynamic-slice"):
                total += _elements(user.result)
            elif user.opcode in calls:
                fused = user.attribute("calls") or ""
                numbers = [str(i) for i, name in enumerate(user.operands) if name == one.name]
                for inner in self.program.by_computation[fused]:
                    if inner.opcode == "parameter" and inner.arguments in numbers:
                        total += self._read(inner, handed_on)
                if _elements(self.program.roots[fused].result) >= _elements(one.result):
                    total += self._read(user, handed_on)  # it may be what it writes to
            elif user is not handed_on:
                return math.inf
        return total


def _elements(result: str) -> int:
    """Of an array's shape as XLA writes it."""
    found = re.search(r"\[([\d,]*)\]", result)
    return math.prod(int(d) for d in found[1].split(",") if d) if found else 0
