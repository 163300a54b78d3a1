"""A whole run: checked, trained from its beginning or from a checkpoint, and summed up."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import jax

from tpjax import checkpoint
from tpjax.config import ConfigError, TrainConfig
from tpjax.folder import RunFolder, rewind
from tpjax.generate import sample
from tpjax.log import RunLog
from tpjax.memory.live import LiveMemory, RunMemory, live_memory
from tpjax.preemption import Preemption
from tpjax.run import Run, cannot_fit, predicted, prepare, what_would_help
from tpjax.saver import SaveFailed, Saver
from tpjax.state import TrainState, abstract_state
from tpjax.training import Diverged, Training

__all__ = ["Diverged", "OutOfMemory", "Result", "SaveFailed", "train"]

PROMPT_TOKENS, SAMPLE_TOKENS = 24, 120


class OutOfMemory(Exception):
    """A device ran out of memory: what it held, and what would help, in some lines."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run came to; losses, speed and sample are None where there was none of it.

    Attributes:
        notes: what is to be said of the checkpoint that it went on from.
        stopped: what ended it before its last step (a signal's name, or --stop-after), or None.
        checkpoint: the newest one.
        bad_steps: steps left out as their loss or gradient was not finite.
    """

    config: TrainConfig  # as resolved
    platform: str
    compile_seconds: float
    memory: RunMemory
    live: LiveMemory | None = None
    out: Path | None = None
    steps: int = 0
    notes: tuple[str, ...] = ()
    stopped: str | None = None
    checkpoint: Path | None = None
    bad_steps: int = 0
    train_loss: float | None = None
    eval_loss: float | None = None
    tokens_per_s: float | None = None
    prompt: str | None = None
    sample: str | None = None


def train(config: TrainConfig) -> Result:
    """Trains as `config` says, on all GPUs or on simulated CPU devices.

    Goes on from the newest whole checkpoint where `out` has one. SIGTERM and SIGINT end it after
    the step that runs, with a checkpoint; a second one ends the process.

    Raises:
        ConfigError: the configuration, the corpus or the folder is wrong (nothing has been
            trained by then), or a batch has tokens outside the vocabulary.
        Diverged: losses are not finite.
        OutOfMemory: the devices have not the memory that the step needs.
        SaveFailed: a checkpoint cannot be written, and the run was told to stop then or is over.
    """
    with Preemption() as preemption, RunFolder(config) as folder:
        run = prepare(config, folder)
        result = Result(
            config=run.config,
            platform=run.devices[0].platform,
            compile_seconds=run.compile_seconds,
            memory=predicted(run),
            steps=run.start.step,
            notes=tuple(run.notes),
            checkpoint=None if run.checkpoint is None else run.checkpoint.path,
        )
        if result.memory.fits is False and not config.force:
            raise ConfigError(cannot_fit(run, result.memory))
        if config.dry_run:
            return result
        if preemption.signal:
            return dataclasses.replace(result, stopped=preemption.signal)
        return _train(run, folder, preemption, result)


def _train(run: Run, folder: RunFolder, preemption: Preemption, result: Result) -> Result:
    """From the first step on: writes."""
    out, start = folder.path, run.start
    shapes = abstract_state(run.config, run.mesh).changing
    saver = Saver(folder.checkpoints, run.config.recovery, shapes, last=result.checkpoint)
    if start.step < run.config.steps:
        _check_space(run, folder, saver.state_bytes)
    folder.open(run.config)
    checkpoint.set_aside(folder.checkpoints, start.step)
    rewind(out, start.step, evaluated=start.eval_loss is not None)
    with RunLog(out, run.config.steps, start.step) as log, saver:
        log.prediction(result.memory)
        for note in run.notes:
            log.say(note)
        training = Training(run, out, log, saver, preemption)
        state = _all_steps(training)
    live = live_memory(run.devices)
    memory = _measured(result.memory, live, out)
    result = dataclasses.replace(
        result,
        memory=memory,
        live=live,
        out=out,
        steps=training.progress.step,
        stopped=training.stopped,
        checkpoint=saver.last,
        bad_steps=training.progress.health.bad_steps,
        train_loss=training.train_loss,
        eval_loss=training.progress.eval_loss,
        tokens_per_s=training.tokens_per_s,
    )
    if training.stopped:
        return result
    prompt, text = _sample(run, state.weights)
    return dataclasses.replace(result, prompt=prompt, sample=text)


def _all_steps(training: Training) -> TrainState:
    """The state after the last step."""
    try:
        return training.all_steps(jax.block_until_ready(training.run.state()))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        said = str(error).splitlines()[0][:200]
    # Outside of the handler, so that nothing holds on to the state any more.
    raise OutOfMemory(f"a device ran out of memory ({said}).\n{what_would_help(training.run)}")


def _check_space(run: Run, folder: RunFolder, needed_bytes: int) -> None:
    if run.config.force:
        return
    try:
        checkpoint.check_space(folder.path, needed_bytes)
    except OSError as error:
        raise ConfigError(
            f"out {folder.path} has no room for a checkpoint: {error}; make room, name a folder "
            "elsewhere, or start all the same with --force."
        ) from error


def _measured(memory: RunMemory, live: LiveMemory, out: Path) -> RunMemory:
    """What was predicted, with what was seen; written to memory.json."""
    memory = dataclasses.replace(
        memory,
        live_peak_bytes=live.peak_bytes,
        live_peak_reason=live.peak_reason,
        host_peak_bytes=live.host_peak_bytes,
        host_peak_reason=live.host_reason,
    )
    sizes = dataclasses.asdict(memory) | {"live": dataclasses.asdict(live)}
    with contextlib.suppress(OSError):  # a full disk has been told of
        (out / "memory.json").write_text(json.dumps(sizes, indent=2) + "\n")
    return memory


def _sample(run: Run, params: dict) -> tuple[str, str]:
    """The start of the held-out text, and what the model makes of it."""
    config, T = run.config, run.config.data.seq_len
    prompt = run.held_out.tokens[: min(PROMPT_TOKENS, max(T // 2, 1))]
    count = min(SAMPLE_TOKENS, T - len(prompt))
    tokens = sample(config, run.mesh, params, prompt, count, config.seed)
    return run.tokenizer.decode(prompt.tolist()), run.tokenizer.decode(tokens)
