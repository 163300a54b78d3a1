"""The check of a real GPU, as far as it goes without one: plumbing, and what failures become."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from itertools import chain, repeat
from pathlib import Path

import pytest

from benchmarks import gpu_check
from benchmarks.gpu_check import FIGURES, Case, entry, run_child, table
from tpjax.config import ConfigError
from tpjax.gpus import GPUS
from tpjax.memory.live import DeviceMemory, LiveMemory
from tpjax.mesh import gpu_driver_present

ROOT = Path(__file__).parent.parent
NOT_THERE = ("tyro", "tensorboardX", "tokenizers", "pyarrow", "matplotlib")  # flax brings rich


def check(*flags: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.gpu_check", *flags],
        capture_output=True, text=True, cwd=ROOT, env=os.environ | environment, check=False,
    )  # fmt: skip


def test_the_plumbing_runs_with_little_installed(tmp_path):
    """One process per measurement, none of which may import what the rented machine lacks."""
    for package in NOT_THERE:
        (tmp_path / f"{package}.py").write_text(f"raise ImportError('no {package} there')\n")
    out = tmp_path / "new folder" / "cpu.json"
    done = check("--cpu", "--steps=2", f"--out={out}", PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    result = json.loads(out.read_text(), parse_constant=pytest.fail)
    assert (result["device"], result["driver"]) == ("cpu", None)
    assert result["driver_reason"] == "runs on the CPU"
    assert {"jax", "jaxlib", "date", "steps", "minutes"} <= result.keys()
    none, full = result["measurements"]
    for found, case in ((none, gpu_check.CPU_CASES[0]), (full, gpu_check.CPU_CASES[1])):
        assert found.keys() == dataclasses.asdict(case).keys() | set(FIGURES)
        assert dataclasses.asdict(case).items() <= found.items()
        assert found["failure"] is None
        assert found["measured_bytes"] is None
        assert found["measured_reason"] == "the cpu backend reports no memory statistics"
        assert found["pool"] == (
            "--pool-fraction=0.9: no effect, because simulated devices have no pool"
        )
        assert (found["in_use_change_bytes"], found["pool_change_bytes"]) == (None, None)
        assert found["change_reason"] == found["measured_reason"]
        assert (found["mfu"], found["mfu_reason"]) == (None, "the peak rate of cpu is unknown")
        assert (found["absent_bytes"], found["absent_reason"]) == (None, "the table has no cpu")
        tokens = case.batch_size * case.seq_len
        assert found["tokens_per_s"] == pytest.approx(1000 * tokens / found["step_ms"])
        assert found["compile_seconds"] > 0
        assert 5 < found["loss"] < 6  # ln 257, nothing learned
        assert found["live"]["host_bytes"] > 2**20
    assert none["predicted_bytes"] > full["predicted_bytes"] > 12 * 800_000  # the state alone
    assert "nano      2      64   full" in done.stdout
    assert str(out) in done.stdout


@pytest.mark.skipif(gpu_driver_present(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do():
    done = check()
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("--cpu tries the plumbing without one.")


def test_when_the_time_is_up_nothing_is_started(tmp_path):
    out = tmp_path / "none.json"
    assert check("--cpu", "--minutes=0", f"--out={out}").returncode == 0
    entries = json.loads(out.read_text())["measurements"]
    assert len(entries) == len(gpu_check.CPU_CASES)
    for found in entries:
        assert found["failure"] == "not measured, because the time was up"
        assert [found[name] for name in FIGURES[1:]] == [None] * len(FIGURES[1:])


def test_a_child_that_fails_is_an_entry_with_its_reason():
    found = entry(Case(model="nano", remat="dotz"), 60, 1, "cpu", "cpu")
    assert found["failure"].startswith("ConfigError: remat='dotz' is not a choice.")
    assert (found["predicted_bytes"], found["measured_bytes"], found["step_ms"]) == (None,) * 3
    assert found["failure"] in table([found])


@pytest.mark.parametrize(
    ("code", "failure"),
    [
        ("import os; os.abort()", "the process ended with status -6: no message"),
        ("raise SystemExit('no room')", "the process ended with status 1: no room"),
        ("print('not figures')", "the process ended with status 0: no message"),
        ("import time; time.sleep(60)", "not finished after 1 s"),
    ],
)
def test_a_child_that_says_nothing_is_a_failure(code, failure):
    assert run_child([sys.executable, "-c", code], 1 if "sleep" in code else 30) == {
        "failure": failure
    }


def test_what_a_child_knew_before_it_failed_is_kept(monkeypatch, capsys):
    """A step that does not fit: predicted, but not measured."""

    def measure(case, figures, steps, backend):
        figures["predicted_bytes"] = 7
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nwhile trying to allocate 99 bytes")

    monkeypatch.setattr(gpu_check, "measure", measure)
    gpu_check.one({"case": {"model": "nano"}, "steps": 1, "backend": "gpu"})
    assert json.loads(capsys.readouterr().out) == {
        "predicted_bytes": 7,
        "failure": "RuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 99 "
        "bytes",
    }


def live(peak: int, **more: int) -> LiveMemory:
    others = [f.name for f in dataclasses.fields(DeviceMemory)][1:-1]
    figures = dict.fromkeys(others) | {"peak_bytes_in_use": peak} | more
    device = DeviceMemory(device="cuda:0", **figures, reasons={})
    return LiveMemory(devices=(device,), host_bytes=1, host_peak_bytes=1)


def test_the_measured_peak_is_that_of_the_steps(monkeypatch):
    """Where the set-up had needed as much or more, it says nothing of them."""
    monkeypatch.setattr(gpu_check, "dense_bf16_flops", lambda kind: 1e12)
    case = Case(model="nano", batch_size=1, seq_len=16, remat="full")
    for peaks, measured in (((100, 150), 150), ((150, 150), None)):
        answers = chain([live(peaks[0])], repeat(live(peaks[1])))
        monkeypatch.setattr(gpu_check, "live_memory", lambda _, answers=answers: next(answers))
        found: dict = {}
        gpu_check.measure(case, found, 1, "cpu")
        assert (found["setup_peak_bytes"], found["measured_bytes"]) == (peaks[0], measured)
        assert found["measured_reason"] == (None if measured else "the set-up needed more")
        assert found["mfu"] == pytest.approx(
            found["model_flops"] / (found["step_ms"] / 1000) / 1e12
        )
        assert found["mfu_reason"] is None


def test_what_changes_after_the_second_step_is_told(monkeypatch):
    """The set-up and the first step may be other than the rest."""
    case, moments = Case(model="nano", batch_size=1, seq_len=16), [(1, 9), (5, 9), (7, 8), (7, 8)]
    for later, expected in (((7, 8), (0, 0)), ((7, 10), (0, 2)), ((4, 8), (3, 0))):
        sizes = [*moments[:3], later, moments[3]]
        answers = iter([live(9, bytes_in_use=use, pool_bytes=pool) for use, pool in sizes])
        monkeypatch.setattr(gpu_check, "live_memory", lambda _, answers=answers: next(answers))
        found: dict = dict.fromkeys(FIGURES)
        gpu_check.measure(case, found, 2, "cpu")
        assert (found["in_use_change_bytes"], found["pool_change_bytes"]) == expected
        printed = table([dataclasses.asdict(case) | found])
        assert ("steps allocate" in printed) == (expected != (0, 0))


def test_a_gpus_measurement_never_falls_back_to_the_cpu():
    with pytest.raises(ConfigError, match="JAX runs on cpu, not on gpu"):
        gpu_check.measure(Case(model="nano"), {}, 1, "gpu")


def test_a_gpus_entry_has_the_prediction_of_the_absent_card_beside_it(monkeypatch):
    asked = []

    def child(command, seconds, **environment):
        task = json.loads(command[-1])
        asked.append((task.get("gpu"), environment.get("JAX_PLATFORMS")))
        return {"absent_bytes": 3} if "gpu" in task else {"failure": "crashed"}

    monkeypatch.setattr(gpu_check, "run_child", child)
    found = entry(Case(model="gpt2"), 60, 1, "gpu", GPUS["h100"].name)
    assert (found["absent_bytes"], found["absent_reason"], found["failure"]) == (3, None, "crashed")
    assert sorted(asked, key=str) == [("h100", "cpu"), (None, None)]


def test_the_rate_is_of_the_card_that_the_driver_names():
    assert gpu_check.dense_bf16_flops("NVIDIA H100 80GB HBM3") == pytest.approx(989.4e12)
    assert gpu_check.dense_bf16_flops("cpu") is None


def test_the_cases_are_sound_and_differ():
    assert len(set(gpu_check.CASES)) == len(gpu_check.CASES)
    assert {case.config().memory.remat for case in gpu_check.CASES} == {
        "none", "dots", "attention", "full"
    }  # fmt: skip
