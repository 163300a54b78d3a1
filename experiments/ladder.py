"""Rebuilds the lecture's table of memory techniques with compiled figures, and goes below it.

    python -m experiments.ladder
    python -m experiments.ladder --batch-size 8 --seq-len 2048 --json a.json --chart a.png

No GPU is needed. The lecture names no batch: the default is one for which the first rung, with no
technique at all, comes near its 120 GB. Each rung takes up to a minute.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from experiments import screen
from experiments.flags import check_writable, fail, parse
from tpjax.config import ConfigError, DataConfig, MeshConfig, ModelConfig, TrainConfig, require
from tpjax.memory.chart import cells, draw_ladder, markdown
from tpjax.memory.ladder import climb, rungs
from tpjax.presets import preset


@dataclass(frozen=True, kw_only=True)
class Ladder:
    """What is compiled, and where the table goes."""

    model: ModelConfig = field(default_factory=lambda: preset("llama3.2-1b"))
    """A preset's name."""
    gpu: str = "h100"
    """Kind of GPU."""
    mesh: MeshConfig = field(default_factory=lambda: MeshConfig(tensor=4))
    """GPUs per axis, such as fsdp=2,tensor=4."""
    batch_size: int = 4
    """Sequences per step, over all GPUs."""
    seq_len: int = 1024
    """Tokens per sequence."""
    json: str = ""
    """File for all figures and settings."""
    markdown: str = ""
    """File for the table."""
    chart: str = ""
    """File for a bar chart, .png."""

    def __post_init__(self) -> None:
        require(
            not self.chart or Path(self.chart).suffix == ".png",
            f"chart={self.chart} must end in .png.",
        )
        check_writable(self.json, self.markdown, self.chart)


def main() -> None:
    try:
        _make(parse(Ladder, lambda run: Ladder(), __doc__ or "", None))
    except ConfigError as error:
        fail(str(error))


def _make(ladder: Ladder) -> None:
    """Compiles, prints, and writes what was asked for."""
    data = DataConfig(batch_size=ladder.batch_size, seq_len=ladder.seq_len)
    run = TrainConfig(model=ladder.model, mesh=ladder.mesh, data=data)
    workload = f"{data.batch_size} × {data.seq_len} tokens"
    title = f"{run.model.name}, {workload}, {run.mesh} × {ladder.gpu}"
    console, rows, steps = Console(), [], rungs()
    for number, row in enumerate(climb(run, ladder.gpu, steps), start=1):
        alone = " alone" if row.rung.alone else ""
        total = row.reason or cells(row)[1]
        console.print(f"{number}/{len(steps)} {row.rung.name}{alone}: {total}", markup=False)
        rows.append(row)
    console.print(screen.ladder(rows, title))
    if ladder.json:
        found = {"title": title, "rows": [row.as_json() for row in rows]}
        Path(ladder.json).write_text(json.dumps(found, indent=1) + "\n")
    if ladder.markdown:
        Path(ladder.markdown).write_text(markdown(rows, title))
    if ladder.chart:
        draw_ladder(rows, title, ladder.chart)


if __name__ == "__main__":
    main()
