"""A compiled program as data: its instructions, its loops, and where values come from."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property

from tpjax.memory.text import Instruction, elements, read_frames, read_instruction

Index = tuple[int, ...]

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_CALLED = re.compile(
    r"(?:calls|body|condition|to_apply|branch_computations|true_computation|false_computation)"
    r"=(\{[^}]*\}|%?[\w.\-]+)"
)
_LIBRARIES = re.compile(r"(^|/)(jax|jaxlib|flax|optax|chex)/")

ALIKE = {"bitcast", "copy", "reshape", "transpose", "convert", "copy-start", "copy-done", "slice"}
ALIKE |= {"dynamic-slice", "optimization-barrier", "all-reduce-done"}
"""Instructions whose result is their first operand in another form."""

# Asynchronous instructions that give their operands, then their results; what ends them
# gives the results alone. (An all-reduce-start gives its results alone, too.)
_STARTED = {"all-gather-start", "collective-permute-start", "async-start"}
_DONE = {"all-gather-done", "collective-permute-done", "async-done"}


@dataclass(frozen=True)
class Origin:
    """Where a value comes from: its maker, which of the maker's results it is, and the
    instructions from the value back to the maker, which is the last."""

    instruction: Instruction
    index: Index
    path: tuple[Instruction, ...]

    @property
    def operand_number(self) -> int:
        """Of a collective that moves several arrays: which of them this is."""
        places = self.index[1:] if self.instruction.opcode in _STARTED else self.index
        return places[-1] if places else 0

    @property
    def stored(self) -> bool:
        """Whether it was kept in a stack that a loop writes."""
        return any(one.opcode == "dynamic-update-slice" for one in self.path)


@dataclass
class Program:
    """All computations of a module; the entry's name is ""."""

    instructions: dict[str, Instruction] = field(default_factory=dict)
    roots: dict[str, Instruction] = field(default_factory=dict)
    callers: dict[str, Instruction] = field(default_factory=dict)
    by_computation: dict[str, list[Instruction]] = field(default_factory=lambda: defaultdict(list))
    frames: dict[int, tuple[str, int]] = field(default_factory=dict)  # id → (place, parent)

    @classmethod
    def parse(cls, text: str) -> Program:
        """Reads the text of a scheduled module."""
        program, computation = cls(frames=read_frames(text)), None
        for line in text.splitlines():
            if not line.startswith(" "):
                header = _HEADER.match(line)
                computation = ("" if header[1] else header[2]) if header else None
            elif computation is not None and (one := read_instruction(line, computation)):
                program.instructions |= {e.name: e for e in elements(one, program.instructions)}
                program.instructions[one.name] = one
                program.by_computation[computation].append(one)
                if one.is_root:
                    program.roots[computation] = one
        for one in program.instructions.values():
            for called in _CALLED.findall(one.text):
                for name in re.findall(r"[\w.\-]+", called):
                    program.callers.setdefault(name, one)
        return program

    @cached_property
    def runs(self) -> dict[str, int | None]:
        """How often each computation runs per call: loops multiply, calls hand on; None
        inside a loop of unknown length. Every branch of a condition counts as taken. What a
        fusion or reduction calls is not listed."""
        runs: dict[str, int | None] = {}

        def visit(name: str, times: int | None) -> None:
            before = runs.get(name, 0)
            runs[name] = None if times is None or before is None else before + times
            for one in self.by_computation[name]:
                if one.opcode == "while":
                    trips = trip_count(one)
                    inside = None if trips is None or times is None else times * trips
                    visit(one.attribute("body") or "", inside)
                    visit(one.attribute("condition") or "", inside)
                elif one.opcode in ("call", "conditional", "async-start"):
                    for called in _CALLED.findall(one.text):
                        for name_called in re.findall(r"[\w.\-]+", called):
                            visit(name_called, times)

        visit("", 1)
        return runs

    def in_loop(self, computation: str) -> bool:
        """Whether a computation is, or is called from, the body of a loop."""
        while computation in self.callers:
            caller = self.callers[computation]
            if caller.opcode == "while":
                return True
            computation = caller.computation
        return False

    def source(self, one: Instruction) -> str | None:
        """ "file.py:line" of the innermost line that is not a library's."""
        found = re.search(r"stack_frame_id=(\d+)", one.text)
        frame, innermost = int(found[1]) if found else 0, None
        while frame in self.frames:
            place, parent = self.frames[frame]
            innermost = innermost or place
            if not _LIBRARIES.search(place):
                return place
            frame = parent
        return innermost

    def origin(self, name: str, index: Index = ()) -> Origin:
        """The instruction that made a value, seen through copies, casts, slices, tuples,
        loops and the stacks that loops write.

        Of a loop's carry it is what the body puts there, or, where the body
        hands it on unchanged, what went in.
        """
        path, seen = [], set()
        while True:
            one = self.instructions[name]
            path.append(one)
            step = None if (name, index) in seen else self._step(one, index, seen)
            seen.add((name, index))
            if step is None:
                return Origin(one, index, tuple(path))
            name, index = step

    @cached_property
    def carried(self) -> dict[tuple[str, Index], tuple[str, Index]]:
        """Where values that enter a loop's carry go: value → place of the loop's result."""
        places = {}
        for loop in self.instructions.values():
            init = self.instructions.get(loop.operands[0]) if loop.opcode == "while" else None
            for number, name in enumerate(init.operands if init is not None else ()):
                step: tuple[str, Index] | None = (name, ())
                while step is not None:
                    places.setdefault(step, (loop.name, (number,)))
                    step = self.same(*step)
        return places

    def same(self, name: str, index: Index) -> tuple[str, Index] | None:
        """One step back to where the very same array has another name, or None."""
        one = self.instructions[name]
        if one.opcode == "get-tuple-element":
            return one.operands[0], (int(re.findall(r"index=(\d+)", one.text)[0]), *index)
        if one.opcode == "tuple" and index:
            return one.operands[index[0]], index[1:]
        return (one.operands[0], index) if one.opcode in ("bitcast", "copy") else None

    def _step(self, one: Instruction, index: Index, seen: set) -> tuple[str, Index] | None:
        """One step of `origin` backwards; None where the value is made here."""
        opcode = one.opcode
        if same := self.same(one.name, index):
            return same
        if opcode == "dynamic-update-slice":
            return one.operands[1], ()
        if opcode in _DONE:
            return one.operands[0], (1, *index)
        if opcode in ALIKE:
            return one.operands[0], () if opcode == "copy-start" else index
        if opcode == "while" and index:
            return self._carried(one, index, seen)
        if opcode in _STARTED and index:
            if index[0] == 0:
                return one.operands[index[1] if len(index) > 1 else 0], ()
            index = index[1:]
        if opcode in ("fusion", "call", "async-start"):
            root = self.roots.get(one.attribute("calls") or one.attribute("to_apply") or "")
            return (root.name, index) if root is not None else None
        if opcode == "parameter" and one.computation in self.callers:
            caller = self.callers[one.computation]
            if caller.opcode == "while" and index:
                return self._carried(caller, index, seen)
            if caller.opcode in ("fusion", "call", "async-start"):
                return caller.operands[int(one.arguments)], index
        return None

    def _carried(self, loop: Instruction, index: Index, seen: set) -> tuple[str, Index]:
        """What a loop's body leaves in a place of its carry, or else what came in."""
        root = self.roots[loop.attribute("body") or ""]
        place = root.operands[index[0]], index[1:]
        if (
            root.opcode == "tuple"
            and place not in seen
            and not self.unchanged(place[0], index[0], place[1])
        ):
            return place
        return loop.operands[0], index

    def unchanged(self, name: str, number: int, index: Index = ()) -> bool:
        """Whether a place of a body's result is that of its parameter."""
        one = self.instructions[name]
        while one.opcode in ("bitcast", "copy"):
            one = self.instructions[one.operands[0]]
        if one.opcode != "get-tuple-element" or index:
            return False
        carry = self.instructions[one.operands[0]]
        return carry.opcode == "parameter" and f"index={number}," in one.text + ","


def trip_count(loop: Instruction) -> int | None:
    """How often a loop's body runs, where XLA knows it."""
    found = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.text)
    return int(found[1]) if found else None
