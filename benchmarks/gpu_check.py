"""Predicted against measured memory, and speed, of training steps on one real GPU.

    python -m benchmarks.gpu_check            # under six minutes; about 65 GiB at most
    python -m benchmarks.gpu_check --cpu      # only tries the plumbing, on a tiny model

Each measurement is a process of its own, so that no peak is another's. Predicted
is what the compiler says of the very program that then runs; `absent` is what it
says without looking at the card, compiled meanwhile in a further process; measured
is the allocator's peak, if the steps reached it and not the set-up (compilation
tries kernels out, initialisation has a peak of its own). The allocator hands out
whole blocks: up to 128 MiB of one may be unused and still count. `in_use_change_bytes`
and `pool_change_bytes` say by how much the two differed after the timed steps: 0, if
a step allocates nothing new. `pool` says whether the pool is the one asked for.
What fails is an entry with its reason. Needs jax, flax, optax and numpy, nothing else.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np

from tpjax.config import ConfigError, DataConfig, MemoryConfig, MeshConfig, PoolConfig, TrainConfig
from tpjax.data import place
from tpjax.flops import model_flops
from tpjax.gpus import GPUS
from tpjax.memory.compiled import compile_for, peak_bytes
from tpjax.memory.live import LiveMemory, check_pool, live_memory
from tpjax.mesh import gpu_driver_present, make_mesh, start_devices
from tpjax.presets import preset_run
from tpjax.resolve import resolve
from tpjax.state import create_state
from tpjax.step import lower_train_step

ROOT = Path(__file__).parent.parent
WARM_UP_STEPS = 2
# What an entry holds beside its case; None where it is not known, and a reason says why.
FIGURES = [
    "failure", "device_kind", "compile_seconds", "predicted_bytes", "absent_bytes",
    "absent_reason", "setup_peak_bytes", "measured_bytes", "measured_reason", "loss", "step_ms",
    "tokens_per_s", "model_flops", "mfu", "mfu_reason", "live", "pool", "in_use_change_bytes",
    "pool_change_bytes", "change_reason",
]  # fmt: skip
POOL = PoolConfig(pool_fraction=0.9)  # the largest case needs more than JAX's 0.75 of 80 GB


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step to measure; `state` is the dtype of the parameters and of the moments."""

    model: str
    batch_size: int = 8
    seq_len: int = 2048
    remat: str = "dots"
    state: str = "fp32"

    def config(self) -> TrainConfig:
        memory: dict = {"remat": self.remat, "params": self.state, "moments": self.state}
        return dataclasses.replace(
            preset_run(self.model),
            mesh=MeshConfig(),
            memory=MemoryConfig(**memory),
            data=DataConfig(batch_size=self.batch_size, seq_len=self.seq_len),
        )


# The most telling first, since the time may run out.
CASES = [
    Case(model="llama3.2-1b"),
    Case(model="llama3.2-1b", remat="full", state="bf16"),
    Case(model="gpt2", seq_len=1024),
    Case(model="smollm2-135m"),
    Case(model="qwen3-0.6b"),
    Case(model="llama3.2-1b", remat="none"),
    Case(model="llama3.2-1b", remat="attention"),
    Case(model="llama3.2-1b", remat="full"),
    Case(model="llama3.2-1b", state="bf16"),
    Case(model="gpt2", seq_len=1024, remat="none", state="bf16"),
    Case(model="smollm2-135m", remat="full", state="bf16"),
    Case(model="qwen3-0.6b", remat="attention", state="bf16"),
]
CPU_CASES = [Case(model="nano", batch_size=2, seq_len=64, remat=r) for r in ("none", "full")]


def dense_bf16_flops(device_kind: str) -> float | None:
    """The card's peak FLOP/s without sparsity, where the table knows it."""
    known = (gpu.rates["bf16"] for gpu in GPUS.values() if gpu.name == device_kind)
    return next(known, None)


def measure(case: Case, figures: dict, steps: int, backend: str) -> None:
    """Compiles and runs the step here; figures are put in as they come."""
    devices = start_devices(1, POOL)[:1]
    if devices[0].platform != backend:
        raise ConfigError(f"JAX runs on {devices[0].platform}, not on {backend}.")
    figures["pool"] = check_pool(POOL, devices)
    jax.config.update("jax_enable_compilation_cache", False)
    config = resolve(case.config(), num_devices=1, platform=backend)
    mesh = make_mesh(config.mesh or MeshConfig(), config.model, devices)
    start = time.perf_counter()
    step = lower_train_step(config, mesh).compile()
    figures["compile_seconds"] = time.perf_counter() - start
    figures |= {"device_kind": devices[0].device_kind, "predicted_bytes": peak_bytes(step)}
    state = jax.block_until_ready(create_state(config, mesh))
    setup_peak = figures["setup_peak_bytes"] = live_memory(devices).peak_bytes
    rng, shape, metrics = np.random.default_rng(0), (case.batch_size, case.seq_len), {}
    times, lives = [], []
    for _ in range(WARM_UP_STEPS + steps):
        tokens = rng.integers(0, config.model.vocab_size, (2, *shape), np.int32)
        batch = place((tokens[0], tokens[1], np.ones(shape, bool)), mesh)
        jax.block_until_ready(batch)
        start = time.perf_counter()
        state, metrics = jax.block_until_ready(step(state, batch))
        times.append(time.perf_counter() - start)
        lives.append(live_memory(devices))
    figures |= changes(lives[WARM_UP_STEPS - 1 :])
    live, seconds = lives[-1], statistics.median(times[WARM_UP_STEPS:])
    figures |= {"measured_bytes": live.peak_bytes, "measured_reason": live.peak_reason}
    if live.peak_bytes is not None and live.peak_bytes == setup_peak:
        figures |= {"measured_bytes": None, "measured_reason": "the set-up needed more"}
    rate, flops = dense_bf16_flops(devices[0].device_kind), model_flops(config)
    figures |= {"loss": float(metrics["loss"]), "step_ms": 1000 * seconds, "model_flops": flops}
    figures |= {"tokens_per_s": case.batch_size * case.seq_len / seconds}
    figures |= {"mfu": flops / seconds / rate if rate else None, "live": dataclasses.asdict(live)}
    figures["mfu_reason"] = (
        None if rate else f"the peak rate of {devices[0].device_kind} is unknown"
    )


def changes(lives: list[LiveMemory]) -> dict:
    """By how much what is in use, and the pool, differ between moments of one device."""
    devices, found = [live.devices[0] for live in lives], {}
    for figure, name in (("bytes_in_use", "in_use"), ("pool_bytes", "pool")):
        sizes = [getattr(device, figure) for device in devices]
        found[f"{name}_change_bytes"] = None if None in sizes else max(sizes) - min(sizes)
        if None in sizes:
            reasons = (device.reasons.get(figure) for device in devices)
            found["change_reason"] = next(filter(None, reasons), None)
    return found


def predict(case: Case, figures: dict, gpu: str) -> None:
    """The peak as compiled for a card that is not looked at."""
    start_devices(1)
    figures["absent_bytes"] = compile_for(case.config(), gpu=gpu).peak_bytes


def one(task: dict) -> None:
    """A child's whole work: prints its figures, and with them what went wrong."""
    figures: dict = {}
    try:
        case = Case(**task["case"])
        if gpu := task.get("gpu"):
            predict(case, figures, gpu)
        else:
            measure(case, figures, task["steps"], task["backend"])
    except Exception as error:
        figures["failure"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    print(json.dumps(figures))


def run_child(command: list[str], seconds: float, **environment: str) -> dict:
    """The figures on a process's last line; a `failure` where it has none."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, cwd=ROOT, check=False,
            env=os.environ | environment,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"failure": f"not finished after {seconds:.0f} s"}
    with_figures = (done.stdout.splitlines() or [""])[-1]
    if with_figures.startswith("{"):
        return json.loads(with_figures)
    last = (done.stderr.strip().splitlines() or ["no message"])[-1]
    return {"failure": f"the process ended with status {done.returncode}: {last[:300]}"}


def entry(case: Case, seconds: float, steps: int, backend: str, kind: str | None) -> dict:
    """One case's figures, at most `seconds` from now."""
    result = dataclasses.asdict(case) | dict.fromkeys(FIGURES)
    if seconds <= 0:
        return result | {"failure": "not measured, because the time was up"}
    command = [sys.executable, "-m", "benchmarks.gpu_check", "--one"]
    task: dict = {"case": dataclasses.asdict(case), "steps": steps, "backend": backend}
    here = {"JAX_PLATFORMS": "cpu"} if backend == "cpu" else {}
    gpu = next((name for name, gpu in GPUS.items() if gpu.name == kind), None)
    with ThreadPoolExecutor(2) as pool:
        there = pool.submit(
            run_child, [*command, json.dumps(task | {"gpu": gpu})], seconds,
            JAX_PLATFORMS="cpu", CUDA_VISIBLE_DEVICES="",
        ) if gpu else None  # fmt: skip
        result |= run_child([*command, json.dumps(task)], seconds, **here)
    absent = there.result() if there else {"failure": f"the table has no {kind}"}
    result |= {"absent_bytes": absent.get("absent_bytes"), "absent_reason": absent.get("failure")}
    return result


def card() -> tuple[str | None, str | None]:
    """Name and driver version as the driver says, without starting JAX on it."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
        name, driver = said.stdout.splitlines()[0].rsplit(", ", 1)
        return name, driver
    except (OSError, subprocess.SubprocessError, IndexError, ValueError):
        return None, None


def table(entries: list[dict]) -> str:
    """For a person: GiB and milliseconds; "-" is not known, and reasons stand below."""
    head = "model batch tokens remat state predicted absent measured diff ms/step tokens/s MFU"
    forms = ("{:.3f}", "{:.3f}", "{:.3f}", "{:+.1%}", "{:.1f}", "{:,.0f}", "{:.1%}")
    lines, reasons = [[str(word) for word in head.split()]], []
    for e in entries:
        sizes = [e[f"{name}_bytes"] for name in ("predicted", "absent", "measured")]
        diff = None if None in sizes[::2] else sizes[2] / sizes[0] - 1
        figures = [x if x is None else x / 2**30 for x in sizes]
        figures += [diff, e["step_ms"], e["tokens_per_s"], e["mfu"]]
        case = [str(e[f.name]) for f in dataclasses.fields(Case)]
        shown = zip(forms, figures, strict=True)
        lines.append(case + ["-" if x is None else form.format(x) for form, x in shown])
        why = {e[key] for key in ("failure", "measured_reason", "absent_reason", "mfu_reason")}
        grown = {name: e[f"{name}_change_bytes"] for name in ("in_use", "pool")}
        why |= {f"steps allocate: {n} changed by {size} bytes" for n, size in grown.items() if size}
        reasons += [f"{' '.join(case)}: {'; '.join(sorted(why - {None}))}"] if why - {None} else []
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rows = ["  ".join(map(str.rjust, line, widths)) for line in lines]
    return "\n".join([*rows, "", *reasons])


def check(cases: list[Case], args: argparse.Namespace, out: Path, about: dict) -> list[dict]:
    """Every case in turn; what there is so far is in `out` after each."""
    end, entries = time.monotonic() + 60 * args.minutes, []
    for number, case in enumerate(cases, 1):
        print(f"{number}/{len(cases)} {case}", flush=True)
        seconds = min(args.each, end - time.monotonic())
        backend = "cpu" if args.cpu else "gpu"
        entries.append(entry(case, seconds, args.steps, backend, about["device"]))
        out.write_text(json.dumps(about | {"measurements": entries}, indent=2) + "\n")
    return entries


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cpu", action="store_true", help="try the plumbing on a tiny model")
    parser.add_argument("--minutes", type=float, default=5.7, help="for all measurements")
    parser.add_argument("--each", type=float, default=100, help="seconds for one, at most")
    parser.add_argument("--steps", type=int, default=8, help="timed steps")
    parser.add_argument("--out", type=Path, help="by default benchmarks/results/<device>.json")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        return one(args.one)
    if not args.cpu and not gpu_driver_present():
        parser.error("no NVIDIA driver finds a GPU here; --cpu tries the plumbing without one.")
    name, driver = ("cpu", None) if args.cpu else card()
    about = {
        "device": name,
        "driver": driver,
        "date": f"{datetime.datetime.now(datetime.UTC):%F %R}",
    }
    if driver is None:
        about["driver_reason"] = "runs on the CPU" if args.cpu else "nvidia-smi does not answer"
    about |= {package: version(package) for package in ("jax", "jaxlib", "flax", "optax")}
    about |= {"steps": args.steps, "minutes": args.minutes}
    slug = "-".join((name or "unknown gpu").lower().split())
    out = args.out or ROOT / "benchmarks" / "results" / f"{slug}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    entries = check(CPU_CASES if args.cpu else CASES, args, out, about)
    print(f"{table(entries)}\nwritten to {out}")
    return None


if __name__ == "__main__":
    main()
