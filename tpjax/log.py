"""Where a run's figures go: metrics.jsonl, TensorBoard events, the screen."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tensorboardX import SummaryWriter

from tpjax.folder import METRICS
from tpjax.memory.live import LiveMemory, RunMemory
from tpjax.memory.records import gib

LINES_PER_RUN = 10  # progress lines kept on the screen, beside the moving bar


class RunLog:
    """A context that takes each step's and each evaluation's figures as they come."""

    def __init__(self, folder: Path, steps: int, done: int = 0):
        """
        Args:
            steps: of the whole run.
            done: how many of them are in the folder already.
        """
        self._file = (folder / METRICS).open("a", buffering=1, encoding="utf-8")
        # A TensorBoard that has read more of an interrupted run forgets it.
        self._events = SummaryWriter(
            str(folder), purge_step=done + 1 if done else None, filename_suffix=f".{done}"
        )
        self._steps, self._first = steps, done + 1
        self._last = time.perf_counter()
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=24),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
            console=Console(),
            transient=True,
        )
        self._task = self._progress.add_task("", total=steps, completed=done)

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

    def say(self, line: str) -> None:
        """One line on the screen."""
        self._progress.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def flush(self) -> None:
        """Hands everything to the operating system, so that a crash of this process leaves it."""
        self._file.flush()
        self._events.flush()

    def step(self, step: int, values: dict[str, float], live: LiveMemory) -> None:
        """One training step's scalars."""
        values = dict(values)
        tokens = int(values.pop("tokens"))
        now = time.perf_counter()
        seconds, self._last = now - self._last, now
        line = {"step": step, **values, "tokens": tokens, "step_ms": seconds * 1000}
        line |= {"tokens_per_s": tokens / seconds, **live.metrics()}
        self.write(line)
        text = f"loss {values['loss']:.3f}  {tokens / seconds:,.0f} tokens/s"
        if live.peak_bytes is not None:
            text += f"  peak {gib(live.peak_bytes)}"
        self._progress.update(self._task, completed=step, description=text)
        if step == self._first or step % max(self._steps // LINES_PER_RUN, 1) == 0:
            self._progress.console.print(f"step {step:>5}  {text}", highlight=False)

    def evaluation(self, step: int, loss: float) -> None:
        """The mean loss over the held-out text after `step` steps."""
        self.write({"step": step, "eval_loss": loss})
        self._progress.console.print(f"step {step:>5}  validation loss {loss:.4f}", highlight=False)
        self._last = time.perf_counter()  # the next step's time is without the evaluation

    def write(self, line: dict) -> None:
        """A line of metrics.jsonl, its numbers for TensorBoard too."""
        numbers = {n: v for n, v in line.items() if isinstance(v, int | float)}
        unknown = {n: None for n, v in numbers.items() if not math.isfinite(v)}  # NaN is no JSON
        self._file.write(json.dumps(line | unknown) + "\n")
        for name, value in numbers.items():
            if name != "step" and name not in unknown:
                self._events.add_scalar(name, value, line["step"])
