"""A compiled program's text as data: its instructions, loops, and where values come from."""

from __future__ import annotations

import os
import re
import sys
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

Index = tuple[int, ...]

_HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{$")
_START = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = ")
_OPCODE = re.compile(r" ([\w\-]+)\(")
_CALLED = re.compile(
    r"(?:calls|body|condition|to_apply|branch_computations)=(\{[^}]*\}|%?[\w.\-]+)"
)
_LIBRARIES = re.compile(r"(^|/)(jax|jaxlib|flax|optax|chex)/")

ALIKE = {"bitcast", "copy", "reshape", "transpose", "convert", "copy-start", "copy-done", "slice"}
ALIKE |= {"dynamic-slice", "optimization-barrier", "all-gather-done", "all-reduce-done"}
ALIKE |= {"collective-permute-done"}
"""Instructions whose result is their first operand in another form."""

COLLECTIVES = {"all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"}
COLLECTIVES |= {"collective-permute", "collective-broadcast"}


@dataclass(frozen=True)
class Instruction:
    """One instruction; `text` is all that stands after its operands."""

    name: str
    computation: str
    opcode: str
    result: str  # its shape, as XLA writes it
    operands: tuple[str, ...]
    arguments: str  # what stands between the parentheses
    text: str

    @property
    def op_name(self) -> str:
        """JAX's path of the operation, or of the argument for a parameter of the program."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.text)
        return found[1].replace("\\'", "'").replace('\\"', '"') if found else ""

    @property
    def collective(self) -> str | None:
        """Which collective this starts, or None."""
        op = self.opcode.removesuffix("-start")
        return op if op in COLLECTIVES else None

    def attribute(self, name: str) -> str | None:
        """A computation that an attribute names."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.text)
        return found[1] if found else None


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
        places = self.index[1:] if self.instruction.opcode.endswith("-start") else self.index
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
        program, computation = cls(frames=_frames(text)), None
        for line in text.splitlines():
            if not line.startswith(" "):
                header = _HEADER.match(line)
                computation = ("" if header[1] else header[2]) if header else None
            elif computation is not None and (start := _START.match(line)):
                one = _instruction(line, start, computation)
                program.instructions[one.name] = one
                program.by_computation[computation].append(one)
                if start[1]:
                    program.roots[computation] = one
        for one in program.instructions.values():
            for called in _CALLED.findall(one.text):
                for name in re.findall(r"[\w.\-]+", called):
                    program.callers.setdefault(name, one)
        return program

    @cached_property
    def runs(self) -> dict[str, int | None]:
        """How often each computation runs per call: loops multiply, calls hand on; None
        inside a loop of unknown length. What a fusion or reduction calls is not listed."""
        runs: dict[str, int | None] = {}

        def visit(name: str, times: int | None) -> None:
            before = runs.get(name, 0)
            runs[name] = None if times is None or before is None else before + times
            for one in self.by_computation[name]:
                if one.opcode == "while":
                    trips = trip_count(one)
                    inside = None if trips is None or times is None else times * trips
                    visit(one.attribute("body") or "", inside)
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
        if opcode == "async-done":
            return one.operands[0], (1, *index)
        if opcode in ALIKE:
            return one.operands[0], index if opcode.endswith("-done") else ()
        if opcode == "while" and index:
            return self._carried(one, index, seen)
        if opcode.endswith("-start") and len(index) and opcode != "all-reduce-start":
            # An asynchronous instruction gives its operands, then its results.
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


def _instruction(line: str, start: re.Match, computation: str) -> Instruction:
    begin = start.end()
    shape_end = _closing(line, begin) + 1 if line[begin] == "(" else line.index(" ", begin)
    opcode = _OPCODE.match(line, shape_end)
    assert opcode is not None, line[:200]
    close = _closing(line, opcode.end() - 1)
    arguments = line[opcode.end() : close]
    return Instruction(
        name=start[2],
        computation=computation,
        opcode=opcode[1],
        result=line[begin:shape_end],
        operands=tuple(re.findall(r"%([\w.\-]+)", arguments)),
        arguments=arguments,
        text=line[close + 1 :],
    )


def _closing(line: str, begin: int) -> int:
    """Where the parenthesis that opens at `begin` closes."""
    depth = 0
    for found in re.finditer(r"[()]", line[begin:]):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return begin + found.start()
    raise ValueError(f"unbalanced: {line[:200]}")


def _frames(text: str) -> dict[int, tuple[str, int]]:
    """Stack frames by id: "file.py:line" and the frame that called it (0: none)."""
    files = dict(re.findall(r'^(\d+) "(.*)"$', _section(text, "FileNames"), re.M))
    lines = {
        number: f"{_short(files.get(file, '?'))}:{line}"
        for number, file, line in re.findall(
            r"^(\d+) \{file_name_id=(\d+) .*?line=(\d+)", _section(text, "FileLocations"), re.M
        )
    }
    return {  # a parent's id is written one too high, so that the outermost frame names itself
        int(number): (lines.get(place, "?"), int(parent) - 1)
        for number, place, parent in re.findall(
            r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?\}",
            _section(text, "StackFrames"),
            re.M,
        )
        if parent
    }


def _short(path: str) -> str:
    """A file's path as an import would find it."""
    roots = [*sys.path, os.getcwd(), str(Path(__file__).parents[2])]
    homes = [f"{home}/" for home in roots if home and path.startswith(f"{home}/")]
    return path.removeprefix(max(homes, key=len, default=""))


def _section(text: str, title: str) -> str:
    """A table at the head of a module: the lines from its title to the next empty one."""
    found = re.search(rf"^{title}\n(.*?)\n\n", text, re.M | re.S)
    return found[1] if found else ""
