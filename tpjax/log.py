"""Where a run's figures go: its folder, metrics.jsonl, TensorBoard events, the screen."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tensorboardX import SummaryWriter

from tpjax.config import ConfigError, TrainConfig
from tpjax.memory.live import LiveMemory, RunMemory
from tpjax.memory.records import gib

LINES_PER_RUN = 10  # progress lines kept on the screen, beside the moving bar


def free_folder(config: TrainConfig) -> Path:
    """The folder for the run, not made yet."""
    out = Path(config.out or f"runs/{config.model.name}-{time.strftime('%Y%m%d-%H%M%S')}")
    if (out / "metrics.jsonl").exists():
        raise ConfigError(f"out {out} holds a run already; name another folder.")
    there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        raise ConfigError(f"out {out} cannot be written: {there} is no folder to write to.")
    return out


def open_folder(out: Path, config: TrainConfig) -> None:
    """Makes the run's folder, with its configuration in it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "config.json").write_text(json.dumps(dataclasses.asdict(config), indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"out {out} cannot be written: {error.strerror}.") from error


class RunLog:
    """A context that takes each step's and each evaluation's figures as they come."""

    def __init__(self, folder: Path, steps: int):
        self._file = (folder / "metrics.jsonl").open("a", buffering=1, encoding="utf-8")
        self._events = SummaryWriter(str(folder))
        self._steps = steps
        self._last = time.perf_counter()
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=Console(),
            transient=True,
        )
        self._task = self._progress.add_task("", total=steps)

    def __enter__(self) -> RunLog:
        self._progress.start()
        self._last = time.perf_counter()
        return self

    def __exit__(self, *_) -> None:
        self._progress.stop()
        self._events.close()
        self._file.close()

    def prediction(self, memory: RunMemory) -> None:
        """What the compiler says of the run's memory, before it starts."""
        there = "" if memory.capacity_bytes is None else f" of {gib(memory.capacity_bytes)}"
        host = memory.offloaded_bytes
        rest = memory.compiled_peak_bytes + host - memory.parameters_bytes - memory.moments_bytes
        self._progress.console.print(
            f"memory per device: {gib(memory.compiled_peak_bytes)}{there} at the peak = "
            f"parameters {gib(memory.parameters_bytes)} + moments {gib(memory.moments_bytes)} "
            f"+ the step's own {gib(rest)}"
            + (f"; {gib(host)} of them in the host's memory" if host else ""),
            highlight=False,
        )
        if memory.pool is not None:
            self._progress.console.print(f"pool: {memory.pool}", highlight=False)

    def step(self, step: int, metrics: dict, live: LiveMemory) -> float:
        """One training step's scalars; waits for the device to have them. Returns the loss."""
        values = {name: float(value) for name, value in metrics.items()}
        tokens = int(values.pop("tokens"))
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        line = {"step": step, **values, "tokens": tokens, "step_ms": seconds * 1000}
        line |= {"tokens_per_s": tokens / seconds, **live.metrics()}
        self._write(line)
        text = f"loss {values['loss']:.3f}  {tokens / seconds:,.0f} tokens/s"
        if live.peak_bytes is not None:
            text += f"  peak {gib(live.peak_bytes)}"
        self._progress.update(self._task, completed=step, description=text)
        if step == 1 or step % max(self._steps // LINES_PER_RUN, 1) == 0:
            self._progress.console.print(f"step {step:>5}  {text}", highlight=False)
        return values["loss"]

    def evaluation(self, step: int, loss: float) -> None:
        """The mean loss over the held-out text after `step` steps."""
        self._write({"step": step, "eval_loss": loss})
        self._progress.console.print(f"step {step:>5}  validation loss {loss:.4f}", highlight=False)
        self._last = time.perf_counter()  # the next step's time is without the evaluation

    def _write(self, line: dict) -> None:
        numbers = {n: v for n, v in line.items() if isinstance(v, int | float)}
        unknown = {n: None for n, v in numbers.items() if not math.isfinite(v)}  # NaN is no JSON
        self._file.write(json.dumps(line | unknown) + "\n")
        for name, value in numbers.items():
            if name != "step" and name not in unknown:
                self._events.add_scalar(name, value, line["step"])
