"""What is known of a program's memory and traffic, as plain data: one report type for all.

Every size is of one device. Lines and collectives are of the compiled program,
so shapes are a device's own (local) shapes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

from tpjax.config import PoolConfig
from tpjax.gpus import Outside
from tpjax.pool import fraction_needed, why_not

LINES_IN_WORDS = 12  # of a ledger: what is smaller decides nothing

KINDS = (
    "parameters",
    "moments",
    "gradients",
    "activations",
    "attention",
    "logits",
    "collectives",
    "inputs",
    "workspace",
    "other",
    "unused",
)
"""What bytes are for, in the order in which pictures stack them.

`collectives` are the buffers that collectives write, `workspace` is scratch of
library kernels, `unused` are gaps inside the compiler's arena.
"""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One buffer at the peak (or several alike, where `name` says so).

    Attributes:
        kind: one of `KINDS`.
        name: the logical tensor, such as "state.params['blocks']['mlp']['up']".
        dtype: XLA's name; "" for gaps.
        shape: local shape.
        bytes: what it takes of the pool.
        source: "file.py:line" that it comes from, or None where the compiler names none.
    """

    kind: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    source: str | None


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One array that a collective instruction of the program moves.

    Attributes:
        op: XLA's name, such as "all-gather".
        axis: the mesh axes it runs over, joined by commas.
        group_size: how many devices talk to each other.
        dtype, shape: of its larger side (gathered, or before scattering).
        bytes: of its larger side, for one run.
        count: runs per call of the program; None in a loop of unknown length.
        in_scan: whether it is in the body of a loop.
        asynchronous: whether other work can run meanwhile.
        kind, name: of the tensor it moves, as in a `Line`.
        source: "file.py:line", or None.
    """

    op: str
    axis: str
    group_size: int
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    count: int | None
    in_scan: bool
    asynchronous: bool
    kind: str
    name: str
    source: str | None

    @property
    def wire_bytes(self) -> int | None:
        """What one device sends per call of the program, all runs together, by ring
        algorithms: (n-1)/n of the larger side, and for an all-reduce twice that.
        None where `count` is."""
        if self.count is None:
            return None
        share = (self.group_size - 1) / self.group_size
        if self.op == "all-reduce":
            share *= 2
        elif self.op == "collective-permute":
            share = 1
        return round(self.bytes * share * self.count)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that costs more than it has to.

    Attributes:
        rule: which rule found it, such as "replicated".
        name: the tensor or setting it is about.
        message: what is wrong, one sentence.
        remedy: what to do, one sentence.
        bytes: what it costs per device, or None where that is not a number of bytes.
    """

    rule: str
    name: str
    message: str
    remedy: str
    bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Loop:
    """Where a loop's body lies in the schedule: positions `start` to `end` (both included),
    run `trips` times, or None where XLA does not know."""

    start: int
    end: int
    trips: int | None
    name: str


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """Bytes alive over the scheduled program; a loop's body appears once.

    Attributes:
        bytes_by_kind: for each of `KINDS` that occurs, the bytes alive at each position.
        labels: for each position, the instruction there (operation and source line).
        peak: the position of the peak.
        loops: bodies of loops, outer ones first.
    """

    bytes_by_kind: dict[str, tuple[int, ...]]
    labels: tuple[str, ...]
    peak: int
    loops: tuple[Loop, ...]

    def total_bytes(self, position: int) -> int:
        """Bytes alive at a position, over all kinds."""
        return sum(series[position] for series in self.bytes_by_kind.values())


@dataclass(frozen=True, kw_only=True, repr=False)
class MemoryReport:
    """What a compiled program needs of each device, before it runs.

    Attributes:
        title: what was compiled.
        gpu: the kind of GPU it was compiled for, or None for the devices there are.
        mesh: devices per axis, axes of one left out.
        num_devices: of the whole mesh.
        argument_bytes, output_bytes, alias_bytes, temp_bytes: XLA's sizes; `alias_bytes` is
            what of the results takes the place of arguments.
        host_bytes: pinned host memory that belongs to one device's part of the program.
        outside_pool: estimates of what the device holds beside XLA's pool; empty where
            the kind of device is unknown.
        capacity_bytes: the device's memory, or None where it is unknown.
        pool: how XLA is asked to take memory from it.
        ledger, host_ledger: lines that add up to `peak_bytes`, and to `host_bytes`.
        flops: floating-point operations of one step on all devices, or None where only
            the program is known.
    """

    title: str
    gpu: str | None
    mesh: dict[str, int]
    num_devices: int
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    host_bytes: int
    outside_pool: tuple[Outside, ...]
    capacity_bytes: int | None
    pool: PoolConfig = field(default_factory=PoolConfig)
    ledger: tuple[Line, ...]
    host_ledger: tuple[Line, ...]
    timeline: Timeline
    collectives: tuple[Collective, ...]
    findings: tuple[Finding, ...]
    flops: float | None

    @property
    def peak_bytes(self) -> int:
        """What the program needs of XLA's pool on each device."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temp_bytes

    @property
    def outside_pool_bytes(self) -> int | None:
        """The sum of the estimates, or None where there are none."""
        return sum(e.bytes for e in self.outside_pool) if self.outside_pool else None

    @property
    def obstacle(self) -> str | None:
        """Why pool and all beside it do not fit into the device; None where they do, or
        where that is unknown."""
        if self.capacity_bytes is None or self.outside_pool_bytes is None:
            return None
        return why_not(self.pool, self.peak_bytes, self.outside_pool_bytes, self.capacity_bytes)

    @property
    def fits(self) -> bool | None:
        """Whether pool and all beside it fit into the device; None where that is unknown."""
        known = self.capacity_bytes is not None and self.outside_pool_bytes is not None
        return self.obstacle is None if known else None

    @property
    def pool_fraction(self) -> float | None:
        """The part of the device's memory that XLA's pool must be allowed; None where that is
        no more than JAX allows by itself, where a part was asked for or the allocator has no
        limit, or where the program does not fit at all."""
        if not self.fits or self.capacity_bytes is None or self.outside_pool_bytes is None:
            return None
        sizes = (self.peak_bytes, self.outside_pool_bytes, self.capacity_bytes)
        return fraction_needed(self.pool, *sizes)

    @property
    def wire_bytes(self) -> int:
        """What one device sends per call; collectives in loops of unknown length left out."""
        return sum(c.wire_bytes or 0 for c in self.collectives)

    @property
    def bytes_by_kind(self) -> dict[str, int]:
        """The ledger's sums, largest first."""
        sums: dict[str, int] = {}
        for line in self.ledger:
            sums[line.kind] = sums.get(line.kind, 0) + line.bytes
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def __repr__(self) -> str:
        """What a person at a prompt wants to see; the fields have the rest."""
        fits = ""
        if self.fits is not None and self.capacity_bytes is not None:
            fits = (
                f", with about {gib(self.outside_pool_bytes or 0)} outside XLA's pool: "
                f"{'fits' if self.fits else 'does not fit'} into {gib(self.capacity_bytes)}"
            )
        kinds = ", ".join(f"{kind} {gib(size)}" for kind, size in self.bytes_by_kind.items())
        return "\n".join(
            [
                f"{self.title}: {gib(self.peak_bytes)} on each device at the peak{fits}",
                f"by kind: {kinds}",
                in_words(self.ledger),
                *(f"{finding.message} {finding.remedy}" for finding in self.findings),
            ]
        )

    def as_json(self) -> dict:
        """The report for a file: plain values, the timeline left out."""
        names = [f.name for f in dataclasses.fields(self) if f.name != "timeline"]
        plain = {name: _plain(getattr(self, name)) for name in names}
        plain["collectives"] = [
            {**dataclasses.asdict(c), "wire_bytes": c.wire_bytes} for c in self.collectives
        ]
        derived = ("peak_bytes", "outside_pool_bytes", "fits", "wire_bytes", "bytes_by_kind")
        return {name: getattr(self, name) for name in derived} | plain


def _plain(value):
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def gib(size_bytes: int) -> str:
    """A size for people, in the unit that suits it, of 1024."""
    if abs(size_bytes) < 1024:
        return f"{size_bytes} B"
    if abs(size_bytes) < 1024**2:
        return f"{size_bytes / 1024:.1f} KiB"
    if abs(size_bytes) < 1024**3:
        return f"{size_bytes / 1024**2:.1f} MiB"
    return f"{size_bytes / 1024**3:.2f} GiB"


def in_words(ledger: Sequence[Line]) -> str:
    """The largest lines of a ledger, for a terminal."""
    rest = ledger[LINES_IN_WORDS:]
    lines = [
        f"  {gib(line.bytes):>10}  {line.kind:<12} {line.name}"
        + (f" {line.dtype}{list(line.shape)}" if line.dtype else "")
        + (f" ({line.source.rsplit('/', 1)[-1]})" if line.source else "")
        for line in ledger[:LINES_IN_WORDS]
    ]
    if rest:
        lines.append(
            f"  {gib(sum(line.bytes for line in rest)):>10}  in {len(rest)} smaller arrays"
        )
    return "\n".join(lines)
