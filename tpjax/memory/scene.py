"""What a picture of a timeline shows and where, in pixels, whatever the file's format."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from tpjax.memory.records import KINDS, Loop, Timeline, gib

# Each colour has a lightness of its own, at least six steps of CIE L* from the next, and
# kinds next to each other in the list by nineteen: told apart in greyscale, and by the
# colour-blind. Gaps are hatched as well.
COLOURS = {
    "parameters": "#00386b",
    "moments": "#6db2e7",
    "gradients": "#d5452b",
    "activations": "#f5be4f",
    "attention": "#027459",
    "logits": "#e07aab",
    "collectives": "#593088",
    "inputs": "#b0e7bd",
    "workspace": "#794b25",
    "other": "#898989",
    "unused": "#ebebeb",
}
HATCH = "#aaaaaa"  # over unused
INK, FAINT, ALARM = "#222222", "#666666", "#b00020"
WIDTH, HEIGHT = 1400, 700
LEFT, RIGHT, TOP = 84, 1100, 104  # of the plot, in pixels
SIZE = 15  # of text
GLYPH = 0.66  # a letter's mean width, of its size, in the widest font in use
LANE = 44  # pixels of a row of loop labels
MAX_LANES = 4
MIN_EDGES = 20  # pixels; edges of shorter loops would only clutter the plot
BAND = "#f7f7f7"  # behind loops
LONGEST = 200  # characters of a name or label


@dataclass(frozen=True)
class Area:
    """A filled polygon."""

    points: tuple[tuple[float, float], ...]
    fill: str


@dataclass(frozen=True)
class Stroke:
    """A line through points."""

    points: tuple[tuple[float, float], ...]
    colour: str = INK
    dashed: bool = False


@dataclass(frozen=True)
class Text:
    """Text at a baseline; `anchor` as in SVG: start, middle or end."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    colour: str = INK
    size: int = SIZE
    bold: bool = False


Shape = Area | Stroke | Text


@dataclass(frozen=True)
class Frame:
    """Where things lie: columns of the plot, and the scale of its bytes.

    A column is a position; of a program with more positions than pixels, the position
    with the most bytes among those that share a pixel, so that no peak is lost.
    """

    timeline: Timeline
    columns: tuple[int, ...]
    top_bytes: float
    bottom: int

    def x(self, position: float) -> int:
        return LEFT + round(position / len(self.timeline.labels) * (RIGHT - LEFT))

    def y(self, size_bytes: float) -> int:
        return self.bottom - round(size_bytes / self.top_bytes * (self.bottom - TOP))


def scene(timeline: Timeline, title: str, capacity_bytes: int | None) -> tuple[list[Shape], Frame]:
    """The whole picture in the order in which it is painted, and where its data lie."""
    num_positions = len(timeline.labels)
    peak_bytes = timeline.total_bytes(timeline.peak)
    lanes = _lanes(timeline.loops, num_positions)
    deepest = max((lane for _, lane, _ in lanes), default=-1)
    subtitle, colour = "bytes alive on one device over one step", FAINT
    line_bytes = 0
    if capacity_bytes:
        share = f"{peak_bytes / capacity_bytes:.1%}"
        subtitle += f"; the peak is {share} of the card's {gib(capacity_bytes)}"
        colour = ALARM if peak_bytes > capacity_bytes else FAINT
        line_bytes = capacity_bytes if capacity_bytes <= 2 * peak_bytes else 0
    frame = Frame(
        timeline,
        _columns(timeline),
        1.06 * max(peak_bytes, line_bytes, 1),
        HEIGHT - 72 - LANE * (deepest + 1),
    )
    notes = ["position in the schedule; a loop's body appears once"]
    if len(frame.columns) < num_positions:
        notes.append("a pixel shows the fullest of its positions")
    if len(lanes) < len(timeline.loops):
        notes.append(f"{len(timeline.loops) - len(lanes)} loops shaded without a name")
    size = min(22, max(SIZE, int((WIDTH - 2 * LEFT) / (GLYPH * max(len(title), 1)))))
    shapes: list[Shape] = [
        Text(LEFT, 36, fitted(title, WIDTH - 2 * LEFT, size), size=size, bold=True),
        Text(LEFT, 60, subtitle, colour=colour),
        Text((LEFT + RIGHT) / 2, HEIGHT - 14, "; ".join(notes), "middle", FAINT),
    ]
    shapes += _bands(frame)
    shapes += _axes(frame)
    shapes += _areas(frame)
    shapes += _loops(frame, lanes)
    if line_bytes:
        shapes += _capacity(frame, line_bytes)
    shapes += _peak(frame, peak_bytes)
    shapes += _legend(timeline, peak_bytes)
    return shapes, frame


def _columns(timeline: Timeline) -> tuple[int, ...]:
    num_positions, num_pixels = len(timeline.labels), RIGHT - LEFT
    if num_positions <= num_pixels:
        return tuple(range(num_positions))
    totals = [sum(sizes) for sizes in zip(*timeline.bytes_by_kind.values(), strict=True)]
    edges = [pixel * num_positions // num_pixels for pixel in range(num_pixels + 1)]
    return tuple(max(range(*span), key=totals.__getitem__) for span in pairwise(edges))


def _bands(frame: Frame) -> Iterable[Shape]:
    for loop in frame.timeline.loops:
        start, end = frame.x(loop.start), frame.x(loop.end + 1)
        corners = ((start, TOP), (end, TOP), (end, frame.bottom), (start, frame.bottom))
        yield Area(corners, BAND)


def _axes(frame: Frame) -> Iterable[Shape]:
    unit, name = (1024**3, "GiB") if frame.top_bytes >= 1024**3 else (1024**2, "MiB")
    yield Text(LEFT - 10, TOP - 14, name, "end", FAINT)
    for value in _ticks(frame.top_bytes / unit, 6):
        y = frame.y(value * unit)
        yield Stroke(((LEFT, y), (RIGHT, y)), "#dddddd")
        yield Text(LEFT - 10, y + 5, f"{value:g}", "end")
    for value in _ticks(len(frame.timeline.labels), 10):
        if value == int(value):
            x = frame.x(value)
            yield Stroke(((x, frame.bottom), (x, frame.bottom + 6)))
            yield Text(x, frame.bottom + 24, f"{value:g}", "middle")


def _ticks(end: float, most: int) -> list[float]:
    """Round numbers from 0 to `end`, at most `most` steps."""
    power = 10 ** math.floor(math.log10(end / most))
    step = next(power * m for m in (1, 2, 5, 10) if end / (power * m) <= most)
    return [round(i * step, 9) for i in range(int(end / step) + 1)]


def _areas(frame: Frame) -> Iterable[Shape]:
    """Steps of whole pixels, so that nothing is blended and colours stay what they are."""
    num = len(frame.columns)
    xs = [LEFT + round(column / num * (RIGHT - LEFT)) for column in range(num + 1)]
    floor = [0] * num
    for kind in kinds_of(frame.timeline):
        series = frame.timeline.bytes_by_kind[kind]
        roof = [low + series[p] for low, p in zip(floor, frame.columns, strict=True)]
        upper = _steps(xs, [frame.y(size) for size in roof])
        lower = _steps(xs, [frame.y(size) for size in floor])
        yield Area((*upper, *reversed(lower)), COLOURS[kind])
        floor = roof
    yield Stroke(((LEFT, frame.bottom), (RIGHT, frame.bottom)))


def _steps(xs: Sequence[int], ys: Sequence[int]) -> list[tuple[int, int]]:
    """The corners of a staircase: height `ys[i]` from `xs[i]` to `xs[i + 1]`."""
    points = []
    for y, run in groupby(range(len(ys)), key=ys.__getitem__):
        columns = list(run)
        points += [(xs[columns[0]], y), (xs[columns[-1] + 1], y)]
    return points


def _lanes(loops: Sequence[Loop], num_positions: int) -> list[tuple[Loop, int, str]]:
    """The row beneath the axis for each loop, inner ones nearer, none over another.

    Loops that find no room within `MAX_LANES` are left out.
    """
    taken: list[list[tuple[float, float]]] = [[] for _ in range(MAX_LANES)]
    placed = []
    scale = (RIGHT - LEFT) / num_positions
    for loop in sorted(loops, key=lambda loop: loop.end - loop.start):
        text = fitted(f"×{loop.trips or '?'} {loop.name}", 330, SIZE)
        start, end = LEFT + loop.start * scale, LEFT + (loop.end + 1) * scale
        x, anchor = _placed((start + end) / 2, text)
        x -= _text_width(text) * {"start": 0, "middle": 0.5, "end": 1}[anchor]
        low, high = min(start, x) - 5, max(end, x + _text_width(text)) + 5
        for lane, others in enumerate(taken):
            if all(high <= a or low >= b for a, b in others):
                others.append((low, high))
                placed.append((loop, lane, text))
                break
    return placed


def _loops(frame: Frame, lanes: list[tuple[Loop, int, str]]) -> Iterable[Shape]:
    for loop, lane, text in lanes:
        start, end = frame.x(loop.start), frame.x(loop.end + 1)
        if end - start > MIN_EDGES:
            for x in (start, end):
                yield Stroke(((x, TOP), (x, frame.bottom)), INK, dashed=True)
        y = frame.bottom + 36 + LANE * lane
        yield Stroke(((start, y), (start, y + 8), (end, y + 8), (end, y)))
        x, anchor = _placed((start + end) / 2, text)
        yield Text(x, y + 26, text, anchor)


def _capacity(frame: Frame, capacity_bytes: int) -> Iterable[Shape]:
    y = frame.y(capacity_bytes)
    yield Stroke(((LEFT, y), (RIGHT, y)), ALARM)
    is_peak_left = frame.timeline.peak < len(frame.timeline.labels) / 2
    x, anchor = (RIGHT - 8, "end") if is_peak_left else (LEFT + 8, "start")
    yield Text(x, y - 7, f"capacity {gib(capacity_bytes)}", anchor, ALARM)


def _peak(frame: Frame, peak_bytes: int) -> Iterable[Shape]:
    peak = frame.timeline.peak
    x, y = frame.x(peak + 0.5), frame.y(peak_bytes)
    label = f"peak {gib(peak_bytes)} at position {peak}: {frame.timeline.labels[peak]}"
    label = fitted(label, RIGHT - LEFT, SIZE)
    yield Stroke(((x, TOP - 8), (x, y - 8)))
    yield Area(((x - 7, y - 12), (x + 7, y - 12), (x, y)), INK)
    place, anchor = _placed(x, label)
    yield Text(place, TOP - 14, label, anchor, bold=True)


def _legend(timeline: Timeline, peak_bytes: int) -> Iterable[Shape]:
    x, y, end = RIGHT + 36, TOP, WIDTH - 20
    yield Text(end, y, "at the peak", "end", FAINT)
    for kind in reversed(kinds_of(timeline)):
        y += 28
        box = ((x, y - 14), (x + 18, y - 14), (x + 18, y + 3), (x, y + 3))
        yield Area(box, COLOURS[kind])
        yield Text(x + 28, y, kind)
        size = timeline.bytes_by_kind[kind][timeline.peak]
        yield Text(end, y, gib(size) if size else "–", "end")
    y += 12
    yield Stroke(((x, y), (end, y)), FAINT)
    yield Text(x + 28, y + 22, "all", bold=True)
    yield Text(end, y + 22, gib(peak_bytes), "end", bold=True)


def kinds_of(timeline: Timeline) -> list[str]:
    """The kinds that are ever alive, as stacked from below."""
    alive = [kind for kind, series in timeline.bytes_by_kind.items() if any(series)]
    return sorted(alive, key=KINDS.index)


def fitted(text: str, pixels: float = math.inf, size: int = SIZE) -> str:
    """Text on one line, without what does not print, cut to what fits."""
    text = "".join(c if c.isprintable() else " " for c in text[: LONGEST + 1])
    most = int(min(LONGEST, pixels / (size * GLYPH)))
    return text if len(text) <= most else text[: most - 1] + "…"


def _text_width(text: str) -> float:
    return len(text) * SIZE * GLYPH


def _placed(x: float, text: str) -> tuple[float, str]:
    """A label's place and anchor: centred on `x`, or against the plot's nearer side."""
    half = _text_width(text) / 2
    if x - half < LEFT:
        return LEFT, "start"
    return (RIGHT, "end") if x + half > RIGHT else (x, "middle")
