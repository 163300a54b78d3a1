"""Runs that are stopped and go on: the same bits as if they had not been."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import resource
import shutil
import signal
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import tiny_run

from benchmarks.faults import read_arrays, same_run
from tpjax import checkpoint
from tpjax.config import (
    ConfigError,
    DataConfig,
    MemoryConfig,
    MeshConfig,
    OptimConfig,
    RecoveryConfig,
    TrainConfig,
)
from tpjax.data import place
from tpjax.folder import rewind
from tpjax.log import RunLog
from tpjax.loop import SaveFailed, train
from tpjax.memory.live import live_memory
from tpjax.preemption import Preemption
from tpjax.saver import Saver

MEMORY = {
    "fp32": MemoryConfig(),
    "int8": MemoryConfig(params="int8", moments="int8"),
    "layerwise": MemoryConfig(params="bf16", moments="factored", update="layerwise", remat="full"),
    "fp16": MemoryConfig(compute="fp16", moments="bf16"),
}


def again(config: TrainConfig, name: str, **settings) -> TrainConfig:
    """The same run into another folder."""
    out = str(Path(config.out).with_name(name))
    return dataclasses.replace(config, out=out, **settings)


def stopping(config: TrainConfig, steps: int) -> TrainConfig:
    recovery = dataclasses.replace(config.recovery, stop_after=steps)
    return dataclasses.replace(config, recovery=recovery)


def terminate() -> None:
    """Sends this process SIGTERM, and waits for the thread that reads it."""
    threads = [x for x in gc.get_objects() if isinstance(x, Preemption) and x._thread.is_alive()]
    os.kill(os.getpid(), signal.SIGTERM)
    end = time.monotonic() + 30
    while any(x.signal is None for x in threads) and time.monotonic() < end:
        time.sleep(0.01)


def lines(out: str) -> list[dict]:
    return [json.loads(x) for x in Path(out, "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("memory", MEMORY)
def test_ten_steps_are_five_and_five(memory, tmp_path, quick_runs):
    """In the second epoch too, with evaluations, and twice interrupted."""
    accumulate = 1 if memory == "layerwise" else 2
    config = tiny_run(tmp_path, memory=MEMORY[memory], eval_every=4)
    data = dataclasses.replace(config.data, accumulate=accumulate)
    config = dataclasses.replace(config, data=data)
    windows = (2700 * 9 // 10 - 1) // 32 - 1  # an epoch ends within step 10
    assert 8 * 9 < windows < 8 * 10
    assert train(config).stopped is None
    parts = again(config, "parts")
    stopped = [train(stopping(parts, 5)), train(stopping(parts, 4)), train(parts)]
    assert [result.steps for result in stopped] == [5, 9, 10]
    assert [result.stopped for result in stopped] == ["--stop-after=5", "--stop-after=4", None]
    assert same_run(Path(config.out), Path(parts.out))
    assert [line["step"] for line in lines(parts.out)] == [1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 9, 10, 10]


def test_one_compilation_and_the_first_step_in_place(tmp_path, monkeypatch):
    """After going on from a checkpoint, as at the beginning."""
    config = tiny_run(tmp_path, steps=4, mesh=MeshConfig(fsdp=2, tensor=2))
    train(stopping(config, 2))
    from tpjax.step import lower_train_step

    states, compiled, compilations = [], [], []

    def pointers(state) -> set[int]:
        shards = [s for x in jax.tree.leaves(state) for s in x.addressable_shards]
        return {shard.data.unsafe_buffer_pointer() for shard in shards}

    class Lowered:
        def __init__(self, *of):
            self.step = lower_train_step(*of).compile()
            compiled.append(self)
            self.memory_analysis = self.step.memory_analysis

        def compile(self):
            return self

        def __call__(self, state, batch):
            states.append(pointers(state))
            before = len(compilations)
            done = self.step(state, batch)
            states.append(pointers(done[0]))
            assert len(compilations) == before
            return done

    def listen(event: str, *_, **__) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compilations.append(event)

    monkeypatch.setattr("tpjax.run.lower_train_step", Lowered)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        assert train(config).steps == 4
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(compilations) > 0
    assert len(compiled) == 1
    assert len(states) == 4
    assert all(state == states[0] for state in states)


def test_a_killed_run_goes_on_from_its_last_checkpoint(tmp_path, quick_runs, capsys):
    """What it had logged after that is there once, and what it had half-written not at all."""
    config = tiny_run(tmp_path, recovery=RecoveryConfig(checkpoint_every=2), eval_every=5)
    train(config)
    killed = again(config, "killed")
    train(stopping(killed, 7))
    out = Path(killed.out)
    checkpoint.drop(out / "checkpoints" / "00000007")  # killed before it was saved
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "lo')
    (events,) = out.glob("events.out.tfevents.*")
    events.write_bytes(events.read_bytes() + b"\x12\x00")
    partial = out / "checkpoints" / "00000008.orbax-checkpoint-tmp"
    shutil.copytree(out / "checkpoints" / "00000006", partial)
    assert train(killed).steps == 10
    assert f"going on from {out}/checkpoints/00000006" in capsys.readouterr().out
    assert same_run(Path(config.out), out)
    assert not partial.exists()
    assert event_steps(out) == event_steps(Path(config.out))


def event_steps(folder: Path) -> list[tuple[int, str, float]]:
    """What TensorBoard's files hold, but for times: read record by record."""
    import struct

    from tensorboardX.proto.event_pb2 import Event

    found = []
    for path in folder.glob("events.out.tfevents.*"):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            values = [(event.step, v.tag, v.simple_value) for v in event.summary.value]
            found += [v for v in values if v[1] in ("loss", "grad_norm", "lr", "eval_loss")]
    return sorted(found)


@pytest.mark.parametrize("damage", ["truncated", "empty folder"])
def test_a_run_falls_back_to_the_checkpoint_before(damage, tmp_path, quick_runs, capsys):
    import random

    from benchmarks.faults import spoil

    recovery = RecoveryConfig(checkpoint_every=3)
    config = tiny_run(tmp_path, recovery=recovery)
    train(config)
    damaged = again(config, "damaged")
    train(stopping(damaged, 7))
    spoil(Path(damaged.out, "checkpoints"), damage, random.Random(0))
    capsys.readouterr()
    train(damaged)
    said = capsys.readouterr().out
    checkpoints = f"{damaged.out}/checkpoints"
    reason = "is empty" if damage == "empty folder" else "has"
    assert f"{checkpoints}/00000007 {reason}" in said
    assert f"going on from {checkpoints}/00000006" in said
    assert Path(checkpoints, "00000007.damaged").is_dir()
    assert same_run(Path(config.out), Path(damaged.out))


def test_without_a_whole_checkpoint_nothing_is_begun_over(tmp_path, quick_runs):
    config = tiny_run(tmp_path, steps=2)
    train(config)
    (Path(config.out) / "checkpoints" / "00000002" / "run.json").unlink()
    before = (Path(config.out) / "metrics.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"no checkpoint in .* is whole: .*00000002 has no run"):
        train(config)
    assert (Path(config.out) / "metrics.jsonl").read_bytes() == before


def test_a_run_stopped_before_any_checkpoint_begins_again(tmp_path, quick_runs, capsys):
    config = tiny_run(tmp_path, steps=4)
    train(config)
    other = again(config, "other")
    train(stopping(other, 2))
    shutil.rmtree(Path(other.out) / "checkpoints" / "00000002")
    assert train(other).steps == 4
    said = f"no checkpoint in {other.out}/checkpoints: the run begins again"
    assert said in " ".join(capsys.readouterr().out.split())
    assert same_run(Path(config.out), Path(other.out))
    must = again(config, "new", recovery=RecoveryConfig(resume="must"))
    with pytest.raises(ConfigError, match=r"resume=must, but there is no checkpoint in .*/new/ch"):
        train(must)
    assert not Path(must.out).exists()


CHANGES = {
    "lr": ({"optim": OptimConfig(lr=2e-2, min_lr=1e-3)}, "--lr 0.01 → 0.02"),
    "steps": ({"steps": 12}, "--steps 4 → 12"),
    "seed": ({"seed": 3}, "--seed 0 → 3"),
    "update": (
        {"memory": MemoryConfig(update="layerwise", remat="full")},
        "--update whole → layerwise",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_settings_that_break_the_curve_need_force(change, tmp_path, quick_runs, capsys):
    config = tiny_run(tmp_path, steps=4)
    train(stopping(config, 2))
    settings, said = CHANGES[change]
    changed = dataclasses.replace(config, **settings)
    with pytest.raises(ConfigError) as refused:
        train(changed)
    assert "was begun with other settings: " in str(refused.value)
    assert said in str(refused.value)
    assert "--force to go on with these" in str(refused.value)
    assert "\n" not in str(refused.value)
    capsys.readouterr()
    result = train(dataclasses.replace(changed, force=True))
    assert result.steps == changed.steps
    assert said in capsys.readouterr().out


def test_another_text_needs_force_and_another_name_for_it_does_not(tmp_path, quick_runs):
    config = tiny_run(tmp_path, steps=4)
    train(stopping(config, 2))
    corpus = Path(config.data.corpus[0])
    renamed = corpus.rename(corpus.with_name("renamed.txt"))
    data = dataclasses.replace(config.data, corpus=(str(renamed),))
    assert train(stopping(dataclasses.replace(config, data=data), 1)).steps == 3
    renamed.write_text(renamed.read_text().replace("fox", "cat"))
    with pytest.raises(
        ConfigError, match=r"the text of --corpus \d+ \+ \d+ tokens, CRC-32 \w{8} →"
    ):
        train(dataclasses.replace(config, data=data))


def test_what_leaves_the_curve_alone_is_listed(tmp_path, quick_runs, capsys):
    config = tiny_run(tmp_path, steps=4)
    train(stopping(config, 2))
    capsys.readouterr()
    changed = dataclasses.replace(
        config,
        mesh=MeshConfig(tensor=4),
        memory=MemoryConfig(remat="full", params="bf16"),
        recovery=RecoveryConfig(keep=5),
    )
    train(changed)
    said = " ".join(capsys.readouterr().out.split())
    listed = "--mesh data=2,tensor=2 → tensor=4; --remat dots → full; --params fp32 → bf16"
    assert f"changed since then: {listed}" in said
    assert "the parameters are float32 in the checkpoint and bfloat16 from here on" in said
    assert "--keep" not in said


def test_other_versions_are_named(tmp_path, quick_runs, capsys, monkeypatch):
    config = tiny_run(tmp_path, steps=3)
    train(stopping(config, 2))
    from tpjax.resume import versions

    monkeypatch.setattr("tpjax.resume.versions", lambda: versions() | {"jax": "9.9"})
    train(config)
    said = " ".join(capsys.readouterr().out.split())
    assert f"other versions, so that last bits may differ: jax {jax.__version__} → 9.9" in said


def test_batches_of_another_size_begin_where_the_others_ended(tmp_path, quick_runs, monkeypatch):
    config = tiny_run(tmp_path, steps=4)
    train(stopping(config, 3))
    placed = []

    def spy(rows, mesh):
        placed.append(rows[0])
        return place(rows, mesh)

    monkeypatch.setattr("tpjax.run.place", spy)
    train(again(config, "unbroken"))
    following = placed[3]  # of the whole run's batches
    placed.clear()
    data = dataclasses.replace(config.data, batch_size=4)
    result = train(dataclasses.replace(config, data=data, force=True))
    np.testing.assert_array_equal(placed[0], following[:4])
    about, _ = checkpoint.About.read(result.checkpoint)
    assert about.progress.sequences == 3 * 8 + 4


def test_a_save_that_fails_is_said_and_the_run_goes_on_or_ends(
    tmp_path, quick_runs, monkeypatch, capsys
):
    real = checkpoint.check_space

    def full(folder: Path, needed: int) -> None:
        """No room for the second of three checkpoints."""
        metrics = Path(folder).parent / "metrics.jsonl"
        if metrics.exists() and len(metrics.read_text().splitlines()) == 4:
            raise OSError("it needs more than the disk has")
        real(folder, needed)

    monkeypatch.setattr("tpjax.checkpoint.check_space", full)
    config = tiny_run(tmp_path, steps=6, recovery=RecoveryConfig(checkpoint_every=2))
    result = train(config)
    said = " ".join(capsys.readouterr().out.split())
    warning = said.index("warning: checkpoint")
    assert said.index("step 4") < warning < said.index("step 5")
    assert (
        "00000004 could not be written: it needs more than the disk has; the last whole one is"
        in said
    )
    assert result.checkpoint.name == "00000006"
    ends = again(config, "ends", recovery=RecoveryConfig(checkpoint_every=2, on_save_error="stop"))
    with pytest.raises(SaveFailed, match=r"00000004 could not be written: .* one is .*00000002\."):
        train(ends)
    monkeypatch.setattr("tpjax.checkpoint.check_space", real)
    assert train(ends).steps == 6
    assert same_run(Path(config.out), Path(ends.out))


def test_a_last_checkpoint_that_cannot_be_written_is_an_error(tmp_path, quick_runs, monkeypatch):
    def fail(self, state, about) -> None:
        self._fail(Path("x"), OSError("no"))

    monkeypatch.setattr(Saver, "save", fail)
    with pytest.raises(SaveFailed, match="checkpoint x could not be written: no; there is none"):
        train(tiny_run(tmp_path, steps=3, recovery=RecoveryConfig(checkpoint_every=2)))


def test_no_room_for_one_checkpoint_is_seen_at_the_start(tmp_path, quick_runs, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(ConfigError, match=r"has no room for a checkpoint: it needs [\d,]+ bytes"):
        train(tiny_run(tmp_path, steps=3))


@pytest.mark.parametrize("when", ["compilation", "training", "evaluation", "saving"])
def test_a_signal_ends_a_run_that_can_go_on(when, tmp_path, quick_runs, monkeypatch, capfd):
    assert threading.current_thread() is threading.main_thread()
    places = {
        "compilation": ("tpjax.run.lower_eval_step", 1),
        "training": ("tpjax.training.live_memory", 4),
        "evaluation": ("tpjax.run.place", 6),  # of five batches to train on, and one held out
        "saving": ("tpjax.saver.Saver.save", 1),
    }
    config = tiny_run(tmp_path, steps=8, eval_every=4, recovery=RecoveryConfig(checkpoint_every=3))
    train(config)
    capfd.readouterr()
    target, time_to_send = places[when]
    module, name = target.rsplit(".", 1)
    owner = Saver if module.endswith("Saver") else __import__(module, fromlist=[name])
    real, calls = getattr(owner, name), []

    def sending(*of, **how):
        calls.append(1)
        if len(calls) == time_to_send:
            terminate()
        return real(*of, **how)

    monkeypatch.setattr(target, sending)
    stopped = again(config, "stopped")
    result = train(stopped)
    assert result.stopped == "SIGTERM"
    assert "SIGTERM: the run finishes its step, saves and stops" in capfd.readouterr().err
    assert result.steps == {"compilation": 0, "training": 4, "evaluation": 4, "saving": 3}[when]
    if when == "compilation":
        assert not Path(stopped.out).exists()
    else:
        assert result.checkpoint.name == f"{result.steps:08d}"
        assert not any("eval_loss" in line for line in lines(stopped.out))
    monkeypatch.setattr(target, real)
    assert train(stopped).stopped is None
    assert same_run(Path(config.out), Path(stopped.out))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_an_evaluation_is_there_once_however_often_it_is_stopped(tmp_path, quick_runs, monkeypatch):
    """Stopped in it, stopped in it again at the next start, and killed after it."""
    config = tiny_run(tmp_path, steps=8, eval_every=4)
    train(config)
    stopped = again(config, "stopped")
    for calls_before in (5, 0):  # batches placed before the held-out one
        placed = []

        def sending(rows, mesh, placed=placed, calls_before=calls_before):
            placed.append(1)
            if len(placed) == calls_before + 1:
                terminate()
            return place(rows, mesh)

        monkeypatch.setattr("tpjax.run.place", sending)
        result = train(stopped)
        assert (result.steps, result.stopped) == (4, "SIGTERM")
    monkeypatch.setattr("tpjax.run.place", place)
    train(stopping(stopped, 1))
    checkpoint.drop(Path(stopped.out) / "checkpoints" / "00000005")
    train(stopped)
    assert same_run(Path(config.out), Path(stopped.out))
    assert event_steps(Path(config.out)) == event_steps(Path(stopped.out))
    assert [line["step"] for line in lines(stopped.out) if "eval_loss" in line] == [4, 8]


def test_figures_are_the_systems_at_once_and_a_full_disk_is_no_end(tmp_path, capsys):
    metrics = {"loss": 1.0, "grad_norm": 2.0, "lr": 3.0, "tokens": 4.0}
    live = live_memory(jax.devices())
    with RunLog(tmp_path, 99) as log:
        log.step(1, metrics, live)
        log.evaluation(1, 5.0)
        values = [("eval_loss", 5.0), ("grad_norm", 2.0), ("loss", 1.0), ("lr", 3.0)]
        assert event_steps(tmp_path) == [(1, *value) for value in values]
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            for step in range(2, 40):
                log.step(step, metrics, live)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = capsys.readouterr().out
    assert said.count("warning: figures are lost, as they cannot be written: File too large") == 1


def test_event_files_that_are_broken_end_where_they_break(tmp_path):
    with RunLog(tmp_path, 9) as log:
        log.evaluation(1, 5.0)
    (events,) = tmp_path.glob("events.out.tfevents.*")
    whole = events.read_bytes()
    events.write_bytes(whole + (20).to_bytes(8, "little") + bytes([255] * 28))
    rewind(tmp_path, 5)
    assert events.read_bytes() == whole


def test_rewinding_keeps_what_is_whole(tmp_path):
    rows = ['{"step": 1}', '{"step": 2}', '{"step": 2, "eval_loss": 1.0}', '{"step": 3}']
    (tmp_path / "metrics.jsonl").write_text("\n".join([*rows, '"step"', "[3]", '{"step": 1']))
    rewind(tmp_path, 2)
    assert (tmp_path / "metrics.jsonl").read_text().splitlines() == rows[:3]


def test_batches_and_settings_of_a_run_are_in_its_checkpoint(tmp_path, quick_runs):
    config = tiny_run(tmp_path, steps=2)
    result = train(config)
    about = checkpoint.check(result.checkpoint)
    assert about.progress.sequences == 16
    assert about.progress.eval_loss == result.eval_loss
    assert about.config["optim"]["lr"] == config.optim.lr
    assert about.versions.keys() >= {"jax", "flax", "optax", "orbax-checkpoint", "python"}
    arrays = read_arrays(result.checkpoint)
    assert int(arrays["step"]) == 2
    assert np.isfinite(arrays["params.embedding"]).all()
    assert DataConfig(**about.config["data"]).seq_len == 32
