"""Where a run's figures go: metrics.jsonl, TensorBoard events, the screen."""

from __future__ import annotations

import contextlib
import json
import math
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto import event_pb2, summary_pb2

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
        # Without the thread of a SummaryWriter, which keeps the last events to itself, and hangs
        # the run when the disk is full.
        self._events = EventsWriter(str(folder / "events"), f".{done}")
        self._failed = False
        if done:  # a TensorBoard that has read more of an interrupted run forgets it
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)  # type: ignore[attr-defined]
            self._event(done + 1, session_log=start)
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
        for file in (self._events, self._file):
            with contextlib.suppress(OSError):  # said when it was written
                file.close()

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
        """A line of metrics.jsonl, its numbers for TensorBoard too. All of it is the operating
        system's at once, so that a crash of this process leaves it."""
        numbers = {n: v for n, v in line.items() if isinstance(v, int | float)}
        unknown = {n: None for n, v in numbers.items() if not math.isfinite(v)}  # NaN is no JSON
        shown = {n: v for n, v in numbers.items() if n != "step" and n not in unknown}
        try:
            self._file.write(json.dumps(line | unknown) + "\n")
            self._event(
                line["step"],
                summary=summary_pb2.Summary(  # type: ignore[attr-defined]
                    value=[{"tag": n, "simple_value": v} for n, v in shown.items()]
                ),
            )
        except OSError as error:
            if not self._failed:
                self.say(f"warning: figures are lost, as they cannot be written: {error.strerror}")
            self._failed = True

    def _event(self, step: int, **what) -> None:
        event = event_pb2.Event(wall_time=time.time(), step=step, **what)  # type: ignore[attr-defined]
        self._events.write_event(event)
        self._events.flush()
