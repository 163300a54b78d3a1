"""What goes wrong beside checkpoints: bad steps, spikes, signals, two runs in one folder."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from conftest import initial_state, mesh_of, random_batch, tiny_config, tiny_run, to_numpy

from tpjax import checkpoint
from tpjax.config import ConfigError, MemoryConfig, RecoveryConfig, TrainConfig
from tpjax.data import EvalBatches, TrainBatches, check_rows
from tpjax.folder import RunFolder
from tpjax.health import Health
from tpjax.loop import Diverged, train
from tpjax.preemption import STOPPED_STATUS
from tpjax.step import lower_train_step
from tpjax.tokenizer import ByteTokenizer

ROOT = Path(__file__).parent.parent


def lines(out: str) -> list[dict]:
    return [json.loads(x) for x in Path(out, "metrics.jsonl").read_text().splitlines()]


def train_with(monkeypatch, config: TrainConfig, losses: dict[int, float], norm: float = 1.0):
    """A run whose steps say these losses; what they do to the state is not looked at."""
    import tpjax.run

    lower = tpjax.run.lower_train_step

    def lowered(*of):
        step, number = lower(*of).compile(), [0]

        def run(state, batch):
            number[0] += 1
            state, metrics = step(state, batch)
            if number[0] in losses:
                metrics |= {"loss": losses[number[0]], "grad_norm": norm}
            return state, metrics

        run.memory_analysis = step.memory_analysis
        return SimpleNamespace(compile=lambda: run)

    monkeypatch.setattr("tpjax.run.lower_train_step", lowered)
    try:
        return train(config)
    finally:
        monkeypatch.setattr("tpjax.run.lower_train_step", lower)


NAN = float("nan")


def test_bad_steps_are_counted_and_shown(tmp_path, quick_runs, monkeypatch, capsys):
    config = tiny_run(tmp_path, recovery=RecoveryConfig(checkpoint_every=0, max_bad_steps=3))
    result = train_with(monkeypatch, config, {3: NAN, 4: NAN, 6: float("inf")})
    assert (result.steps, result.bad_steps) == (10, 3)
    said = " ".join(capsys.readouterr().out.split())
    assert "step 3: the loss of batch 2 is not finite; the step was left out (1 in a row)" in said
    assert "step 4: the loss of batch 3 is not finite; the step was left out (2 in a row)" in said
    assert "step 6: the loss of batch 5 is not finite; the step was left out (1 in a row)" in said
    assert [x["step"] for x in lines(config.out) if x.get("loss", 0) is None] == [3, 4, 6]
    assert checkpoint.check(result.checkpoint).progress.health.bad_steps == 3


@pytest.mark.parametrize("stop_after", [0, 5])
def test_too_many_bad_steps_end_the_run(stop_after, tmp_path, quick_runs, monkeypatch):
    """Counted over an interruption too."""
    recovery = RecoveryConfig(checkpoint_every=3, max_bad_steps=3, stop_after=stop_after)
    config = tiny_run(tmp_path, recovery=recovery)
    bad = {4: NAN, 5: NAN, 6: NAN}
    if stop_after:
        assert train_with(monkeypatch, config, bad).stopped == "--stop-after=5"
        config = dataclasses.replace(config, recovery=dataclasses.replace(recovery, stop_after=0))
        bad = {1: NAN}
    with pytest.raises(Diverged) as ended:
        train_with(monkeypatch, config, bad)
    out, last = config.out, "00000005" if stop_after else "00000003"
    assert str(ended.value) == (
        "the loss of step 6 is not finite; parameters are as before the last 3 steps, which were "
        "left out (--max-bad-steps=3). Lower --lr or --clip, which is 1, and go on with --force. "
        f"The last good checkpoint: {out}/checkpoints/{last}; the batch: {out}/bad-batch-6.npz."
    )
    text = np.frombuffer(Path(config.data.corpus[0]).read_bytes() + b"\0", np.uint8)
    tokens = [*text[:-1].tolist(), 256]
    train_tokens = np.array(tokens[: len(tokens) - len(tokens) // 10], np.uint16)
    again = TrainBatches(train_tokens, 8, 32, config.seed).rows(5)
    with np.load(f"{out}/bad-batch-6.npz", allow_pickle=False) as saved:
        for name, rows in zip(("tokens_BT", "targets_BT", "valid_BT"), again, strict=True):
            np.testing.assert_array_equal(saved[name], rows)
    assert ByteTokenizer().decode(again[0][0].tolist()) in text.tobytes().decode()


def test_layer_by_layer_a_bad_gradient_ends_the_run_at_the_last_checkpoint(
    tmp_path, quick_runs, monkeypatch
):
    memory = MemoryConfig(update="layerwise", remat="full")
    config = tiny_run(tmp_path, memory=memory, recovery=RecoveryConfig(checkpoint_every=3))
    with pytest.raises(Diverged) as ended:
        train_with(monkeypatch, config, {5: 2.0}, norm=NAN)
    said = str(ended.value)
    assert "with --update=layerwise that is found when other layers are updated already" in said
    assert f"The last good checkpoint: {config.out}/checkpoints/00000003;" in said
    assert sorted(p.name for p in Path(config.out, "checkpoints").iterdir()) == ["00000003"]
    assert train(config).steps == 10


@pytest.mark.parametrize("memory", [{}, {"update": "layerwise", "remat": "full"}])
def test_a_bad_loss_changes_nothing_on_any_device(memory):
    """Not the parameters, nor the moments, nor the schedule's count; only the steps go on."""
    config = tiny_config("data=2,tensor=2", **memory)
    mesh = mesh_of(config)
    state = initial_state(config, mesh)
    gain = state.params["norm"]["gain"]
    nan = jax.device_put(np.full(gain.shape, np.nan, np.float32), gain.sharding)
    poisoned = {**state.params, "norm": {"gain": nan}}
    before = to_numpy(dataclasses.replace(state, params=poisoned))
    step = lower_train_step(config, mesh).compile()
    after, metrics = step(dataclasses.replace(state, params=poisoned), random_batch(config, mesh))
    assert not np.isfinite(float(metrics["loss"]))
    assert int(after.step) == int(before.step) + 1
    for was, now in zip(
        *(dataclasses.astuple(x)[2:4] for x in (before, to_numpy(after))), strict=True
    ):
        assert_same(was, now)
    for leaf in (after.params["norm"]["gain"], after.opt_state["rest"][0].step):
        assert len({np.asarray(s.data).tobytes() for s in leaf.addressable_shards}) == 1


def assert_same(was, now) -> None:
    jax.tree.map(np.testing.assert_array_equal, was, now)


def test_a_spike_is_flagged(tmp_path, quick_runs, monkeypatch, capsys):
    config = tiny_run(tmp_path)
    train_with(monkeypatch, config, dict.fromkeys(range(1, 11), 2.0) | {7: 20.0})
    assert "step 7: the loss 20.000 is 10.0 × its running level" in capsys.readouterr().out
    assert [line["step"] for line in lines(config.out) if line.get("spike") == 10.0] == [7]


def test_levels_and_rows_of_bad_steps():
    health = Health()
    assert health.spike(100.0) is None
    for loss in (4.0, 2.0):
        health = health.after(loss, 1.0, 1.0)
    assert (health.level, health.spike(8.9), health.spike(9.0)) == (3.0, None, 3.0)
    assert health.spike(NAN) is None
    bad = health.after(NAN, 1.0, 1.0).after(2.0, NAN, 1.0)
    assert (bad.in_a_row, bad.bad_steps, bad.level) == (2, 2, 3.0)
    assert bad.after(2.0, NAN, 2.0**16).in_a_row == 0  # a smaller loss scale will do
    assert bad.after(NAN, NAN, 2.0**16).in_a_row == 3
    for _ in range(1000):
        health = health.after(1.0, 1.0, 1.0)
    assert health.level == pytest.approx(1.0, abs=1e-6)


@pytest.mark.parametrize("token", [-1, 257])
def test_token_ids_outside_the_vocabulary_are_named(token, tmp_path, quick_runs, monkeypatch):
    rows = TrainBatches.rows

    def wrong(self, number):
        tokens, targets, valid = rows(self, number)
        tokens = tokens.copy()
        tokens[3, 5] = token if number == 2 else tokens[3, 5]
        return tokens, targets, valid

    monkeypatch.setattr(TrainBatches, "rows", wrong)
    said = f"batch 2: token id {token} at position 5 of sequence 3 is outside the vocabulary of 257"
    with pytest.raises(ConfigError, match=said):
        train(tiny_run(tmp_path))
    check_rows(EvalBatches(np.arange(100, dtype=np.uint16), 2, 8).rows(0), 100, "all in it")


def test_one_run_has_a_folder(tmp_path, quick_runs):
    config = tiny_run(tmp_path, steps=2)
    with RunFolder(config):
        said = rf"out {config.out} is in use by another run \(process {os.getpid()} on "
        with pytest.raises(ConfigError, match=said):
            train(config)
    assert not Path(config.out).exists()  # neither left anything
    assert train(config).steps == 2


def test_a_killed_run_leaves_no_lock(tmp_path):
    config = tiny_run(tmp_path)
    code = (
        "import sys, time; sys.path.insert(0, 'tests')\n"
        "from types import SimpleNamespace as N; from tpjax.folder import RunFolder\n"
        f"c = N(out={config.out!r}, dry_run=False, recovery=N(resume='auto'))\n"
        "RunFolder(c).__enter__(); print('held', flush=True); time.sleep(99)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, cwd=ROOT)
    assert holder.stdout.readline() == b"held\n"
    with pytest.raises(ConfigError, match=rf"another run \(process {holder.pid} on "):
        RunFolder(config).__enter__()
    holder.kill()
    holder.wait()
    holder.stdout.close()
    with RunFolder(config):
        pass


def test_a_folder_that_is_not_writable_is_named(tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir()
    locked.chmod(0o555)
    config = dataclasses.replace(tiny_run(tmp_path), out=str(locked / "run"))
    if os.access(locked, os.W_OK):  # as root
        (locked / "file").write_text("")
        config = dataclasses.replace(config, out=str(locked / "file" / "run"))
    with pytest.raises(ConfigError, match=rf"out {config.out} cannot be written: "):
        RunFolder(config).__enter__()


def test_a_second_signal_ends_the_process_even_in_a_compiler():
    """The main thread is in a call that does not come back, as a compilation is."""
    code = (
        "import os, threading, time; from tpjax.preemption import Preemption\n"
        "def send():\n"
        "    for _ in range(2): time.sleep(0.3); os.kill(os.getpid(), 15)\n"
        "threading.Thread(target=send, daemon=True).start()\n"
        "with Preemption(): import hashlib; hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)"
    )
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert time.monotonic() - begun < 60
    assert done.returncode == 128 + signal.SIGTERM
    first, second = done.stderr.splitlines()
    assert first.startswith("SIGTERM: the run finishes its step, saves and stops; once more")
    assert second == "SIGTERM again: stopped at once, without saving."


def test_a_stopped_program_says_how_to_go_on(tmp_path):
    corpus = tmp_path / "a.txt"
    corpus.write_text("some text " * 500)
    flags = f"--steps 500 --devices 1 --seq-len 64 --out {tmp_path}/run --corpus {corpus}"
    command = [sys.executable, "-m", "experiments.train", *flags.split()]
    env = os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    run = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=env
    )
    metrics = tmp_path / "run" / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 3:
        assert run.poll() is None
        time.sleep(0.05)
    run.send_signal(signal.SIGINT)
    out, err = run.communicate()
    assert run.returncode == STOPPED_STATUS == 75
    assert "SIGINT: the run finishes its step" in err
    assert "Traceback" not in out + err
    last = out.splitlines()[-1]
    steps = metrics.read_text().count("\n")
    assert last == (
        f"stopped by SIGINT after step {steps} of 500; to go on: "
        f"python -m experiments.train {flags}"
    )
    assert checkpoint.newest(tmp_path / "run" / "checkpoints")[0].path.name == f"{steps:08d}"
