"""Memory reports as a person reads them in a terminal."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tpjax.memory.advice import Advice
from tpjax.memory.chart import COLUMNS, COSTS, cells, notes
from tpjax.memory.ladder import Row
from tpjax.memory.policies import Policy
from tpjax.memory.records import Collective, MemoryReport, gib
from tpjax.memory.timing import Roofline

LEDGER_ROWS = 15
DIFF_ROWS = 20


def whole(report: MemoryReport) -> Group:
    """Verdict, ledger, traffic and findings."""
    parts: list[RenderableType] = [_verdict(report), _kinds(report), _ledger(report)]
    if report.collectives:
        parts.append(_traffic(report))
    parts.append(_findings(report))
    return Group(*parts)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", show_header=bool(columns), box=box.SIMPLE_HEAD)
    for column in columns:
        number = column in ("bytes", "peak with it", "runs")
        table.add_column(
            column,
            justify="right" if number else "left",
            no_wrap=number or column in ("kind", "from"),
            overflow="fold",
        )
    return table


def _verdict(report: MemoryReport) -> Table:
    table = _table(escape(report.title))
    table.add_row("peak of XLA's pool", f"[bold]{gib(report.peak_bytes)}[/] per device")
    for part in report.outside_pool:
        table.add_row(f"outside it: {escape(part.what)}", f"{gib(part.bytes)} (estimate)")
    if report.outside_pool_bytes:
        whole = report.peak_bytes + report.outside_pool_bytes
        table.add_row("together", f"[bold]{gib(whole)}[/] per device")
    if report.host_bytes:
        table.add_row("pinned host memory", f"{gib(report.host_bytes)} per device")
    if report.fits is None:
        table.add_row("fits", "not known, because the device's memory is not")
    else:
        assert report.capacity_bytes is not None
        verdict = "[green]yes[/]" if report.fits else "[red]no[/]"
        why = f": {report.obstacle}" if report.obstacle else ""
        table.add_row("fits", f"{verdict}, the card has {gib(report.capacity_bytes)}{why}")
        if share := report.pool_fraction:
            table.add_row("more than JAX's default pool", f"set --pool-fraction={share:g}")
    if report.wire_bytes:
        table.add_row("sent per device and step", gib(report.wire_bytes))
    if report.flops is not None:
        table.add_row("operations per step", f"{_flop(report.flops)} on all devices")
    return table


def _kinds(report: MemoryReport) -> Table:
    table = _table("at the peak, by kind", "kind", "bytes", "")
    for kind, size in report.bytes_by_kind.items():
        share = size / report.peak_bytes
        table.add_row(kind, gib(size), f"{'█' * round(30 * share)} {100 * share:.1f} %")
    return table


def _ledger(report: MemoryReport) -> Table:
    table = _table("the largest arrays", "kind", "bytes", "name and local shape", "from")
    for line in report.ledger[:LEDGER_ROWS]:
        array = f" {line.dtype}[{','.join(map(str, line.shape))}]" if line.dtype else ""
        source = (line.source or "").rsplit("/", 1)[-1]
        table.add_row(line.kind, gib(line.bytes), escape(line.name + array), escape(source))
    rest = report.ledger[LEDGER_ROWS:]
    table.add_row("", gib(sum(line.bytes for line in rest)), f"in {len(rest)} smaller ones", "")
    return table


def _traffic(report: MemoryReport) -> Table:
    """Collectives that run over the same axis, added up."""
    sums: dict[tuple[str, str], list[Collective]] = defaultdict(list)
    for c in report.collectives:
        sums[c.op, c.axis].append(c)
    table = _table("between devices, per step", "collective", "axis", "runs", "bytes", "")
    for (op, axis), found in sorted(sums.items(), key=lambda item: -_wire(item[1])):
        hidden = _wire(c for c in found if c.asynchronous)
        table.add_row(
            op,
            axis,
            str(sum(c.count or 0 for c in found)),
            gib(_wire(found)),
            f"{100 * hidden / max(_wire(found), 1):.0f} % asynchronous",
        )
    return table


def _wire(found: Iterable[Collective]) -> int:
    return sum(c.wire_bytes or 0 for c in found)


def advice(changes: Sequence[Advice]) -> RenderableType:
    """Changes of the settings and the peak with each."""
    if not changes:
        return Text("No single change of the settings lowers the peak; use more devices.")
    table = _table("what would help most", "change", "peak with it")
    for change in changes:
        table.add_row(change.flags, gib(change.peak_bytes))
    return table


def policies(choices: Sequence[Policy], model_flops: float) -> Table:
    """What the choices of --remat keep and repeat, the run's own marked."""
    table = _table("what --remat would keep of the layers", "remat", "bytes", "operations repeated")
    for one in choices:
        share = f"{100 * one.repeated_flops / model_flops:.1f} % of the model's"
        table.add_row(
            f"[bold]{one.remat}[/] ←" if one.chosen else one.remat, gib(one.kept_bytes), share
        )
    return table


def roofline(found: Roofline | None) -> RenderableType:
    """Seconds that a step keeps each resource busy, the busiest marked."""
    if found is None:
        return Text(
            "how long a step takes: not estimated, because the device's rates are not known"
        )
    table = _table("how long a step takes at least (roofline estimate)", "resource", "seconds")
    for name, seconds in dataclasses.asdict(found).items():
        if seconds:
            busiest = seconds == found.seconds
            table.add_row(f"[bold]{name}[/] ←" if busiest else name, f"{seconds:.3f}")
    return table


def ladder(rows: Sequence[Row], title: str) -> Group:
    """What rungs need and what they cost: with those before them, then alone."""
    parts: list[RenderableType] = []
    for said, columns in (("memory", slice(1, COSTS)), ("costs", slice(COSTS, None))):
        table = _table(f"{escape(title)}: {said}", COLUMNS[0], *COLUMNS[columns])
        table.columns[0].no_wrap = True
        for column in table.columns[1:]:
            column.justify = "right"
        for row, after in zip(rows, [*rows[1:], None], strict=True):
            name, *_ = found = cells(row)
            turn = after is not None and after.rung.alone != row.rung.alone
            name = f"alone: {name}" if row.rung.alone else name
            table.add_row(*map(escape, [name, *found[columns]]), end_section=turn)
        parts.append(table)
    return Group(*parts, *map(Text, notes(rows)))


def _flop(flops: float) -> str:
    """A count of operations in the unit that suits it."""
    for unit, size in (("EFLOP", 1e18), ("PFLOP", 1e15), ("TFLOP", 1e12)):
        if flops >= size:
            return f"{flops / size:.1f} {unit}"
    return f"{flops / 1e9:.1f} GFLOP"


def _findings(report: MemoryReport) -> RenderableType:
    if not report.findings:
        return Text("no findings")
    table = _table("findings")
    for finding in report.findings:
        table.add_row(escape(finding.message), escape(finding.remedy))
    return table


def difference(before: dict, after: dict) -> Group:
    """What changed between two reports, as `--json` writes them."""
    table = _table("", "", "before", "after", "change")
    for name in ("peak_bytes", "host_bytes", "outside_pool_bytes", "wire_bytes"):
        a, b = before.get(name), after.get(name)
        if a is not None and b is not None:
            table.add_row(name, gib(a), gib(b), _signed(b - a))
    arrays = _table("arrays that changed", "kind", "name", "before", "after", "change")
    sizes = _sizes(before["ledger"]), _sizes(after["ledger"])
    changes = {
        key: (sizes[0].get(key, 0), sizes[1].get(key, 0))
        for key in sizes[0].keys() | sizes[1].keys()
    }
    largest = sorted(changes.items(), key=lambda item: (-abs(item[1][1] - item[1][0]), item[0]))
    for key, (a, b) in [item for item in largest if item[1][0] != item[1][1]][:DIFF_ROWS]:
        arrays.add_row(escape(key[0]), escape(key[1]), gib(a), gib(b), _signed(b - a))
    if not arrays.rows:
        return Group(f"{escape(before['title'])}: no array differs")
    titles = f"{escape(before['title'])}\n→ {escape(after['title'])}"
    return Group(titles, table, arrays)


def _sizes(ledger: list[dict]) -> dict[tuple[str, str], int]:
    """Bytes by kind and name: several arrays of a name count together."""
    sums: dict[tuple[str, str], int] = defaultdict(int)
    for line in ledger:
        sums[line["kind"], line["name"]] += line["bytes"]
    return sums


def _signed(change: int) -> str:
    return f"{'+' if change > 0 else '−' if change < 0 else '±'}{gib(abs(change))}"
