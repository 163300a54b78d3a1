"""A picture of the bytes alive over a program: `.png`, or `.html` that answers to the pointer."""

from __future__ import annotations

import html
import json
from collections.abc import Sequence
from importlib import resources
from io import BytesIO
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from tpjax.config import ConfigError
from tpjax.memory import scene
from tpjax.memory.records import Line, MemoryReport, gib
from tpjax.memory.scene import Area, Frame, Shape, Stroke, Text

if TYPE_CHECKING:
    from matplotlib.artist import Artist

FONT = "DejaVu Sans"  # comes with matplotlib
DPI = 100
TABLE_LINES = 50
PATTERN = f"""<defs>
<pattern id="hatch" width="8" height="8" patternUnits="userSpaceOnUse"
  patternTransform="rotate(45)">
<path d="M0 0H8V8H0" fill="{scene.COLOURS["unused"]}"/>
<path d="M0 0V8" stroke="{scene.HATCH}" stroke-width="2"/>
</pattern></defs>"""


def draw(report: MemoryReport, path: Path | str) -> None:
    """Writes the picture of a report's timeline: what is alive where.

    The card's memory is drawn if it is at most twice the peak.

    Args:
        report: whose timeline, title and card.
        path: a `.png`, or a self-contained `.html`, which has the ledger's largest lines
            beneath the picture.

    Raises:
        ConfigError: another suffix, no matplotlib for a `.png`, or no place to write to.
    """
    path = Path(path)
    if path.suffix.lower() not in (".png", ".html"):
        raise ConfigError(f"picture {path} must end in .png or .html.")
    shapes, frame = scene.scene(report.timeline, report.title, report.capacity_bytes)
    is_png = path.suffix.lower() == ".png"
    data = _png(shapes) if is_png else _html(shapes, frame, report.ledger, report.title).encode()
    try:
        path.write_bytes(data)
    except OSError as error:
        raise ConfigError(
            f"picture {path} cannot be written: {error.strerror or error}."
        ) from error


def _png(shapes: Sequence[Shape]) -> bytes:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.transforms import Affine2D
    except ImportError as error:
        raise ConfigError(
            "a .png needs matplotlib: pip install 'tpjax[plan]'; an .html needs nothing."
        ) from error
    # No pyplot: a notebook's figures and settings stay as they are.
    figure = Figure((scene.WIDTH / DPI, scene.HEIGHT / DPI), dpi=DPI, facecolor="white")
    canvas = FigureCanvasAgg(figure)
    pixels = Affine2D().scale(1, -1).translate(0, scene.HEIGHT)
    for order, shape in enumerate(shapes):
        artist = figure.add_artist(_artist(shape))
        artist.set(transform=pixels, zorder=order)
    data = BytesIO()
    canvas.print_png(data)
    return data.getvalue()


def _artist(shape: Shape) -> Artist:
    """Matplotlib's counterpart of a shape, in pixels."""
    from matplotlib.font_manager import FontProperties, findfont, get_font
    from matplotlib.lines import Line2D
    from matplotlib.patches import Polygon
    from matplotlib.patheffects import withStroke
    from matplotlib.text import Text as Label

    match shape:
        case Area(points, fill):
            hatch = "///" if fill == scene.COLOURS["unused"] else None
            edge = scene.HATCH if hatch else "none"
            return Polygon(points, fc=fill, ec=edge, lw=0, hatch=hatch)
        case Stroke(points, colour, dashed):
            style = (0, (4, 4)) if dashed else "solid"
            return Line2D(*zip(*points, strict=True), color=colour, lw=0.8, ls=style)
        case Text(x, y, text, anchor, colour, size, bold):
            font = FontProperties(family=FONT, size=size * 72 / DPI, weight="bold" if bold else 400)
            glyphs = get_font(findfont(font))
            text = "".join(c if glyphs.get_char_index(ord(c)) else "?" for c in text)
            side = {"start": "left", "middle": "center", "end": "right"}[anchor]
            halo = [withStroke(linewidth=3, foreground="white")]
            label = Label(x, y, text, color=colour, ha=side, fontproperties=font)
            label.set(parse_math=False, path_effects=halo)
            return label


def _html(shapes: Sequence[Shape], frame: Frame, ledger: Sequence[Line], title: str) -> str:
    """The template with the picture, the data and the table, none of which can hold a `<!--`."""
    template = resources.files("tpjax.memory").joinpath("timeline.html").read_text("utf-8")
    parts = {
        "TITLE": html.escape(scene.fitted(title)),
        "PICTURE": "\n".join([PATTERN, *map(_element, shapes)]),
        "DATA": _data(frame),
        "TABLE": _table(ledger),
    }
    for name, part in parts.items():
        template = template.replace(f"<!--{name}-->", part)
    return template


def _element(shape: Shape) -> str:
    """SVG's counterpart of a shape."""
    match shape:
        case Area(points, fill):
            corners = " ".join(f"{x:g},{y:g}" for x, y in points)
            fill = "url(#hatch)" if fill == scene.COLOURS["unused"] else fill
            return f'<polygon points="{corners}" fill="{fill}"/>'
        case Stroke(points, colour, dashed):
            corners = " ".join(f"{x:g},{y:g}" for x, y in points)
            dash = ' stroke-dasharray="4 4"' if dashed else ""
            return f'<polyline points="{corners}" fill="none" stroke="{colour}"{dash}/>'
        case Text(x, y, text, anchor, colour, size, bold):
            weight = ' font-weight="bold"' if bold else ""
            return (
                f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" fill="{colour}" '
                f'font-size="{size}"{weight}>{html.escape(text)}</text>'
            )


def _data(frame: Frame) -> str:
    """JSON for the script; bytes as runs: [positions, bytes, positions, bytes, ...]."""
    timeline = frame.timeline
    runs = {
        kind: [number for size, run in groupby(series) for number in (len(list(run)), size)]
        for kind in scene.kinds_of(timeline)
        for series in (timeline.bytes_by_kind[kind],)
    }
    data = {
        "labels": [scene.fitted(label) for label in timeline.labels],
        "peak": timeline.peak,
        "runs": runs,
        "colours": {kind: scene.COLOURS[kind] for kind in runs},
        "loops": [
            {
                "start": loop.start,
                "end": loop.end,
                "trips": loop.trips,
                "name": scene.fitted(loop.name),
            }
            for loop in timeline.loops
        ],
        "plot": {
            "width": scene.WIDTH,
            "left": scene.LEFT,
            "right": scene.RIGHT,
            "top": scene.TOP,
            "bottom": frame.bottom,
            "topBytes": frame.top_bytes,
            "columns": len(frame.columns),
        },
    }
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def _table(ledger: Sequence[Line]) -> str:
    """Rows of the largest lines, and one for the rest."""
    lines = sorted(ledger, key=lambda line: -line.bytes)
    rows = []
    for line in lines[:TABLE_LINES]:
        shape = f"{line.dtype}[{','.join(map(str, line.shape))}]" if line.dtype else ""
        colour = scene.COLOURS[line.kind]
        cells = [line.name, shape, gib(line.bytes), line.source or ""]
        rows.append(
            f'<tr><td><i style="background:{colour}"></i>{html.escape(line.kind)}</td>'
            + "".join(f"<td>{html.escape(scene.fitted(cell))}</td>" for cell in cells)
            + "</tr>"
        )
    rest = lines[TABLE_LINES:]
    if rest:
        size = gib(sum(line.bytes for line in rest))
        rows.append(f"<tr><td></td><td>{len(rest)} more</td><td></td><td>{size}</td><td></td></tr>")
    return "\n".join(rows)
