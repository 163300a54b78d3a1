"""The text of a compiled program taken apart: instructions, and the lines they come from."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

_START = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = ")
_OPCODE = re.compile(r" ([\w\-]+)\(")

COLLECTIVES = {"all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all"}
COLLECTIVES |= {"collective-permute", "collective-broadcast"}


@dataclass(frozen=True)
class Instruction:
    """One instruction; `text` is all that stands after its operands."""

    is_root: bool
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


def read_instruction(line: str, computation: str) -> Instruction | None:
    """The instruction that a line of a computation holds, if one does."""
    start = _START.match(line)
    if start is None:
        return None
    begin = start.end()
    shape_end = _closing(line, begin) + 1 if line[begin] == "(" else line.index(" ", begin)
    opcode = _OPCODE.match(line, shape_end)
    assert opcode is not None, line[:200]
    close = _closing(line, opcode.end() - 1)
    arguments = line[opcode.end() : close]
    return Instruction(
        is_root=bool(start[1]),
        name=start[2],
        computation=computation,
        opcode=opcode[1],
        result=line[begin:shape_end],
        operands=tuple(re.findall(r"%([\w.\-]+(?:#\d+)*)", arguments)),
        arguments=arguments,
        text=line[close + 1 :],
    )


def elements(one: Instruction, known: Mapping[str, Instruction]) -> Iterator[Instruction]:
    """The get-tuple-elements that XLA writes into operands: newer ones write `%a#1` for
    `get-tuple-element(%a), index=1`."""
    made: dict[str, Instruction] = {}
    for operand in one.operands:
        whole, *numbers = operand.split("#")
        for number in numbers:
            tuples = made.get(whole) or known[whole]
            made[f"{whole}#{number}"] = Instruction(
                is_root=False,
                name=f"{whole}#{number}",
                computation=one.computation,
                opcode="get-tuple-element",
                result=_parts(tuples.result)[int(number)],
                operands=(whole,),
                arguments=f"%{whole}",
                text=f", index={number}",
            )
            whole = f"{whole}#{number}"
    yield from made.values()


def _parts(shape: str) -> list[str]:
    """The shapes in a tuple's."""
    parts, depth = [""], 0
    for character in re.sub(r"/\*.*?\*/", "", shape)[1:-1]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def _closing(line: str, begin: int) -> int:
    """Where the parenthesis that opens at `begin` closes."""
    depth = 0
    for found in re.finditer(r"[()]", line[begin:]):
        depth += 1 if found[0] == "(" else -1
        if depth == 0:
            return begin + found.start()
    raise ValueError(f"unbalanced: {line[:200]}")


def read_frames(text: str) -> dict[int, tuple[str, int]]:
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
