"""Pictures of timelines: their pixels, their data, and what they refuse."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations, pairwise

import numpy as np
import pytest

from tpjax.config import ConfigError
from tpjax.memory import picture, scene
from tpjax.memory.picture import TABLE_LINES
from tpjax.memory.records import KINDS, Line, Loop, MemoryReport, Timeline

MIB = 1024**2
HOSTILE = "</script><script>alert('1')</script><!--DATA-->&amp; $x_$ \n\x00\u202e\ud800 \u5b57"


def draw(shown: Timeline, ledger, path, *, title: str, capacity_bytes: int | None = None) -> None:
    """The picture of a report that has no more than this."""
    report = MemoryReport(
        title=title,
        gpu=None,
        mesh={},
        num_devices=1,
        argument_bytes=0,
        output_bytes=0,
        alias_bytes=0,
        temp_bytes=0,
        host_bytes=0,
        outside_pool=(),
        capacity_bytes=capacity_bytes,
        ledger=tuple(ledger),
        host_ledger=(),
        timeline=shown,
        collectives=(),
        findings=(),
        flops=None,
    )
    picture.draw(report, path)


def series(num: int, *spans: tuple[int, int, int]) -> tuple[int, ...]:
    """Bytes at each position: of each span (start, end, MiB) where it is alive."""
    return tuple(sum(m * MIB for a, b, m in spans if a <= i < b) for i in range(num))


def timeline(num: int = 40) -> Timeline:
    bytes_by_kind = {
        "workspace": series(num, (20, 24, 50)),
        "activations": series(num, (10, 30, 200), (12, 20, 7)),
        "parameters": series(num, (0, num, 100)),
        "logits": series(num),
    }
    labels = tuple(f"fusion.{i} (model.py:{i})" for i in range(num))
    return Timeline(bytes_by_kind=bytes_by_kind, labels=labels, peak=20, loops=())


def line(name: str = "w", size: int = MIB, **values) -> Line:
    values = {"kind": "parameters", "dtype": "bf16", "shape": (4, 8), "source": None, **values}
    return Line(name=name, bytes=size, **values)


def plot_pixels(path) -> np.ndarray:
    """The pixels of the plot alone, as `0xrrggbb`."""
    image = pytest.importorskip("matplotlib.image").imread(path)
    assert image.shape == (700, 1400, 4)
    red, green, blue, _ = np.moveaxis(np.rint(image * 255).astype(int), 2, 0)
    return (red << 16 | green << 8 | blue)[scene.TOP : 627, scene.LEFT : scene.RIGHT]


def pixels_of(path, kind: str) -> int:
    return int((plot_pixels(path) == int(scene.COLOURS[kind][1:], 16)).sum())


def data_of(page: str) -> dict:
    found = re.findall(r'<script id="data" type="application/json">(.*?)</script>', page, re.S)
    assert len(found) == 1
    return json.loads(found[0])


def unpacked(runs: list[int]) -> tuple[int, ...]:
    return tuple(size for num, size in zip(runs[::2], runs[1::2], strict=True) for _ in range(num))


class Page(HTMLParser):
    """The elements, the attributes and the visible text of a page."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.texts.append(data)


def test_each_kind_takes_pixels_in_proportion_to_its_bytes(tmp_path):
    shown = timeline()
    draw(shown, [], tmp_path / "a.png", title="nano")
    for kind in KINDS:
        total = sum(shown.bytes_by_kind.get(kind, ()))
        share = total / len(shown.labels) / (1.06 * shown.total_bytes(shown.peak))
        found = pixels_of(tmp_path / "a.png", kind) / plot_pixels(tmp_path / "a.png").size
        assert found == pytest.approx(share, rel=0.02), kind


def test_the_legend_is_in_the_order_of_the_stack(tmp_path):
    draw(timeline(), [], tmp_path / "a.html", title="nano")
    texts = [text for text in Page((tmp_path / "a.html").read_text()).texts if text in KINDS]
    assert texts == ["workspace", "activations", "parameters"]


def test_gaps_are_hatched(tmp_path):
    shown = replace(timeline(), bytes_by_kind={"unused": series(40, (0, 40, 10))}, peak=0)
    draw(shown, [], tmp_path / "a.png", title="")
    plain = pixels_of(tmp_path / "a.png", "unused") / plot_pixels(tmp_path / "a.png").size
    assert 0.4 < plain < 0.9
    draw(shown, [], tmp_path / "a.html", title="")
    assert 'fill="url(#hatch)"' in (tmp_path / "a.html").read_text()


@pytest.mark.parametrize("capacity", [200, 700, 701])
def test_the_capacity_is_a_line_if_it_is_near(tmp_path, capacity):
    draw(timeline(), [], tmp_path / "a.png", title="nano", capacity_bytes=capacity * MIB)
    red = plot_pixels(tmp_path / "a.png") >> 16
    green = plot_pixels(tmp_path / "a.png") >> 8 & 255
    is_line = ((red > 150) & (green < 80)).mean(axis=1) > 0.9
    assert is_line.any() == (capacity <= 2 * 350)
    draw(timeline(), [], tmp_path / "a.html", title="nano", capacity_bytes=capacity * MIB)
    share = f"the peak is {350 / capacity:.1%} of the card's {capacity}.0 MiB"
    assert any(share in text for text in Page((tmp_path / "a.html").read_text()).texts)


def test_a_peak_narrower_than_a_pixel_is_seen(tmp_path):
    num, at = 10_000, 7_777
    shown = Timeline(
        bytes_by_kind={
            "parameters": series(num, (0, num, 10)),
            "collectives": series(num, (at, at + 1, 90)),
        },
        labels=("x",) * num,
        peak=at,
        loops=(),
    )
    draw(shown, [], tmp_path / "a.png", title="nano")
    assert pixels_of(tmp_path / "a.png", "collectives") == pytest.approx(0.9 / 1.06 * 524, abs=15)


def test_html_holds_every_byte(tmp_path):
    rng = random.Random(0)
    num = 3000
    shown = Timeline(
        bytes_by_kind={
            k: tuple(rng.choice((0, 0, 3, 2**40 + 1)) for _ in range(num)) for k in KINDS
        },
        labels=tuple(f"fusion.{i}" for i in range(num)),
        peak=17,
        loops=(Loop(start=3, end=90, trips=16, name="forward"),),
    )
    draw(shown, [], str(tmp_path / "a.HTML"), title="nano")
    data = data_of((tmp_path / "a.HTML").read_text())
    assert {kind: unpacked(runs) for kind, runs in data["runs"].items()} == shown.bytes_by_kind
    assert list(data["runs"]) == list(KINDS)
    assert tuple(data["labels"]) == shown.labels
    assert data["peak"] == 17
    assert data["loops"] == [{"start": 3, "end": 90, "trips": 16, "name": "forward"}]
    assert data["colours"] == scene.COLOURS


def test_html_stays_small(tmp_path):
    rng = random.Random(0)
    num = 10_000
    shown = Timeline(
        bytes_by_kind={k: tuple(rng.randrange(2**36) for _ in range(num)) for k in KINDS},
        labels=tuple(f"loop_convert_fusion.{i} (attention.py:120)" for i in range(num)),
        peak=0,
        loops=(),
    )
    draw(shown, [], tmp_path / "a.html", title="nano")
    assert (tmp_path / "a.html").stat().st_size < 4 * 1024**2


def test_html_lists_the_largest_lines(tmp_path):
    lines = [line(f"w{i}", (i + 1) * MIB, source=f"mlp.py:{i}") for i in range(TABLE_LINES + 2)]
    draw(
        timeline(),
        [*lines, line("gap", 99 * MIB, dtype="", kind="unused")],
        tmp_path / "a.html",
        title="",
    )
    text = "|".join(Page((tmp_path / "a.html").read_text()).texts)
    assert "|unused|gap|99.0 MiB|" in text
    assert "|parameters|w51|bf16[4,8]|52.0 MiB|mlp.py:51|" in text
    assert text.index("gap") < text.index("|w51|") < text.index("|w50|")
    assert "|w3|" in text
    assert "|w2|" not in text
    assert "|3 more|6.0 MiB|" in text


def test_hostile_names_stay_text(tmp_path):
    shown = replace(
        timeline(),
        labels=(HOSTILE,) * 40,
        loops=(Loop(start=0, end=30, trips=None, name=HOSTILE),),
    )
    lines = [line(HOSTILE, dtype=HOSTILE, source=HOSTILE)]
    draw(timeline(), [line()], tmp_path / "plain.html", title="nano")
    draw(shown, lines, tmp_path / "a.html", title=HOSTILE)
    draw(shown, lines, tmp_path / "a.png", title=HOSTILE)
    page = (tmp_path / "a.html").read_text()
    assert Page(page).tags.count("script") == 2
    data = data_of(page)
    for text in (data["labels"][0], data["loops"][0]["name"]):
        assert text.startswith("</script><script>alert('1')</script><!--DATA-->&amp; $x_$ ")
        assert text.isprintable()
    assert "alert" not in "".join(re.findall(r"<script>.*?</script>", page, re.S))
    assert set(Page(page).tags) == set(Page((tmp_path / "plain.html").read_text()).tags)


def test_html_needs_nothing_else(tmp_path):
    draw(timeline(), [line()], tmp_path / "a.html", title="nano")
    page = (tmp_path / "a.html").read_text()
    assert not re.search(r"https?:|@import|url\((?!#)|\bimport\b|fetch\(", page)
    assert not {name for name, _ in Page(page).attributes} & {"src", "href", "xlink:href"}
    assert "default-src 'none'" in page


def box(text: scene.Text) -> tuple[float, float, float, float]:
    """Its left, right, top and bottom."""
    width = len(text.text) * text.size * scene.GLYPH
    left = text.x - width * {"start": 0, "middle": 0.5, "end": 1}[text.anchor]
    return left, left + width, text.y - 0.8 * text.size, text.y + 0.2 * text.size


def overlapping(texts: list[scene.Text]) -> list[tuple[str, str]]:
    """Pairs of texts whose boxes meet."""

    def meet(a: scene.Text, b: scene.Text) -> bool:
        (left, right, top, bottom), (low, high, upper, lower) = box(a), box(b)
        return left < high and low < right and top < lower and upper < bottom

    return [(a.text, b.text) for a, b in combinations(texts, 2) if meet(a, b)]


@pytest.mark.parametrize("peak", [0, 300, 599])
def test_no_label_lies_over_another(peak):
    spans = [(0, 200), (5, 9), (60, 70), (72, 74), (210, 212), (214, 300), (320, 599), (590, 599)]
    loops = [Loop(start=a, end=b, trips=16, name="forward attention") for a, b in spans]
    shown = Timeline(
        bytes_by_kind={k: tuple((i + 424) * MIB for i in range(600)) for k in KINDS},
        labels=("loop_convert_fusion (model.py:1234)",) * 600,
        peak=peak,
        loops=tuple(loops),
    )
    shapes, frame = scene.scene(shown, "llama3.2-1b, fsdp=2,tensor=2, H100 " * 9, 9 * 1024**3)
    texts = [shape for shape in shapes if isinstance(shape, scene.Text)]
    assert not overlapping(texts)
    assert all(box(text)[0] > 0 and box(text)[1] < scene.WIDTH for text in texts)
    assert sum(text.text == "×16 forward attention" for text in texts) == len(loops)
    assert frame.bottom - scene.TOP > 300


def test_more_loops_than_there_is_room_for_are_counted():
    loops = tuple(Loop(start=i, end=39 - i, trips=2, name="x") for i in range(7))
    shapes, _ = scene.scene(replace(timeline(), loops=loops), "nano", None)
    texts = [shape.text for shape in shapes if isinstance(shape, scene.Text)]
    assert texts.count("×2 x") == scene.MAX_LANES
    assert any("3 loops shaded without a name" in text for text in texts)
    assert sum(isinstance(s, scene.Area) and s.fill == scene.BAND for s in shapes) == 7


def test_colours_differ_without_colour():
    def lightness(colour: str) -> float:
        values = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
        linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
        return 116 * np.cbrt(linear @ [0.2126, 0.7152, 0.0722]) - 16

    assert tuple(scene.COLOURS) == KINDS
    levels = [lightness(scene.COLOURS[kind]) for kind in KINDS]
    assert min(b - a for a, b in pairwise(sorted(levels))) > 5.9
    assert min(abs(b - a) for a, b in pairwise(levels)) > 19


@pytest.mark.parametrize("ends", [0, 1, 10, 1e-3, 0.75, 7.3, 1060, 99_999])
def test_ticks_are_few_and_round(ends):
    ticks = scene._ticks(ends or 1e-6, 6)
    assert 2 <= len(ticks) <= 7
    assert ticks[0] == 0
    assert ticks[-1] <= (ends or 1e-6)


# A page with no browser: the script's own names must not clash with a window's.
STUB = """
const vm = require("vm"), fs = require("fs");
const page = fs.readFileSync(process.argv[1], "utf8");
const scripts = [...page.matchAll(/<script[^>]*>([^]*?)<\\/script>/g)].map((m) => m[1]);
class Element {
  constructor(text) { Object.assign(this, { own: text || "", style: {}, on: {}, children: [] }); }
  get textContent() { return [this.own, ...this.children.map((c) => c.textContent)].join("|"); }
  set textContent(text) { this.own = text; }
  append(...all) { this.children.push(...all); }
  prepend(...all) { this.children.unshift(...all); }
  replaceChildren(...all) { this.children = all; }
  setAttribute(name, value) { this[name] = value; }
  addEventListener(name, act) { this.on[name] = act; }
  getBoundingClientRect() { return { left: 10, top: 0, width: 700, height: 350 }; }
}
const all = { data: new Element(scripts[0]) };
const get = (name) => (all[name] ||= new Element());
const document = { getElementById: get, querySelector: get, createElement: () => new Element() };
const window = { document, innerWidth: 700, innerHeight: 400 };
window.window = window;
vm.runInContext("var window, document, top, location", vm.createContext(window));
vm.runInContext(scripts[1], window);
for (const x of JSON.parse(process.argv[2])) {
  get("svg").on.pointermove({ clientX: 10 + x / 2 });
  console.log(get("tip").textContent + "|" + get("down").d);
}
get("svg").on.keydown({ key: "ArrowLeft", preventDefault() {} });
console.log(get("tip").textContent);
get("svg").on.pointerleave();
console.log(get("tip").style.display);
"""


@pytest.mark.skipif(not shutil.which("node"), reason="there is no node to run the script")
def test_the_pointer_reads_the_data(tmp_path):
    shown = replace(timeline(), loops=(Loop(start=10, end=29, trips=16, name="forward"),))
    draw(shown, [], tmp_path / "a.html", title="nano")
    width = scene.RIGHT - scene.LEFT
    places = [scene.LEFT + 29.5 / 40 * width, scene.LEFT + 30.5 / 40 * width, 0, 1399]
    command = ["node", "-e", STUB, str(tmp_path / "a.html"), json.dumps(places)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    inside, after, first, last, left, display = done.stdout.splitlines()
    assert "fusion.29 (model.py:29)|position 29 of 40 · ×16 forward|" in inside
    assert "|all|300.0 MiB|314,572,800 bytes|" in inside
    assert "|activations||200.0 MiB|209,715,200 bytes|" in inside
    assert "workspace" not in inside
    cross = re.search(rf"\|M([\d.]+) {scene.TOP}V584$", inside)
    assert cross
    assert float(cross[1]) == pytest.approx(places[0])
    assert "position 30 of 40|" in after
    assert "activations" not in after
    assert "position 0 of 40|" in first
    assert "position 39 of 40|" in last
    assert "position 38 of 40|" in left
    assert display == "none"


@pytest.mark.parametrize("name", ["a.svg", "a", "png", "a.png.txt"])
def test_other_suffixes_are_refused(tmp_path, name):
    with pytest.raises(ConfigError, match=r"must end in \.png or \.html\.$"):
        draw(timeline(), [], tmp_path / name, title="nano")


@pytest.mark.parametrize("suffix", ["png", "html"])
def test_places_that_cannot_be_written_are_refused(tmp_path, suffix):
    (tmp_path / "file").write_text("")
    (tmp_path / f"folder.{suffix}").mkdir()
    for place in ("missing/a", "file/a", "folder"):
        with pytest.raises(ConfigError, match=r"^picture .* cannot be written: [A-Z][\w ]+\.$"):
            draw(timeline(), [], tmp_path / f"{place}.{suffix}", title="nano")


def test_without_matplotlib_only_html_is_drawn(tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'tpjax\[plan\]'"):
        draw(timeline(), [], tmp_path / "a.png", title="nano")
    draw(timeline(), [], tmp_path / "a.html", title="nano")
    assert not (tmp_path / "a.png").exists()
