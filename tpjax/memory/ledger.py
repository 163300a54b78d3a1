"""Where a device's memory goes: line by line at the peak, and over the whole step."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from tpjax.memory.buffers import Allocation, Assignment, Segment, segments
from tpjax.memory.hlo import Program, trip_count
from tpjax.memory.names import Description, Namer
from tpjax.memory.paths import Place, readable
from tpjax.memory.records import KINDS, Line, Loop, Timeline

# What a buffer is called when the compiler keeps several values in it at once.
_TELLING = ("gradients", "activations", "attention", "logits", "parameters", "collectives")


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """One device's memory.

    Attributes:
        lines: at the peak, largest first; they add up to all of XLA's pool that the
            program needs (arguments + results − reused + temporaries).
        host_lines: in pinned host memory, counted apart.
        timeline: bytes alive over the schedule.
        moving: what the arena of temporaries holds, and when.
    """

    lines: tuple[Line, ...]
    host_lines: tuple[Line, ...]
    timeline: Timeline
    moving: tuple[tuple[Segment, Description], ...]


def make_ledger(program: Program, assignment: Assignment, namer: Namer) -> Ledger:
    """The ledger of a compiled program."""
    fixed = [a for a in assignment.allocations if a.use != "temporary" and not a.on_host]
    arenas = [a for a in assignment.allocations if a.use == "temporary" and not a.on_host]
    host = [a for a in assignment.allocations if a.on_host]
    held = [_fixed_line(namer, allocation) for allocation in fixed]
    moving = [
        (segment, describe(namer, segment)) for arena in arenas for segment in segments(arena)
    ]
    timeline = _timeline(program, assignment.schedule, held, moving)
    at_peak = [
        _line(segment, description)
        for segment, description in moving
        if segment.start <= timeline.peak < segment.end
    ]
    gaps = sum(arena.size for arena in arenas) - sum(line.bytes for line in at_peak)
    unused = Line(
        kind="unused", name="gaps in the arena", dtype="", shape=(), bytes=gaps, source=None
    )
    lines = [line for line in (*held, *at_peak, unused) if line.bytes]
    host_lines = [_fixed_line(namer, allocation) for allocation in host]
    return Ledger(
        lines=tuple(sorted(lines, key=lambda line: -line.bytes)),
        host_lines=tuple(sorted(host_lines, key=lambda line: -line.bytes)),
        timeline=timeline,
        moving=tuple(moving),
    )


def describe(namer: Namer, segment: Segment) -> Description:
    """What a buffer holds; where the compiler works in place, the most telling of it."""
    described = [namer.result(v) or namer.value(v) for v in segment.values]
    order = {kind: number for number, kind in enumerate(_TELLING)}
    return min(described, key=lambda d: order.get(d.kind, len(order)))


def _line(segment: Segment, description: Description) -> Line:
    largest = max(segment.values, key=lambda value: (value.size, not value.is_table))
    return Line(
        kind=description.kind,
        name=description.name,
        dtype=largest.dtype,
        shape=largest.shape,
        bytes=segment.size,
        source=description.source,
    )


def _fixed_line(namer: Namer, allocation: Allocation) -> Line:
    """An argument (and the result that takes its place), or a result of its own."""
    number, values = allocation.parameter, allocation.values
    first, shape = values[0], None
    if number is not None:
        description = namer.argument(number)
        first = next((v for v in values if namer.is_argument(v, number)), first)
    else:
        described = [(v, d) for v in values if (d := namer.result(v)) is not None]
        first, description = described[0] if described else (first, namer.value(first))
        shape = namer.result_shape(description.name)
    return Line(
        kind=description.kind,
        name=description.name,
        dtype=first.dtype,
        shape=first.shape if shape is None else shape,
        bytes=allocation.size,
        source=description.source,
    )


def _timeline(
    program: Program,
    schedule: Sequence[str],
    held: Sequence[Line],
    moving: Sequence[tuple[Segment, Description]],
) -> Timeline:
    length = len(schedule)
    changes = {kind: [0] * (length + 2) for kind in KINDS}
    for line in held:
        changes[line.kind][0] += line.bytes
    for segment, description in moving:
        changes[description.kind][segment.start] += segment.size
        changes[description.kind][min(segment.end, length + 1)] -= segment.size
    series = {kind: tuple(accumulate(change))[:length] for kind, change in changes.items()}
    series = {kind: sizes for kind, sizes in series.items() if any(sizes)}
    totals = [sum(sizes[position] for sizes in series.values()) for position in range(length)]
    return Timeline(
        bytes_by_kind=series,
        labels=tuple(_label(program, name) for name in schedule),
        peak=max(range(length), key=totals.__getitem__),
        loops=tuple(_loops(program, schedule)),
    )


def _label(program: Program, name: str) -> str:
    one = program.instructions.get(name)
    if one is None:
        return name
    if one.opcode == "parameter":
        return readable(one.op_name) or name
    place = Place.parse(one.op_name)
    what = "/".join(filter(None, (place.scope, place.primitive))) or one.opcode
    source = program.source(one)
    return f"{what} ({source.rsplit('/', 1)[-1]})" if source else what


def _loops(program: Program, schedule: Sequence[str]) -> list[Loop]:
    """Where bodies of loops lie in the schedule, outer ones first."""
    positions: dict[str, list[int]] = {}
    for position, name in enumerate(schedule):
        one = program.instructions.get(name)
        while one is not None and one.computation:
            positions.setdefault(one.computation, []).append(position)
            one = program.callers.get(one.computation)
    found = []
    for one in program.instructions.values():
        body = one.attribute("body") if one.opcode == "while" else None
        if body in positions:
            place = Place.parse(re.sub(r"/while$", "/scan", one.op_name) or "scan")
            direction = "backward " if place.backward else ""
            trips = trip_count(one)
            found.append(
                Loop(
                    start=min(positions[body]),
                    end=max(positions[body]),
                    trips=trips,
                    name=f"{direction}{place.scope or ('loop' if trips is None else 'scan')}",
                )
            )
    return sorted(found, key=lambda loop: (loop.start, -loop.end))
