"""Whole runs: what they write, what they say, and what stops them before they start."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import mesh_of, tiny_run

from experiments.summary import summary
from tpjax.config import (
    ConfigError,
    MemoryConfig,
    MeshConfig,
    OptimConfig,
    PoolConfig,
    RecoveryConfig,
    TrainConfig,
)
from tpjax.data import place
from tpjax.loop import Diverged, OutOfMemory, train
from tpjax.memory.advice import Advice
from tpjax.memory.compiled import compile_lowered
from tpjax.memory.live import live_memory
from tpjax.memory.records import gib
from tpjax.resolve import resolve
from tpjax.step import lower_train_step

ROOT = Path(__file__).parent.parent


@pytest.fixture
def config(tmp_path) -> TrainConfig:
    return tiny_run(tmp_path, steps=12, eval_every=5)


def test_a_run_learns_and_writes_what_it_did(config, capsys):
    result = train(config)
    lines = [json.loads(x) for x in Path(config.out, "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    evaluations = [line for line in lines if "eval_loss" in line]
    assert [line["step"] for line in steps] == list(range(1, 13))
    assert [line["step"] for line in evaluations] == [5, 10, 12]
    assert steps[-1]["loss"] < 0.8 * steps[0]["loss"]
    assert evaluations[-1]["eval_loss"] < evaluations[0]["eval_loss"]
    assert {"grad_norm", "lr", "step_ms", "tokens_per_s"} <= steps[0].keys()
    assert steps[0]["tokens"] == 8 * 32
    assert steps[0]["peak_bytes"] is None
    assert "no memory statistics" in steps[0]["peak_reason"]
    assert (result.train_loss, result.eval_loss) == (
        steps[-1]["loss"],
        evaluations[-1]["eval_loss"],
    )
    out = Path(config.out)
    assert json.loads((out / "config.json").read_text())["model"]["name"] == "tiny-bytes"
    memory = json.loads((out / "memory.json").read_text())
    assert memory["moments_bytes"] > 2 * memory["parameters_bytes"]
    assert memory["compiled_peak_bytes"] > memory["moments_bytes"]
    assert memory["live_peak_bytes"] is None
    assert list(out.glob("events.out.tfevents.*"))
    printed = capsys.readouterr().out
    assert "validation loss" in printed
    rows = dict(zip(*(column.cells for column in summary(result).columns), strict=True))
    assert "not available, because the cpu backend" in rows["live peak"]
    assert result.sample is not None

    again = train(config)
    assert (again.steps, again.train_loss, again.eval_loss) == (12, None, result.eval_loss)
    assert again.sample == result.sample
    assert [json.loads(x) for x in (out / "metrics.jsonl").read_text().splitlines()] == lines
    assert "all 12 steps are done" in capsys.readouterr().out
    never = dataclasses.replace(config, recovery=RecoveryConfig(resume="never"))
    with pytest.raises(ConfigError, match="holds a run already"):
        train(never)


def test_a_dry_run_compiles_and_leaves_nothing(config):
    result = train(dataclasses.replace(config, dry_run=True))
    assert result.memory.compiled_peak_bytes > 0
    assert result.train_loss is None
    assert not Path(config.out).exists()
    assert "nothing was trained" in "".join(map(str, summary(result).columns[1].cells))


def test_a_state_made_on_one_device_first_has_to_fit_there(config):
    small = dataclasses.replace(
        config, data=dataclasses.replace(config.data, batch_size=2, seq_len=8), dry_run=True
    )
    lazy = train(small).memory
    eager = train(dataclasses.replace(small, memory=MemoryConfig(init="eager"))).memory
    state = lazy.parameters_bytes + lazy.moments_bytes  # all but the norms' halved over tensor
    assert lazy.compiled_peak_bytes < 2.2 * state
    assert eager.compiled_peak_bytes > 2.9 * state
    assert eager.parameters_bytes == lazy.parameters_bytes


def test_memory_is_told_before_and_after(config, capsys):
    result = train(config)
    printed = capsys.readouterr().out
    assert printed.index("memory per device") < printed.index("step     1")
    memory = json.loads(Path(config.out, "memory.json").read_text())
    assert memory["compiled_peak_bytes"] == result.memory.compiled_peak_bytes
    assert memory["capacity_bytes"] > memory["compiled_peak_bytes"]
    assert memory["host_peak_bytes"] > 50 * 1024**2
    assert len(memory["live"]["devices"]) == 4
    line = json.loads(Path(config.out, "metrics.jsonl").read_text().splitlines()[0])
    assert line["bytes_in_use"] is None
    assert line["host_bytes"] > 50 * 1024**2


def test_a_run_that_cannot_fit_is_refused_with_what_would_help(config, monkeypatch):
    peak = train(dataclasses.replace(config, dry_run=True)).memory.compiled_peak_bytes
    monkeypatch.setattr("tpjax.run.capacity", lambda devices: (peak - 1, None))
    advice = [Advice("--remat=full", 300 * 1024), Advice("--moments=bf16", 2 * 1024**2)]
    monkeypatch.setattr("tpjax.run.advise", lambda config, devices: advice)
    with pytest.raises(ConfigError) as refused:
        train(config)
    said = str(refused.value)
    assert f"the step needs {gib(peak)} on each device, and {gib(peak - 1)} is there" in said
    assert "--force starts it all the same" in said
    assert said.endswith("What would help most: --remat=full: 300.0 KiB; --moments=bf16: 2.0 MiB.")
    assert "\n" not in said
    with pytest.raises(ConfigError, match="the step needs"):
        train(dataclasses.replace(config, dry_run=True))
    assert not Path(config.out).exists()
    assert train(dataclasses.replace(config, force=True)).train_loss is not None
    monkeypatch.setattr("tpjax.run.capacity", lambda devices: (peak, None))
    assert train(dataclasses.replace(config, out=f"{config.out}-2")).memory.fits is True


def test_running_out_of_memory_ends_in_the_ledger_and_three_changes(config, monkeypatch):
    """The device's own error is made up; what is said of it is compiled."""
    allocator = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 123 bytes.\nBFC dump"

    def run_out(*_):
        raise jax.errors.JaxRuntimeError(allocator)

    monkeypatch.setattr("tpjax.training.Training.all_steps", run_out)
    with pytest.raises(OutOfMemory) as stopped:
        train(config)
    said = str(stopped.value)
    assert "while trying to allocate 123 bytes" in said
    assert "BFC dump" not in said
    assert stopped.value.__cause__ is None
    before, after = said.split("What would help most")
    step = compile_lowered(*_lowered(config))
    largest = step.ledger.lines[0]
    assert f"{gib(largest.bytes):>10}  {largest.kind:<12} {largest.name}" in before
    changes = re.findall(r"^  (--\S+(?: --\S+)?) +([\d.]+ \w+)$", after, re.M)
    assert len(changes) == 3
    sizes = dict(changes)
    split = dataclasses.replace(config, data=dataclasses.replace(config.data, accumulate=4))
    leaner = compile_lowered(*_lowered(split))
    assert sizes["--accumulate=4"] == gib(leaner.peak_bytes)
    assert leaner.peak_bytes < step.peak_bytes


def test_flags_of_a_pool_are_said_to_do_nothing_on_simulated_devices(config, capsys):
    pool = PoolConfig(pool_fraction=0.9, preallocate=False)
    result = train(dataclasses.replace(config, pool=pool, steps=1))
    said = "--pool-fraction=0.9 --no-preallocate: no effect, because simulated devices have no pool"
    assert f"pool: {said}" in " ".join(capsys.readouterr().out.split())
    rows = dict(zip(*(column.cells for column in summary(result).columns), strict=True))
    assert rows["pool"] == said
    assert json.loads(Path(config.out, "memory.json").read_text())["pool"] == said
    assert train(dataclasses.replace(config, dry_run=True, out="")).memory.pool is None


def test_every_step_after_the_first_allocates_nothing_new(config, monkeypatch):
    """Seen from the loop, after each step: the state in the same buffers, and as many arrays
    of as many bytes. Two batches are there at most, and those of evaluation come and go."""
    states, arrays, batches = [], [], []

    def count(devices):
        alive = jax.live_arrays()
        arrays.append((len(alive), sum(array.nbytes for array in alive)))
        return live_memory(devices)

    def count_batches(rows, mesh):
        placed = place(rows, mesh)
        tokens = [array for array in jax.live_arrays() if array.dtype == np.int32]
        batches.append(sum(array.shape == (8, 32) for array in tokens) / 2)
        return placed

    def look_at_state(*of):
        step = lower_train_step(*of).compile()

        def run(state, batch):
            states.append(pointers(state))
            return step(state, batch)

        run.memory_analysis = step.memory_analysis
        return SimpleNamespace(compile=lambda: run)

    def pointers(state) -> set[int]:
        shards = [s for x in jax.tree.leaves(state) for s in x.addressable_shards]
        return {shard.data.unsafe_buffer_pointer() for shard in shards}

    monkeypatch.setattr("tpjax.training.live_memory", count)
    monkeypatch.setattr("tpjax.run.place", count_batches)
    monkeypatch.setattr("tpjax.run.lower_train_step", look_at_state)
    train(config)
    assert len(states) == config.steps
    assert all(state == states[0] for state in states)
    steps = arrays[1 : config.steps - 1]  # the last one has no batch after it
    assert len(set(steps)) == 1
    assert max(batches) == 2


@pytest.mark.parametrize(
    ("ahead", "order"),
    [
        (0, "place step place logged step place logged step logged"),
        (1, "place step place step logged place step logged logged"),
    ],
)
def test_the_next_batch_is_placed_while_a_step_runs(config, monkeypatch, ahead, order):
    """On simulated devices before the step is waited for, with nothing else queued behind it;
    with a step ahead, as soon as the one before that is logged. On one device, where no
    program waits for another."""
    said = []

    def saying(word: str, function):
        return lambda *args: (said.append(word), function(*args))[1]

    def say_steps(*of):
        step = lower_train_step(*of).compile()
        run = saying("step", step)
        run.memory_analysis = step.memory_analysis
        return SimpleNamespace(compile=lambda: run)

    monkeypatch.setattr("tpjax.run.place", saying("place", place))
    monkeypatch.setattr("tpjax.training.live_memory", saying("logged", live_memory))
    monkeypatch.setattr("tpjax.run.lower_train_step", say_steps)
    monkeypatch.setattr("tpjax.run.Run.steps_ahead", ahead)
    monkeypatch.setattr("tpjax.run.start_devices", lambda *_: jax.devices()[:1])
    train(dataclasses.replace(config, mesh=MeshConfig(), steps=3, eval_every=0))
    assert said[:9] == order.split()


def test_other_errors_of_the_device_stay_what_they_are(config, monkeypatch):
    def fail(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr("tpjax.training.Training.all_steps", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        train(config)


def _lowered(config: TrainConfig):
    config = resolve(config, num_devices=4, platform="cpu")
    mesh = mesh_of(config)
    return lower_train_step(config, mesh), mesh


def test_times_are_of_the_step_they_stand_beside(config):
    """Evaluation counts for no step, and no step for another."""
    train(dataclasses.replace(config, steps=20, eval_every=4))
    lines = [json.loads(x) for x in Path(config.out, "metrics.jsonl").read_text().splitlines()]
    times = [line["step_ms"] for line in lines if "step_ms" in line][1:]
    assert min(times) > 0.2 * statistics.median(times)


def test_a_loss_that_is_not_finite_ends_the_run(config):
    wild = dataclasses.replace(config, optim=OptimConfig(lr=1e30, min_lr=1e30, warmup=0, clip=0))
    said = (
        r"the (loss|gradient) of step \d+ is not finite; parameters are as before the last 3 "
        r"steps, which were left out \(--max-bad-steps=3\). Lower --lr or clip with --clip=1 and "
        r"go on with --force. The last good checkpoint: none; the batch: .*bad-batch-\d+.npz"
    )
    with pytest.raises(Diverged, match=said):
        train(wild)
    lines = Path(config.out, "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1], parse_constant=pytest.fail)
    assert None in (last["loss"], last["grad_norm"])


def test_no_scale_mends_a_loss_that_is_not_finite(config):
    """In float16 too it ends the run at once; an overflow of the gradient alone does not."""
    wild = dataclasses.replace(
        config,
        optim=OptimConfig(lr=1e3, min_lr=1e3, warmup=0, clip=0),
        memory=MemoryConfig(compute="fp16"),
        eval_every=0,
    )
    with pytest.raises(Diverged, match=r"the loss of step \d+ is not finite; parameters are as"):
        train(wild)
    lines = Path(config.out, "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert len(losses) > 3
    assert losses.index(None) == len(losses) - 3


def test_a_loss_on_held_out_text_that_is_not_finite_ends_the_run(config, monkeypatch):
    monkeypatch.setattr("tpjax.run.Run.evaluate", lambda *_: float("nan"))
    with pytest.raises(Diverged, match="the loss on held-out text after step 5 is not finite"):
        train(config)


def test_evaluation_takes_a_part_of_the_batch_at_a_time(config, tmp_path):
    """With accumulation the losses are the same, from batches of a part's size."""
    once = dataclasses.replace(config, mesh=MeshConfig(tensor=4), steps=2)
    parts = dataclasses.replace(
        once, data=dataclasses.replace(config.data, accumulate=4), out=str(tmp_path / "parts")
    )
    assert train(parts).eval_loss == pytest.approx(train(once).eval_loss, rel=1e-5)


def test_a_folder_that_cannot_be_written_is_named(config, tmp_path):
    (tmp_path / "file").write_text("")
    for dry_run in (False, True):
        with pytest.raises(ConfigError, match="cannot be written"):
            train(dataclasses.replace(config, out=str(tmp_path / "file" / "run"), dry_run=dry_run))


def python(*args: str, **environment: str) -> subprocess.CompletedProcess:
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | environment
    return subprocess.run(
        [sys.executable, *args], capture_output=True, text=True, cwd=ROOT, env=env, check=False
    )


@pytest.mark.parametrize("devices", ["1", "8"])
def test_the_program_runs_on_any_number_of_devices(tmp_path, devices):
    flags = f"--steps 2 --devices {devices} --seq-len 64 --out {tmp_path}/run --eval-every 0"
    corpus = tmp_path / "a.txt"
    corpus.write_text("some text " * 500)
    done = python(
        "-m", "experiments.train", *flags.split(), "--corpus", str(corpus),
        XDG_CACHE_HOME=str(tmp_path / "cache"),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"{devices} × cpu" in done.stdout
    assert list((tmp_path / "cache" / "tpjax").iterdir())  # the next run starts fast


def test_a_wrong_run_ends_with_status_two_and_one_line(tmp_path):
    done = python("-m", "experiments.train", "--corpus", str(tmp_path / "nothing"))
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"error: corpus {tmp_path}/nothing does not exist."
    assert "Traceback" not in done.stderr


def test_simulated_devices_too_late_is_a_clear_error():
    late = "import jax; jax.config.update('jax_platforms', 'cpu'); jax.devices(); import tpjax\n"
    done = python("-c", late + "tpjax.start_devices(4)")
    assert "JAX has already started with 1 CPU device(s) where 4 are asked for" in done.stderr
    early = "import tpjax; print(len(tpjax.start_devices(3)), len(tpjax.start_devices(2)))"
    assert python("-c", early).stdout.split() == ["3", "2"]
