"""One training run that meets many faults, against the same run left alone.

    python -m benchmarks.faults --kills 50 --others 4 --json FILE

Both train `nano` for the same steps, with a checkpoint every few of them. One is killed (SIGKILL)
at random moments, told to stop (SIGTERM), and finds its newest checkpoint truncated, emptied or
replaced by an empty folder; each time the same command starts it again. At the end its parameters,
moments and losses have to be those of the other, bit for bit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import orbax.checkpoint as ocp
from rich.console import Console
from rich.table import Table

from tpjax.checkpoint import newest, steps_in
from tpjax.mesh import stay_off_missing_gpus

FLAGS = "--model nano --seq-len 64 --batch-size 4 --devices 2 --keep 3 --deterministic"
CHECKPOINT_EVERY = 2
START_SECONDS = 6.0  # kills at the start come within so many seconds
START_SHARE = 0.2  # of the kills
SPOILED = ("truncated", "emptied", "empty folder")


@dataclass
class Outcome:
    """What was done to a run, and what became of it."""

    faults: Counter = field(default_factory=Counter)
    during_save: int = 0
    not_resumed: list[str] = field(default_factory=list)
    equal: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--others", type=int, default=4, help="times each of the other faults")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", default="")
    args = parser.parse_args()
    stay_off_missing_gpus()
    with tempfile.TemporaryDirectory(prefix="tpjax-faults-") as folder:
        unbroken, broken = Path(folder, "unbroken"), Path(folder, "broken")
        assert _start(unbroken, args.steps).wait() == 0, "the run without faults failed"
        kinds = ["kill"] * args.kills + ["SIGTERM", *SPOILED] * args.others
        outcome = run_with_faults(broken, args.steps, kinds, random.Random(args.seed))
        outcome.equal = same_run(unbroken, broken)
    Console().print(table(outcome, args.steps))
    if args.json:
        result = {"steps": args.steps, "seed": args.seed, **vars(outcome)}
        Path(args.json).write_text(json.dumps(result, indent=2) + "\n")
    raise SystemExit(0 if outcome.equal and not outcome.not_resumed else 1)


def run_with_faults(out: Path, steps: int, kinds: list[str], rng: random.Random) -> Outcome:
    """Starts the run again after each fault, until it ends by itself."""
    outcome, kinds = Outcome(), rng.sample(kinds, len(kinds))
    steps_at = sorted(rng.randrange(1, steps) for _ in kinds)
    for kind, step in zip(kinds, steps_at, strict=True):
        before, partial = _records(out), _partial(out)
        whole = newest(out / "checkpoints")[0]
        process = _start(out, steps)
        if kind == "kill" and rng.random() < START_SHARE:
            _wait(process, rng.uniform(0, START_SECONDS))
        else:
            _wait_for_step(process, out, step, before)
            time.sleep(rng.uniform(0, 0.15))
            if whole and f"going on from {whole.path}" not in _said(out):
                outcome.not_resumed.append(f"{kind} at step {step}: began elsewhere")
        outcome.during_save += bool(_partial(out) - partial)
        process.send_signal(signal.SIGTERM if kind == "SIGTERM" else signal.SIGKILL)
        status = process.wait()
        if status not in (-signal.SIGKILL, 75):
            outcome.not_resumed.append(f"{kind} at step {step}: status {status}")
        if kind in SPOILED:
            spoil(out / "checkpoints", kind, rng)
        outcome.faults[kind] += 1
    if status := _start(out, steps).wait():
        outcome.not_resumed.append(f"the last start: status {status}")
    return outcome


def spoil(checkpoints: Path, kind: str, rng: random.Random) -> None:
    """Damages the newest checkpoint."""
    steps = steps_in(checkpoints)
    if not steps:
        return
    path = steps[-1]
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.stat().st_size)
    data = [file for file in files if file.parent.name == "d"]
    if kind == "empty folder":
        shutil.rmtree(path)
        path.mkdir()
    elif kind == "emptied":
        for file in files:
            file.write_bytes(b"")
    elif data:  # not emptied by the fault before
        chosen = rng.choice(data)
        with chosen.open("r+b") as file:
            file.truncate(rng.randrange(chosen.stat().st_size))


def same_run(one: Path, other: Path) -> bool:
    """Whether two runs' last states and losses are the same bits, each step there once."""
    states = [read_arrays(steps_in(out / "checkpoints")[-1]) for out in (one, other)]
    lines = [
        [json.loads(x) for x in (out / "metrics.jsonl").read_text().splitlines()]
        for out in (one, other)
    ]
    names = ("step", "loss", "grad_norm", "lr", "eval_loss")
    curves = [[[line.get(name) for name in names] for line in of] for of in lines]
    same = states[0].keys() == states[1].keys() and curves[0] == curves[1]
    return same and all(states[0][n].tobytes() == states[1][n].tobytes() for n in states[0])


def read_arrays(path: Path) -> dict[str, np.ndarray]:
    """A checkpoint's arrays by name, by Orbax alone."""
    checkpointer = ocp.PyTreeCheckpointer()
    metadata = checkpointer.metadata(path).item_metadata
    assert metadata is not None
    as_numpy = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in metadata.tree}
    return checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=as_numpy))


def table(outcome: Outcome, steps: int) -> Table:
    table = Table("fault", "times", title=f"nano, {steps} steps", title_justify="left")
    for kind, times in outcome.faults.items():
        table.add_row(kind, str(times))
    table.add_row("… of them while a checkpoint was being written", str(outcome.during_save))
    table.add_row("starts that did not go on", str(len(outcome.not_resumed)))
    same = "yes" if outcome.equal else "NO"
    table.add_row("state and losses equal the unbroken run's, bit for bit", same)
    return table


def _start(out: Path, steps: int) -> subprocess.Popen:
    flags = f"{FLAGS} --steps {steps} --checkpoint-every {CHECKPOINT_EVERY} --out {out}"
    command = [sys.executable, "-m", "experiments.train", *flags.split()]
    with out.with_suffix(".log").open("wb") as log:  # of this start alone
        wide = os.environ | {"COLUMNS": "999", "PYTHONUNBUFFERED": "1"}
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=wide)


def _said(out: Path) -> str:
    return out.with_suffix(".log").read_text(errors="replace")


def _partial(out: Path) -> set[tuple[str, int]]:
    """Folders of checkpoints that are being written, or were when the run was killed."""
    folder = out / "checkpoints"
    there = list(folder.iterdir()) if folder.is_dir() else []
    found = set()
    for path in there:
        with contextlib.suppress(FileNotFoundError):  # it has just got its name
            found |= {(path.name, path.stat().st_ino)} if ".orbax" in path.name else set()
    return found


def _wait(process: subprocess.Popen, seconds: float) -> None:
    end = time.monotonic() + seconds
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)


def _records(out: Path) -> int | None:
    """Which file metrics.jsonl is; each start of the run makes a new one of it."""
    metrics = out / "metrics.jsonl"
    return metrics.stat().st_ino if metrics.exists() else None


def _wait_for_step(process: subprocess.Popen, out: Path, step: int, before: int | None) -> None:
    """Until this start of the run has logged a step, and that one is behind it."""
    while process.poll() is None:
        if _records(out) not in (None, before):
            lines = (out / "metrics.jsonl").read_text().splitlines()
            if sum('"loss"' in line for line in lines) >= step:
                return
        time.sleep(0.02)


if __name__ == "__main__":
    main()
