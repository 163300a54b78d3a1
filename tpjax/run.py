"""A run that is ready to start: config → mesh → data → compiled steps, all checks done."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpjax.checkpoint import Checkpoint, Progress, choose
from tpjax.config import TrainConfig
from tpjax.corpus import load_corpus
from tpjax.data import EvalBatches, TrainBatches, check_rows, place
from tpjax.folder import METRICS, RunFolder
from tpjax.hf.load import Weights
from tpjax.memory.advice import advise, explain_peak
from tpjax.memory.compiled import compile_lowered, host_bytes, init_peak_bytes, peak_bytes
from tpjax.memory.live import RunMemory, capacity, check_pool
from tpjax.memory.records import gib
from tpjax.mesh import make_mesh, start_devices
from tpjax.preemption import Preemption
from tpjax.resolve import resolve
from tpjax.restore import Restoration
from tpjax.resume import changes
from tpjax.sharding import bytes_per_device
from tpjax.state import Batch, TrainState, abstract_state, create_state, state_with
from tpjax.step import lower_eval_step, lower_train_step
from tpjax.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, kw_only=True)
class Run:
    """Checked, loaded and compiled.

    Attributes:
        text: the fingerprint of the corpus.
        checkpoint: what it goes on from, or None.
        restoration: that, fitted to this run.
        weights: of the model's folder, to begin with, or None.
        notes: what is to be said of what it starts from.
        pool: what was made of the flags of the pool, or None.
    """

    config: TrainConfig
    mesh: Mesh
    tokenizer: Tokenizer
    batches: TrainBatches
    held_out: EvalBatches
    text: str
    checkpoint: Checkpoint | None
    restoration: Restoration | None
    weights: Weights | None
    notes: list[str]
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

    @property
    def start(self) -> Progress:
        """How far it is before its first step."""
        return Progress() if self.checkpoint is None else self.checkpoint.about.progress

    def state(self) -> TrainState:
        """The state to start from: restored, of the model's folder, or new."""
        if self.restoration is None:
            return self._new_state()
        state = self.restoration.state()
        if not self.config.model.adapted:
            return state
        return dataclasses.replace(state, frozen=self._new_state().frozen)

    def _new_state(self) -> TrainState:
        if self.weights is not None:
            return state_with(self.config, self.mesh, self.weights.params())
        return create_state(self.config, self.mesh)

    def batch(self, number: int) -> Batch:
        """Batch `number` (0, 1, …) on the devices."""
        rows = self.batches.rows(number)
        check_rows(rows, self.config.model.vocab_size, f"batch {number}")
        return place(rows, self.mesh)

    def evaluate(self, params: dict, preemption: Preemption) -> float | None:
        """Mean loss over all held-out tokens: sums and counts, divided once. One batch is there
        at a time, beside the next step's. None where a signal comes before the end."""
        whole = NamedSharding(self.mesh, P())
        totals = jax.device_put((np.float32(0), np.int32(0)), whole)
        for number in range(len(self.held_out)):
            if preemption.signal:
                return None
            rows = self.held_out.rows(number)
            check_rows(rows, self.config.model.vocab_size, f"held-out batch {number}")
            totals = self.eval_step(params, totals, place(rows, self.mesh))
            jax.block_until_ready(totals)
        loss, count = totals
        return float(loss) / int(count)


def prepare(config: TrainConfig, folder: RunFolder) -> Run:
    """Everything that can fail, before anything is trained or written."""
    checkpoint = choose(folder.checkpoints, config.recovery.resume)
    devices = start_devices(config.devices, config.pool)
    pool = check_pool(config.pool, [d for d in devices if d.process_index == jax.process_index()])
    config = resolve(config, num_devices=len(devices), platform=devices[0].platform)
    assert config.mesh is not None  # resolved
    mesh = make_mesh(config.mesh, config.model, devices)
    tokenizer = load_tokenizer(config)
    corpus = load_corpus(config, tokenizer)
    restoration, weights, notes, data = None, None, [], config.data
    progress = Progress()
    if checkpoint is None and (folder.path / METRICS).exists():
        notes.append(f"no checkpoint in {folder.checkpoints}: the run begins again")
    if config.model.folder and (checkpoint is None or config.model.adapted):
        weights = Weights(config, mesh)
        notes += [f"weights of {config.model.folder}", *weights.notes]
    if checkpoint is not None:
        progress = checkpoint.about.progress
        notes = [*checkpoint.skipped, f"going on from {checkpoint.path}"]
        notes += changes(checkpoint, config, corpus.fingerprint)
        restoration = Restoration(checkpoint, config, mesh)
        notes += restoration.notes
        if progress.step >= config.steps:
            notes.append(f"all {config.steps} steps are done")
    start = time.perf_counter()
    step = lower_train_step(config, mesh).compile()
    eval_step = lower_eval_step(config, mesh).compile()
    shift = progress.sequences - progress.step * data.batch_size
    counts, sizes = corpus.train_counts, (data.batch_size, data.seq_len)
    batches = TrainBatches(corpus.train, *sizes, config.seed, shift, counts)
    counts, sizes = corpus.validation_counts, (data.part_size, data.seq_len)
    held_out = EvalBatches(corpus.validation, *sizes, counts)
    return Run(
        config=config,
        mesh=mesh,
        tokenizer=tokenizer,
        batches=batches,
        held_out=held_out,
        text=corpus.fingerprint,
        checkpoint=checkpoint,
        restoration=restoration,
        weights=weights,
        notes=notes,
        step=step,
        eval_step=eval_step,
        compile_seconds=time.perf_counter() - start,
        pool=pool,
    )


def what_would_help(run: Run) -> str:
    """The ledger of the step at its peak, and the changes that lower it most."""
    step = compile_lowered(lower_train_step(run.config, run.mesh), run.mesh)
    return explain_peak(step.ledger.lines, advise(run.config, list(run.mesh.devices.flat)))


def cannot_fit(run: Run, memory: RunMemory) -> str:
    """One line: what is needed, what is there, what would help."""
    advice = advise(run.config, list(run.mesh.devices.flat))
    changes = "; ".join(f"{one.flags}: {gib(one.peak_bytes)}" for one in advice)
    assert memory.capacity_bytes is not None
    return (
        f"the step needs {gib(memory.compiled_peak_bytes)} on each device, and "
        f"{gib(memory.capacity_bytes)} is there; --force starts it all the same."
        + (f" What would help most: {changes}." if changes else "")
    )


def predicted(run: Run) -> RunMemory:
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
        parameters_bytes=bytes_per_device(state.weights),
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
