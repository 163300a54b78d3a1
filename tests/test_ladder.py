"""The ladder: its rungs by hand, each below the one before, and what is written of it."""

from __future__ import annotations

import dataclasses
import json
import sys
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import jax
import pytest
from test_collectives import MODEL, run

from experiments import ladder as program
from tpjax.config import ConfigError, MemoryConfig, MeshConfig
from tpjax.flops import step_flops
from tpjax.memory import ladder
from tpjax.memory.chart import COLUMNS, cells, draw_ladder, markdown, notes
from tpjax.memory.compiled import absent_devices, compile_step, peak_bytes
from tpjax.memory.ladder import Figures, Row, climb, rungs
from tpjax.memory.needs import needed
from tpjax.memory.policies import kept_bytes
from tpjax.mesh import make_mesh
from tpjax.resolve import resolve

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
TITLE = "small, 8 × 512 tokens, tensor=4 × h100"

NONE = {
    "params": "fp32",
    "moments": "fp32",
    "compute": "fp32",
    "tie_embeddings": False,
    "embedding": "replicated",
    "loss_chunks": 1,
    "attention": "materialised",
    "remat": "none",
    "donate": False,
    "init": "eager",
}
SHARING = {"tie_embeddings": None, "embedding": "sharded", "init": "lazy"}
CHECKPOINTING = {"remat": "full"}
QUANTISATION = {"params": "bf16", "compute": "bf16", "moments": "int8"}
POOLING = {"donate": True}
EVERYTHING = {"update": "layerwise", "attention": "auto", "loss_chunks": 0}
LEANEST = {"params": "int8", "moments": "factored", "remat": "nested"}
OFFLOAD = {"offload": "residuals,moments"}
LECTURE = SHARING | CHECKPOINTING | QUANTISATION | POOLING

CUMULATIVE = {
    "none": NONE,
    "sharing + lazy loading": NONE | SHARING,
    "gradient checkpointing": NONE | SHARING | CHECKPOINTING,
    "quantisation + mixed precision": NONE | SHARING | CHECKPOINTING | QUANTISATION,
    "pooling + preallocation": NONE | LECTURE,
    "everything": NONE | LECTURE | EVERYTHING,
    "leanest": NONE | LECTURE | EVERYTHING | LEANEST,
    "everything, offloaded": NONE | LECTURE | EVERYTHING | OFFLOAD,
    "leanest, offloaded": NONE | LECTURE | EVERYTHING | LEANEST | OFFLOAD,
}
ALONE = {
    "sharing + lazy loading": NONE | SHARING,
    "gradient checkpointing": NONE | CHECKPOINTING,
    "quantisation + mixed precision": NONE | QUANTISATION,
    "pooling + preallocation": NONE | POOLING,
}


@pytest.mark.parametrize(("alone", "expected"), [(False, CUMULATIVE), (True, ALONE)])
def test_each_rung_changes_what_it_says_and_nothing_else(alone, expected):
    found = {rung.name: rung.memory for rung in rungs() if rung.alone == alone}
    assert found == {name: MemoryConfig(**settings) for name, settings in expected.items()}
    assert list(found) == list(expected)


def test_none_leaves_nothing_on_that_a_rung_could_bring():
    """Whatever a rung sets, none has it otherwise."""
    for changes in (SHARING, CHECKPOINTING, QUANTISATION, POOLING, EVERYTHING, LEANEST, OFFLOAD):
        for name, value in changes.items():
            assert getattr(ladder.NONE, name) != value


def test_the_lecture_is_quoted_as_it_is():
    quoted = {r.name: (r.lecture_gb, r.lecture_seconds) for r in rungs() if not r.alone}
    assert list(quoted.values())[:5] == [(120, 600), (90, 580), (70, 700), (60, 550), (50, 500)]
    assert set(list(quoted.values())[5:]) == {(None, None)}
    assert all(r.lecture_gb is None and r.lecture_seconds is None for r in rungs() if r.alone)


@lru_cache
def peak(memory: MemoryConfig) -> int:
    config = dataclasses.replace(run("tensor=4"), memory=memory)
    config = resolve(config, num_devices=4, platform="gpu")
    mesh = make_mesh(MeshConfig(tensor=4), MODEL, absent_devices("h100", 4))
    return peak_bytes(compile_step(config, mesh))


def test_each_rung_is_below_the_one_before():
    """Down to everything. In a model this small a matmul's workspace decides below that, not
    the state; the saved tables go down to the last rung."""
    last = list(CUMULATIVE).index("everything")
    peaks = [peak(rung.memory) for rung in rungs()[: last + 1]]
    assert len(peaks) == 6
    assert all(below < above for above, below in pairwise(peaks)), peaks


def test_each_rung_alone_is_below_none():
    """Sharing is the first rung of the test before; quantisation, slow to compile, is in the
    saved tables."""
    for rung in rungs():
        if rung.alone and rung.name in ("gradient checkpointing", "pooling + preallocation"):
            assert peak(rung.memory) < peak(ladder.NONE), rung.name


def test_figures_are_the_compilers_and_the_counts_own():
    rung = next(r for r in rungs() if r.name == "sharing + lazy loading")
    (row,) = climb(run("tensor=4"), "h100", [rung])
    found = row.figures
    assert found is not None
    config = dataclasses.replace(run("tensor=4"), memory=rung.memory)
    config = resolve(config, num_devices=4, platform="gpu")
    assert found.peak_bytes == peak(rung.memory) == sum(found.bytes_by_kind.values())
    assert found.total_gb == 4 * found.peak_bytes / 1e9
    assert found.flops == step_flops(config)
    # Gathers and scatters in float32, of which each device has a quarter already.
    wire_bytes = sum(need.count * need.elements * 4 * 3 / 4 for need in needed(config))
    assert found.wire_bytes == pytest.approx(wire_bytes, rel=0.01)
    state_bytes = 12 * MODEL.num_parameters / 4
    assert state_bytes < found.init_peak_bytes < 3 * state_bytes
    assert (found.host_bytes, found.fits) == (0, True)
    # State and what is kept, the scores above all, go out to the H100's memory and in again;
    # no more than the compiler leaves beside the state, old and new.
    moved_bytes = 2 * (state_bytes + min(kept_bytes(config), found.peak_bytes - 2 * state_bytes))
    assert found.roofline_seconds == pytest.approx(moved_bytes / 3.35232e12, rel=0.01)


def figures(number: int, **changes) -> Figures:
    return Figures(
        **{
            "num_devices": 4,
            "peak_bytes": 10**9 * (20 - number),
            "host_bytes": 0,
            "init_peak_bytes": 2**30,
            "flops": 1.5e12 * number,
            "wire_bytes": 2**20 * number,
            "roofline_seconds": 0.0123,
            "fits": True,
            "bytes_by_kind": {},
        }
        | changes
    )


@pytest.fixture
def compilations(monkeypatch) -> list:
    """The settings that a ladder compiles, none of which really is."""
    compiled = []

    def fake(config, gpu, devices) -> Figures:
        compiled.append((config, gpu, len(devices)))
        return figures(len(compiled))

    monkeypatch.setattr(ladder, "_figures", fake)
    return compiled


def test_equal_settings_are_compiled_once(compilations):
    rows = list(climb(run("tensor=4"), "h200"))
    assert [row.rung for row in rows] == rungs()
    assert len(compilations) == len(set(compilations)) == len(rows) - 1
    assert {rest for _, *rest in map(tuple, compilations) for rest in [tuple(rest)]} == {
        ("h200", 4)
    }
    once = [row.figures for row in rows if row.rung.name == "sharing + lazy loading"]
    assert len(once) == 2
    assert once[0] is once[1]


def test_a_rung_that_does_not_go_with_the_model_is_shown_with_the_reason(compilations):
    model = dataclasses.replace(MODEL, num_layers=3)
    rows = list(climb(run("tensor=4", model=model), "h100"))
    assert [row.rung for row in rows] == rungs()
    missing = {row.rung.name: row.reason for row in rows if row.figures is None}
    assert missing.keys() == {"leanest", "leanest, offloaded"}
    for reason in missing.values():
        assert reason.startswith("remat=nested cannot split the 3 layers")
    said = markdown(rows, TITLE)
    for name, reason in missing.items():
        assert f"- {name}: {reason}" in said
        assert f"| {name} | – |" in said


def test_a_rung_that_cannot_be_compiled_is_shown_with_the_reason(monkeypatch):
    def fail(config, gpu, devices):
        if config.memory.params == "bf16":
            raise jax.errors.JaxRuntimeError("INTERNAL: no\n such   kernel")
        return figures(1)

    monkeypatch.setattr(ladder, "_figures", fail)
    rows = list(climb(run("tensor=4"), "h100"))
    assert [row.rung for row in rows] == rungs()
    for row in rows:
        failed = row.rung.memory.params == "bf16"
        assert (row.figures is None) == failed
        assert row.reason == ("XLA cannot compile it: INTERNAL: no such kernel" if failed else None)


def test_a_run_that_goes_with_no_rung_is_refused_at_once(compilations):
    with pytest.raises(ConfigError, match="tensor=3 does not split"):
        climb(run("tensor=3"), "h100")
    with pytest.raises(ConfigError, match="gpu 'h10' is unknown"):
        climb(run("tensor=4"), "h10")
    assert not compilations


ROWS = [
    Row(rung=rung, figures=figures(number, host_bytes=10**9 * ("offload" in rung.name)))
    for number, rung in enumerate(rungs())
]


def test_cells_say_what_the_figures_are():
    first, last = Row(rung=rungs()[0], figures=figures(0, fits=False, flops=1.5e15)), ROWS[7]
    assert dict(zip(COLUMNS, cells(first), strict=True)) == {
        "rung": "none",
        "total GB": "80.00",
        "lecture's GB": "120",
        "peak GiB": "18.6 ✗",
        "host GiB": "0",
        "GiB at init": "1",
        "TFLOP per step": "1,500",
        "GiB sent per step": "0",
        "s per step, at least": "0.0123",
        "lecture's s per epoch": "600",
    }
    assert cells(last) == ["everything, offloaded", "52.00", "–", "12.1", "0.931", "1", "10.5",
                           "0.00684", "0.0123", "–"]  # fmt: skip


def test_unknown_rates_are_no_figure():
    row = Row(rung=rungs()[0], figures=figures(0, roofline_seconds=None))
    assert cells(row)[COLUMNS.index("s per step, at least")] == "–"


def test_markdown_has_every_row_once():
    lines = markdown(ROWS, TITLE).splitlines()
    assert lines[0] == f"# {TITLE}"
    table = [line for line in lines if line.startswith("| ") and "total GB" not in line]
    expected = ["| " + " | ".join(cells(row)) + " |" for row in ROWS]
    assert [line for line in table if "---" not in line] == expected
    assert all(f"- {note}" in lines for note in notes(ROWS))
    assert "- pooling + preallocation: `donate=True`" in lines


def test_bars_are_as_long_as_the_rows_say(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    draw_ladder(ROWS, TITLE, tmp_path / "a.png")
    pixels = (image.imread(tmp_path / "a.png")[..., :3] * 255).round().astype(int)
    totals = [row.figures.total_gb for row in ROWS if not row.rung.alone]
    compiled, lecture = bars(pixels, "#00386b"), bars(pixels, "#898989")
    assert len(compiled) == len(totals) == 9
    scale = compiled[0] / totals[0]
    assert compiled == pytest.approx([scale * total for total in totals], abs=2)
    assert lecture == pytest.approx([scale * gb for gb in (120, 90, 70, 60, 50)], abs=2)


def bars(pixels, colour: str) -> list[int]:
    """Lengths of the bars of a colour, from above, in pixels; the legend's patch is left out."""
    drawn = (pixels == [int(colour[i : i + 2], 16) for i in (1, 3, 5)]).all(-1)
    start = int((drawn.sum(0) > 50).argmax())  # where all bars begin, which letters are not
    found, before = [], False
    for line in drawn:
        if line[start] and not before:
            found.append(0)
        if line[start]:
            found[-1] = max(found[-1], int((~line[start:]).argmax()))
        before = bool(line[start])
    return found


def test_a_rung_without_figures_is_drawn_as_its_reason(tmp_path):
    rows = [ROWS[0], Row(rung=ROWS[1].rung, figures=None, reason="there is $no$ such thing")]
    draw_ladder(rows, TITLE, tmp_path / "with.png")
    rows[1] = dataclasses.replace(rows[1], reason="")
    draw_ladder(rows, TITLE, tmp_path / "without.png")
    assert (tmp_path / "with.png").read_bytes() != (tmp_path / "without.png").read_bytes()


def main(monkeypatch, *flags: str) -> None:
    monkeypatch.setattr(sys, "argv", ["ladder", *flags])
    program.main()


def test_files_hold_what_is_printed(tmp_path, monkeypatch, capsys, compilations):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    main(monkeypatch, "--model=nano", "--mesh=fsdp=2,tensor=2", "--gpu=h200", "--batch-size=2",
         "--seq-len=128", "--json=a.json", "--markdown=a.md", "--chart=a.png")  # fmt: skip
    printed = capsys.readouterr().out
    config, gpu, num_devices = compilations[0]
    assert (config.model.name, str(config.mesh), gpu, num_devices) == (
        "nano", "fsdp=2,tensor=2", "h200", 4)  # fmt: skip
    assert (config.data.batch_size, config.data.seq_len) == (2, 128)
    title = "nano, 2 × 128 tokens, fsdp=2,tensor=2 × h200"
    saved = json.loads((tmp_path / "a.json").read_text())
    assert saved["title"] == title
    assert [row["name"] for row in saved["rows"]] == [rung.name for rung in rungs()]
    for number, (row, rung) in enumerate(zip(saved["rows"], rungs(), strict=True), start=1):
        assert row["settings"] == dataclasses.asdict(rung.memory)
        assert row["alone"] == rung.alone
        name = f"{rung.name} alone" if rung.alone else rung.name
        assert f"{number}/13 {name}: {row['total_gb']:.2f}\n" in printed
        assert row["total_gb"] == 4 * row["figures"]["peak_bytes"] / 1e9
        assert (row["lecture_gb"], row["reason"]) == (rung.lecture_gb, None)
    assert (tmp_path / "a.md").read_text().startswith(f"# {title}\n")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert f"{title}: memory" in printed
    assert f"{title}: costs" in printed
    assert printed.count("alone: pooling + preallocation") == 2


def test_by_default_it_is_the_lectures_case(monkeypatch, capsys, compilations):
    main(monkeypatch)
    config, gpu, _ = compilations[0]
    assert (config.model.name, str(config.mesh), gpu) == ("llama3.2-1b", "tensor=4", "h100")
    assert (config.data.batch_size, config.data.seq_len) == (4, 1024)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--gpu=h10",), "gpu 'h10' is unknown. Did you mean h100"),
        (("--batchsize=8",), "there is no flag --batchsize. Did you mean --batch-size"),
        (("--remat=full",), "there is no flag --remat."),
        (("--model=llama",), "model 'llama' is not a preset or a path. Did you mean llama3.2-1b"),
        (("--mesh=tensor=3",), "tensor=3 does not split llama3.2-1b"),
        (("--mesh=tenser=4",), "mesh axis 'tenser' is unknown. Did you mean tensor"),
        (("--mesh=data=4", "--batch-size=2"), "batch_size=2 does not split"),
        (("--batch-size=0",), "batch_size=0"),
        (("--seq-len=1023",), "seq_len=1023 does not split over tensor=4"),
        (("--chart=a.pdf",), "chart=a.pdf must end in .png"),
        (("--json=nowhere/a.json",), "nowhere/a.json cannot be written: there is no folder"),
        (("--markdown=/",), "/ cannot be written: it is a folder"),
    ],
)
def test_wrong_input_ends_in_one_line(flags, said, monkeypatch, capsys, compilations):
    with pytest.raises(SystemExit) as stopped:
        main(monkeypatch, *flags)
    found = capsys.readouterr()
    assert stopped.value.code == 2
    assert found.out == ""
    assert found.err.startswith("error: ")
    assert said in found.err
    assert found.err.count("\n") == 1
    assert not compilations


SAVED = ("ladder", "ladder_8x2048")


@pytest.mark.parametrize("name", SAVED)
def test_the_saved_table_goes_down_at_every_rung(name):
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    assert [row["settings"] for row in rows] == [dataclasses.asdict(r.memory) for r in rungs()]
    total = {row["name"]: row["total_gb"] for row in rows if not row["alone"]}
    assert all(below < above for above, below in pairwise(total.values())), total
    assert all(row["total_gb"] < total["none"] for row in rows if row["alone"])
    assert total["everything"] <= 8
    assert total["everything, offloaded"] <= 5
    found = [row["figures"] for row in rows if not row["alone"]]
    assert all(figures["init_peak_bytes"] < figures["peak_bytes"] for figures in found)
    words = (RESULTS / f"{name}.md").read_text()
    assert all(f"| {row['name']} | {row['total_gb']:.2f} |" in words for row in rows)
    assert (RESULTS / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_readme_has_these_figures():
    tables = [json.loads((RESULTS / f"{name}.json").read_text()) for name in SAVED]
    totals = [[r["total_gb"] for r in t["rows"] if not r["alone"]] for t in tables]
    lines = (RESULTS.parents[1] / "README.md").read_text().split("each with those before it")[1]
    cells = [
        [cell.split()[0] for cell in line.split("|")[3:5]] for line in lines.splitlines()[2:11]
    ]
    assert cells == [[f"{total:.1f}" for total in pair] for pair in zip(*totals, strict=True)]


def test_the_lectures_case_starts_near_its_figure():
    rows = json.loads((RESULTS / "ladder.json").read_text())["rows"]
    assert rows[0]["total_gb"] == pytest.approx(rows[0]["lecture_gb"], rel=0.05)
