"""A ladder's rows as a table of words and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tpjax.config import ConfigError
from tpjax.memory.ladder import FURTHER, OFFLOAD, TECHNIQUES, Row
from tpjax.memory.scene import COLOURS, FAINT, HATCH

COLUMNS = (
    "rung",  # then what it needs, and what it costs
    "total GB",
    "lecture's GB",
    "peak GiB",
    "host GiB",
    "GiB at init",
    "TFLOP per step",
    "GiB sent per step",
    "s per step, at least",
    "lecture's s per epoch",
)
NOTES = (
    "total GB: 10⁹ bytes at the peak on all GPUs. GiB: 1024³ bytes of one GPU. Compiled by XLA.",
    "GiB at init: at the peak of making the state, on the GPU that holds most.",
    "lecture's: its own figures, for 10⁹ parameters on 4 GPUs; it names no model, batch or data.",
    "TFLOP per step: on all GPUs, with what checkpointing computes again; counted from shapes.",
    "s per step, at least: a roofline estimate from published peak rates, not a measurement.",
    "✗: does not fit into the card. –: not known.",
)
COSTS = 6  # the first of the columns of costs
UNKNOWN = "–"


def cells(row: Row) -> list[str]:
    """What the row says in each of `COLUMNS`."""
    rung, figures = row.rung, row.figures
    lecture_gb, lecture_seconds = (_number(x) for x in (rung.lecture_gb, rung.lecture_seconds))
    if figures is None:
        return [rung.name, UNKNOWN, lecture_gb, *[UNKNOWN] * (len(COLUMNS) - 4), lecture_seconds]
    return [
        rung.name,
        f"{figures.total_gb:.2f}",
        lecture_gb,
        _number(figures.peak_bytes / 2**30) + (" ✗" if figures.fits is False else ""),
        _number(figures.host_bytes / 2**30),
        _number(figures.init_peak_bytes / 2**30),
        _number(figures.flops / 1e12),
        _number(figures.wire_bytes / 2**30),
        _number(figures.roofline_seconds),
        lecture_seconds,
    ]


def notes(rows: Sequence[Row]) -> list[str]:
    """What the columns mean, and why rows have no figures."""
    reasons = {f"{row.rung.name}: {row.reason}": None for row in rows if row.figures is None}
    return [*reasons, *NOTES]


def _number(value: float | None) -> str:
    """Three digits, or all before the point."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def markdown(rows: Sequence[Row], title: str) -> str:
    """The table with its notes, and what each rung changes."""
    lines = [f"# {title}", ""]
    for alone, heading in ((False, "Each with those before it"), (True, "Each alone")):
        chosen = [row for row in rows if row.rung.alone == alone]
        if chosen:
            lines += [f"## {heading}", "", _line(COLUMNS)]
            lines += [_line(["---", *["--:"] * (len(COLUMNS) - 1)])]
            lines += [*(_line(cells(row)) for row in chosen), ""]
    changes = {**TECHNIQUES, **FURTHER, "offloaded": OFFLOAD}
    lines += [*(f"- {note}" for note in notes(rows)), "", "## What each changes", ""]
    lines += [f"- {name}: {_settings(changed)}" for name, changed in changes.items()]
    return "\n".join(lines) + "\n"


def _line(words: Sequence[str]) -> str:
    return f"| {' | '.join(word.replace('|', '/') for word in words)} |"


def _settings(changes: dict) -> str:
    return ", ".join(f"`{name}={value}`" for name, value in changes.items())


def draw_ladder(rows: Sequence[Row], title: str, path: Path | str) -> None:
    """Writes a `.png`: the total of each rung that is not alone, beside the lecture's.

    What is in the host's memory comes on top of the bar, hatched.

    Raises:
        ConfigError: no matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("a .png needs matplotlib: pip install 'tpjax[plan]'.") from error
    rows = [row for row in rows if not row.rung.alone]
    figure = Figure((11, 1.5 + 0.55 * len(rows)), layout="constrained")
    axes = figure.add_subplot()
    for y, row in enumerate(rows):
        lecture, figures = row.rung.lecture_gb, row.figures
        if lecture is not None:
            axes.barh(y + 0.2, lecture, 0.36, color=COLOURS["other"])
            axes.text(lecture, y + 0.2, f" {lecture:g}", va="center", color=FAINT)
        y = y if lecture is None else y - 0.2
        if figures is None:
            axes.text(0, y, f" {(row.reason or UNKNOWN)[:100]}", va="center", color=FAINT)
            continue
        total, host = figures.total_gb, figures.num_devices * figures.host_bytes / 1e9
        axes.barh(y, total, 0.36, color=COLOURS["parameters"])
        axes.barh(y, host, 0.36, left=total, color="white", edgecolor=HATCH, hatch="///")
        words = f" {total:.2f}" + (f" + {host:.2f} on the host" if host else "")
        axes.text(total + host, y, words, va="center", weight="bold")
    axes.set_yticks(range(len(rows)), [row.rung.name for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * axes.get_xlim()[1])  # room for the words after the longest bar
    axes.set_xlabel("GB (10⁹ bytes) at the peak on all GPUs, each rung with those before it")
    axes.set_title(title)
    axes.spines[["top", "right"]].set_visible(False)
    for colour, label in ((COLOURS["parameters"], "compiled"), (COLOURS["other"], "the lecture")):
        axes.bar(0, 0, color=colour, label=label)
    axes.legend(frameon=False, loc="lower right")
    FigureCanvasAgg(figure).print_png(path)
