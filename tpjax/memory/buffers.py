"""XLA's buffer assignment: which value lies where in a device's memory, and when.

Read from the files that XLA dumps while it compiles (`xla_dump_to`).
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tpjax.memory.hlo import Index

_ALLOCATION = re.compile(r"^allocation (\d+): (?:page \d+, )?size (\d+), (.*):$")
_VALUE = re.compile(
    r"^ value: <\d+ ([\w.\-]+)(?:\{([\d,]*)\})?(?: \(\w+\))? @(\d+)> "
    r"\(size=(\d+),offset=(\d+)\): (.*)$"
)
_RANGE = re.compile(r"^    ([\w.\-]+)\{([\d,]*)\}:(\d+)-(\d+)$")
_ARRAY = re.compile(r"^(\w+)\[([\d,]*)\]")

HOST_SPACE = 5  # XLA's number for pinned host memory


@dataclass(frozen=True, kw_only=True)
class Value:
    """One value of the program in its place: bytes `offset` to `offset + size` of an
    allocation, from position `start` to `end` (both included) of the schedule."""

    instruction: str
    index: Index
    offset: int
    size: int
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def is_table(self) -> bool:
        """A tuple's table of pointers."""
        return not self.dtype


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """A piece of memory that XLA asks for once.

    Attributes:
        use: an argument, a result that is no argument, or the arena of temporaries.
        parameter: the number of the argument, if it is one.
        on_host: pinned host memory.
    """

    size: int
    use: Literal["argument", "output", "temporary"]
    parameter: int | None
    on_host: bool
    values: tuple[Value, ...]


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """All allocations of a program (constants and scratch of single threads left
    out, as in XLA's own sizes), the schedule (a name for each position), and the
    program's text at the time. `constant_bytes` are those of constants: they come with the
    program and lie outside of XLA's pool."""

    allocations: tuple[Allocation, ...]
    schedule: tuple[str, ...]
    text: str
    constant_bytes: int


def read_assignment(folder: Path, module: str) -> Assignment:
    """What XLA dumped to `folder` of the program `module`.

    Raises:
        FileNotFoundError: it dumped nothing of that program (it came from a cache).
    """
    constant_bytes = 0
    ranges, schedule = _read_ranges(_dump(folder, module, "-live-range"))
    allocations, head, values = [], None, []

    def close() -> None:
        if head is not None and (one := _allocation(head, values, ranges, len(schedule))):
            allocations.append(one)

    for line in _dump(folder, module, "-buffer-assignment").splitlines():
        if found := _ALLOCATION.match(line):
            close()
            head, values = found, []
            constant_bytes += int(found[2]) if "constant" in found[3] else 0
        elif found := _VALUE.match(line):
            values.append(found)
        elif not line.startswith(" ") and not line.startswith("BufferAssignment"):
            break
    close()
    text = _dump(folder, module, "")
    return Assignment(
        allocations=tuple(allocations),
        schedule=tuple(schedule),
        text=text,
        constant_bytes=constant_bytes,
    )


def _dump(folder: Path, module: str, what: str) -> str:
    files = sorted(folder.glob(f"module_*.{module}.*after_optimizations{what}.txt"))
    if not files:
        raise FileNotFoundError(f"XLA dumped no after_optimizations{what} of {module}")
    return files[-1].read_text()


def _read_ranges(text: str) -> tuple[dict[tuple[str, Index], tuple[int, int]], list[str]]:
    ranges, schedule = {}, []
    for line in text.splitlines():
        if found := _RANGE.match(line):
            ranges[found[1], _index(found[2])] = int(found[3]), int(found[4])
        elif found := re.match(r"^    \d+:([\w.\-]+)$", line):
            schedule.append(found[1])
        elif line.startswith("  Live ranges at"):
            break
    return ranges, schedule


def _allocation(
    head: re.Match, values: list[re.Match], ranges: dict, length: int
) -> Allocation | None:
    """An allocation from its lines; values without a range live all through."""
    uses = head[3]
    if "thread-local" in uses or "constant" in uses:
        return None
    parameter = re.search(r"\bparameter (\d+)", uses)
    use = "argument" if parameter else "output" if "live-out" in uses or "output" in uses else None
    placed = []
    for found in values:
        array = _ARRAY.match(found[6])
        start, end = ranges.get((found[1], _index(found[2])), (0, length))
        placed.append(
            Value(
                instruction=found[1],
                index=_index(found[2]),
                offset=int(found[5]),
                size=int(found[4]),
                dtype=array[1] if array else "",
                shape=tuple(int(d) for d in array[2].split(",") if d) if array else (),
                start=start,
                end=end,
            )
        )
    return Allocation(
        size=int(head[2]),
        use=use or "temporary",
        parameter=int(parameter[1]) if parameter else None,
        on_host=any(int(found[3]) == HOST_SPACE for found in values),
        values=tuple(placed),
    )


def _index(text: str | None) -> Index:
    return tuple(int(part) for part in (text or "").split(",") if part)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Bytes that one buffer holds from position `start` up to, not including, `end`.

    `values` are those it holds then: several where the compiler works in place.
    """

    offset: int
    size: int
    start: int
    end: int
    values: tuple[Value, ...]


def segments(allocation: Allocation) -> list[Segment]:
    """The arena's contents over time; at any position no byte is in two of them."""
    places: dict[int, list[Value]] = defaultdict(list)
    for value in allocation.values:
        places[value.offset].append(value)
    found = []
    for offset, values in places.items():
        times = sorted({t for v in values for t in (v.start, v.end + 1)})
        for start, end in itertools.pairwise(times):
            alive = tuple(v for v in values if v.start <= start <= v.end)
            if alive and (size := max(v.size for v in alive)):
                found.append(Segment(offset=offset, size=size, start=start, end=end, values=alive))
    return found
