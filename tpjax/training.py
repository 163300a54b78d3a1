"""Steps one after the other: logged, evaluated, saved, left out where they are bad, and stopped
in order."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np

from tpjax import resume
from tpjax.checkpoint import Progress
from tpjax.health import is_bad
from tpjax.log import RunLog
from tpjax.memory.live import live_memory
from tpjax.preemption import Preemption
from tpjax.run import Run
from tpjax.saver import SaveFailed, Saver
from tpjax.state import TrainState


class Diverged(Exception):
    """A loss that is not a finite number, in one line."""


class Training:
    """Steps, evaluations and checkpoints of one start of a run, and what they came to.

    Attributes:
        progress: after the last step that was logged.
        train_loss: of that step.
        stopped: as in `Result`.
    """

    def __init__(self, run: Run, out: Path, log: RunLog, saver: Saver, preemption: Preemption):
        self.run, self.out, self.log, self.saver, self.preemption = run, out, log, saver, preemption
        self.config = run.config
        self.progress = run.start
        self.train_loss: float | None = None
        self.stopped: str | None = None
        self.failed: str | None = None  # why the newest checkpoint could not be written
        self._pending: deque[tuple[int, dict]] = deque()
        self._seconds = 0.0  # of steps, without evaluations

    @property
    def tokens_per_s(self) -> float | None:
        data, steps = self.config.data, self.progress.step - self.run.start.step
        return steps * data.batch_size * data.seq_len / self._seconds if steps else None

    def all_steps(self, state: TrainState) -> TrainState:
        """While the devices work at a step, the next one's batch is placed on them. The step
        before is done by then and its batch let go, so that two are there and never more."""
        run, first, last = self.run, self.run.start.step + 1, self.config.steps
        if first > 1 and self._evaluates(first - 1) and self.progress.eval_loss is None:
            self._evaluate(state)  # the run was stopped in it
            if self.progress.eval_loss is None:  # and is again
                self.stopped = self.preemption.signal
                return state
        begun = time.perf_counter()
        batch = run.batch(first - 1) if first <= last else None
        for step in range(first, last + 1):
            state, metrics = run.step(state, batch)
            self._pending.append((step, metrics))
            self._log_steps(keep=1)
            if step < last:
                batch = run.batch(step)
            self._guard(self.saver.poll)
            pauses = self._evaluates(step) or self._saves(step) or self._stops(step) is not None
            if pauses or not run.steps_ahead:
                jax.block_until_ready(state)
                self._log_steps(keep=0)
            self._seconds += time.perf_counter() - begun
            if pauses:
                self.stopped = self._pause(step, state)
            if self.stopped is not None:
                break
            begun = time.perf_counter()
        if self.stopped is None and self.progress.eval_loss is None:
            self.stopped = self.preemption.signal  # it came in the last evaluation
        self._finish()
        return state

    def _pause(self, step: int, state: TrainState) -> str | None:
        """Evaluates and saves, where that is due; why the run stops here, if it does."""
        if self._evaluates(step):
            self._evaluate(state)
        if self._saves(step) or self._stops(step) is not None:
            self._save(state)
            return self._stops(step)
        return None

    def _finish(self) -> None:
        """Waits for the last checkpoint, without which the run would be lost."""
        self._guard(self.saver.wait)
        if self.failed is not None:
            raise SaveFailed(self.failed)

    def _evaluates(self, step: int) -> bool:
        every = self.config.eval_every
        return step == self.config.steps or (every > 0 and step % every == 0)

    def _saves(self, step: int) -> bool:
        every = self.config.recovery.checkpoint_every
        return step == self.config.steps or (bool(every) and step % every == 0)

    def _stops(self, step: int) -> str | None:
        """Why the run ends after this step, before its last."""
        if step == self.config.steps:
            return None
        most = self.config.recovery.stop_after
        if most and step - self.run.start.step >= most:
            return f"--stop-after={most}"
        return self.preemption.signal

    def _log_steps(self, keep: int) -> None:
        """Waits for all but the last `keep` steps and logs them."""
        while len(self._pending) > keep:
            step, metrics = self._pending.popleft()
            values = {name: float(value) for name, value in metrics.items()}
            loss = values["loss"]
            figures = loss, values["grad_norm"], values.get("loss_scale", 1.0)
            if spike := self.progress.health.spike(loss):
                values["spike"] = spike
            health = self.progress.health.after(*figures)
            taken = (step - self.run.start.step) * self.config.data.batch_size
            sequences = self.run.start.sequences + taken
            self.progress = Progress(step=step, sequences=sequences, health=health)
            self.train_loss = loss
            self.log.step(step, values, live_memory(self.run.devices))
            if spike:
                self.log.say(f"step {step}: the loss {loss:.3f} is {spike:.1f} × its running level")
            if is_bad(*figures):
                self._left_out(step, "the gradient" if math.isfinite(loss) else "the loss")

    def _left_out(self, step: int, what: str) -> None:
        """A step whose loss or gradient is not finite: counted, and the end after too many."""
        recovery, in_a_row = self.config.recovery, self.progress.health.in_a_row
        spoilt = self.config.memory.update == "layerwise" and what == "the gradient"
        self.log.say(
            f"step {step}: {what} of batch {step - 1} is not finite"
            + ("." if spoilt else f"; the step was left out ({in_a_row} in a row).")
        )
        if spoilt:
            raise Diverged(
                f"{what} of step {step} is not finite; with --update=layerwise that is found when "
                "other layers are updated already, so that the parameters are spoilt "
                f"(--update=whole leaves such a step out). {self._remedy(step)}"
            )
        if in_a_row >= recovery.max_bad_steps:
            last = "the last step" if in_a_row == 1 else f"the last {in_a_row} steps"
            raise Diverged(
                f"{what} of step {step} is not finite; parameters are as before {last}, which "
                f"were left out (--max-bad-steps={recovery.max_bad_steps}). {self._remedy(step)}"
            )

    def _remedy(self, step: int) -> str:
        """What is there to go on with, and what to change."""
        self._guard(self.saver.wait)
        clip, path = self.config.optim.clip, self.out / f"bad-batch-{step}.npz"
        names = ("tokens_BT", "targets_BT", "valid_BT")
        rows = dict(zip(names, self.run.batches.rows(step - 1), strict=True))
        try:
            np.savez(path, **rows)
            batch = str(path)
        except OSError as error:
            batch = f"not written, {error.strerror}"
        return (
            f"Lower --lr{f' or --clip, which is {clip:g},' if clip else ' or clip with --clip=1'} "
            f"and go on with --force. The last good checkpoint: {self.saver.last or 'none'}; the "
            f"batch: {batch}."
        )

    def _evaluate(self, state: TrainState) -> None:
        loss = self.run.evaluate(state.weights, self.preemption)
        if loss is None:
            return
        step = self.progress.step
        self.log.evaluation(step, loss)
        if not math.isfinite(loss):
            self._guard(self.saver.wait)
            raise Diverged(
                f"the loss on held-out text after step {step} is not finite. Lower --lr. The last "
                f"good checkpoint: {self.saver.last or 'none'}."
            )
        self.progress = dataclasses.replace(self.progress, eval_loss=loss)

    def _save(self, state: TrainState) -> None:
        """Begins a checkpoint of the last step logged."""
        self._guard(self.saver.wait)
        about = resume.about(self.config, self.run.text, self.progress)
        self.failed = None
        self._guard(lambda: self.saver.save(state.changing, about))

    def _guard(self, action: Callable[[], None]) -> None:
        """A checkpoint that cannot be written is said at once, and is the end where that is
        asked for."""
        try:
            action()
        except SaveFailed as error:
            if self.config.recovery.on_save_error == "stop":
                raise
            self.failed = str(error)  # until another one is whole
            self.log.say(f"warning: {error}")
