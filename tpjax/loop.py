"""The training loop: config → mesh → data → compiled step → one step after the other."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpjax.config import ConfigError, TrainConfig
from tpjax.data import EvalBatches, Tokenizer, TrainBatches, load_corpus, load_tokenizer, place
from tpjax.generate import sample
from tpjax.log import RunLog, free_folder, open_folder
from tpjax.memory.advice import advise, explain_peak
from tpjax.memory.compiled import compile_lowered, host_bytes, init_peak_bytes, peak_bytes
from tpjax.memory.live import LiveMemory, RunMemory, capacity, check_pool, live_memory
from tpjax.memory.records import gib
from tpjax.mesh import make_mesh, start_devices
from tpjax.resolve import resolve
from tpjax.sharding import bytes_per_device
from tpjax.state import TrainState, abstract_state, create_state
from tpjax.step import lower_eval_step, lower_train_step

PROMPT_TOKENS, SAMPLE_TOKENS = 24, 120


class Diverged(Exception):
    """A loss that is not a finite number, in one line."""


class OutOfMemory(Exception):
    """A device ran out of memory: what it held, and what would help, in some lines."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What a run came to; losses, speed and sample are None after a dry run."""

    config: TrainConfig  # as resolved
    platform: str
    compile_seconds: float
    memory: RunMemory
    live: LiveMemory | None = None
    out: Path | None = None
    train_loss: float | None = None
    eval_loss: float | None = None
    tokens_per_s: float | None = None
    prompt: str | None = None
    sample: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Run:
    """A run that is ready to start: checked, loaded and compiled."""

    config: TrainConfig
    mesh: Mesh
    tokenizer: Tokenizer
    batches: TrainBatches
    held_out: EvalBatches
    out: Path
    step: jax.stages.Compiled
    eval_step: jax.stages.Compiled
    compile_seconds: float
    pool: str | None

    @property
    def devices(self) -> list:
        return list(self.mesh.local_devices)

    @property
    def steps_ahead(self) -> int:
        """Steps sent to the devices before the last one is logged.

        None to simulated ones: their threads come from a pool hardly larger than
        the number of devices, and programs sent ahead can fill it and wait for
        ever for the one before.
        """
        return 0 if self.devices[0].platform == "cpu" else 1

    def evaluate(self, params: dict) -> float:
        """Mean loss over all held-out tokens: sums and counts, divided once. One batch is there
        at a time, beside the next step's."""
        whole = NamedSharding(self.mesh, P())
        totals = jax.device_put((np.float32(0), np.int32(0)), whole)
        for number in range(len(self.held_out)):
            totals = self.eval_step(params, totals, place(self.held_out.rows(number), self.mesh))
            jax.block_until_ready(totals)
        loss, count = totals
        return float(loss) / int(count)


def train(config: TrainConfig) -> Result:
    """Trains as `config` says, on all GPUs or on simulated CPU devices.

    Raises:
        ConfigError: the configuration, the corpus or the folder is wrong;
            nothing has been trained by then.
        Diverged: a loss is not finite.
        OutOfMemory: the devices have not the memory that the step needs.
    """
    run = _prepare(config)
    config, out = run.config, run.out
    result = Result(
        config=config,
        platform=run.devices[0].platform,
        compile_seconds=run.compile_seconds,
        memory=_predicted(run),
    )
    if result.memory.fits is False and not config.force:
        raise ConfigError(_cannot_fit(run, result.memory))
    if config.dry_run:
        return result
    open_folder(out, config)
    with RunLog(out, config.steps) as log:
        log.prediction(result.memory)
        state, train_loss, eval_loss, seconds = _steps(run, log)
    live = live_memory(run.devices)
    memory = dataclasses.replace(
        result.memory,
        live_peak_bytes=live.peak_bytes,
        live_peak_reason=live.peak_reason,
        host_peak_bytes=live.host_peak_bytes,
        host_peak_reason=live.host_reason,
    )
    sizes = dataclasses.asdict(memory) | {"live": dataclasses.asdict(live)}
    (out / "memory.json").write_text(json.dumps(sizes, indent=2) + "\n")
    prompt, text = _sample(run, state.params)
    return dataclasses.replace(
        result,
        memory=memory,
        live=live,
        out=out,
        train_loss=train_loss,
        eval_loss=eval_loss,
        tokens_per_s=config.steps * config.data.batch_size * config.data.seq_len / seconds,
        prompt=prompt,
        sample=text,
    )


def _steps(run: _Run, log: RunLog) -> tuple[TrainState, float, float, float]:
    """All steps and evaluations: final state, last train and validation loss, and the
    seconds that the steps took."""
    try:
        return _all_steps(run, jax.block_until_ready(create_state(run.config, run.mesh)), log)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        said = str(error).splitlines()[0][:200]
    # Outside of the handler, so that nothing holds on to the state any more.
    raise OutOfMemory(f"a device ran out of memory ({said}).\n{_what_would_help(run)}")


def _all_steps(run: _Run, state: TrainState, log: RunLog) -> tuple[TrainState, float, float, float]:
    """While the devices work at a step, the next one's batch is placed on them. The step
    before is done by then and its batch let go, so that two are there and never more."""
    config, pending = run.config, deque()
    train_loss, eval_loss, eval_seconds = float("nan"), float("nan"), 0.0
    start = time.perf_counter()
    batch = place(run.batches.rows(0), run.mesh)
    for step in range(1, config.steps + 1):
        state, metrics = run.step(state, batch)
        pending.append((step, metrics))
        _log_steps(run, log, pending, keep=1)
        if step < config.steps:
            batch = place(run.batches.rows(step), run.mesh)
        evaluates = step == config.steps or (config.eval_every and step % config.eval_every == 0)
        if evaluates or not run.steps_ahead:
            jax.block_until_ready(state)
            train_loss = _log_steps(run, log, pending, keep=0)
        if evaluates:
            begun = time.perf_counter()
            eval_loss = run.evaluate(state.params)
            log.evaluation(step, eval_loss)
            if not math.isfinite(eval_loss):
                raise Diverged(
                    f"the loss on held-out text after step {step} is not finite. Lower --lr. The "
                    f"run up to there is in {run.out}."
                )
            eval_seconds += time.perf_counter() - begun
    return state, train_loss, eval_loss, time.perf_counter() - start - eval_seconds


def _check_finite(run: _Run, step: int, metrics: dict) -> None:
    """Ends a run whose loss or gradient is no number, unless only the gradient is, in float16:
    then the step was left out, and the next one's loss is scaled by half as much."""
    optim, loss, norm = run.config.optim, float(metrics["loss"]), float(metrics["grad_norm"])
    if math.isfinite(loss) and math.isfinite(norm):
        return
    if math.isfinite(loss) and float(metrics.get("loss_scale", 1)) > 1:
        return
    what = "the gradient" if math.isfinite(loss) else "the loss"
    left_out = "parameters are as before it"
    if run.config.memory.update == "layerwise" and math.isfinite(loss):
        left_out = (
            "with --update=layerwise that is found when other layers are updated already, so that "
            "the parameters are spoilt (--update=whole leaves such a step out)"
        )
    clip = f" or --clip, which is {optim.clip:g}" if optim.clip else " or clip with --clip=1"
    raise Diverged(
        f"{what} of step {step} is not finite; {left_out}. Lower --lr{clip}. The run up to there "
        f"is in {run.out}."
    )


def _log_steps(run: _Run, log: RunLog, pending: deque, keep: int) -> float:
    """Waits for all but the last `keep` steps and logs them; the last one's loss."""
    loss = float("nan")
    while len(pending) > keep:
        step, values = pending.popleft()
        loss = log.step(step, values, live_memory(run.devices))
        _check_finite(run, step, values)
    return loss


def _prepare(config: TrainConfig) -> _Run:
    """Everything that can fail, before anything is trained or written."""
    out = free_folder(config)
    devices = start_devices(config.devices, config.pool)
    pool = check_pool(config.pool, [d for d in devices if d.process_index == jax.process_index()])
    config = resolve(config, num_devices=len(devices), platform=devices[0].platform)
    assert config.mesh is not None  # resolved
    mesh = make_mesh(config.mesh, config.model, devices)
    tokenizer = load_tokenizer(config)
    corpus = load_corpus(config, tokenizer)
    start = time.perf_counter()
    step = lower_train_step(config, mesh).compile()
    eval_step = lower_eval_step(config, mesh).compile()
    data = config.data
    return _Run(
        config=config,
        mesh=mesh,
        tokenizer=tokenizer,
        batches=TrainBatches(corpus.train, data.batch_size, data.seq_len, config.seed),
        held_out=EvalBatches(corpus.validation, data.part_size, data.seq_len),
        out=out,
        step=step,
        eval_step=eval_step,
        compile_seconds=time.perf_counter() - start,
        pool=pool,
    )


def _what_would_help(run: _Run) -> str:
    """The ledger of the step at its peak, and the changes that lower it most."""
    step = compile_lowered(lower_train_step(run.config, run.mesh), run.mesh)
    return explain_peak(step.ledger.lines, advise(run.config, list(run.mesh.devices.flat)))


def _cannot_fit(run: _Run, memory: RunMemory) -> str:
    """One line: what is needed, what is there, what would help."""
    advice = advise(run.config, list(run.mesh.devices.flat))
    changes = "; ".join(f"{one.flags}: {gib(one.peak_bytes)}" for one in advice)
    assert memory.capacity_bytes is not None
    return (
        f"the step needs {gib(memory.compiled_peak_bytes)} on each device, and "
        f"{gib(memory.capacity_bytes)} is there; --force starts it all the same."
        + (f" What would help most: {changes}." if changes else "")
    )


def _predicted(run: _Run) -> RunMemory:
    """The peak is that of a training step, or of an evaluation beside the moments; or of making
    the state, where all of it is on one device first."""
    state = abstract_state(run.config, run.mesh)
    moments_bytes = bytes_per_device(state.opt_state)
    sizes = run.step.memory_analysis()
    assert sizes is not None  # XLA reports them of every program
    moments_there = moments_bytes - sizes.host_argument_size_in_bytes
    peaks = [peak_bytes(run.step), peak_bytes(run.eval_step) + moments_there]
    if run.config.memory.init == "eager":
        peaks.append(init_peak_bytes(run.config, run.mesh))
    capacity_bytes, reason = capacity(run.devices)
    return RunMemory(
        parameters_bytes=bytes_per_device(state.params),
        moments_bytes=moments_bytes,
        compiled_peak_bytes=max(peaks),
        offloaded_bytes=host_bytes(run.step),
        capacity_bytes=capacity_bytes,
        capacity_reason=reason,
        live_peak_bytes=None,
        live_peak_reason="nothing has run",
        host_peak_bytes=None,
        host_peak_reason="nothing has run",
        pool=run.pool,
    )


def _sample(run: _Run, params: dict) -> tuple[str, str]:
    """The start of the held-out text, and what the model makes of it."""
    config, T = run.config, run.config.data.seq_len
    prompt = run.held_out.tokens[: min(PROMPT_TOKENS, max(T // 2, 1))]
    count = min(SAMPLE_TOKENS, T - len(prompt))
    tokens = sample(config, run.mesh, params, prompt, count, config.seed)
    return run.tokenizer.decode(prompt.tolist()), run.tokenizer.decode(tokens)
