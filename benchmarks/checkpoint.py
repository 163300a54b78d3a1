"""What saving costs: host memory beside the state, and how long training waits.

    python -m benchmarks.checkpoint --model smollm2-135m --mesh fsdp=8 --json FILE

Each way in a process of its own, on simulated devices, whose memory is the host's too: anonymous
resident memory of the process, sampled each millisecond, less what it was before (and less the
state, where that is restored). Seconds are medians of five times; the copy that the wait is
compared with is NumPy's, of all shards.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from tpjax.checkpoint import Progress, choose, steps_in
from tpjax.config import MeshConfig, RecoveryConfig
from tpjax.memory.records import gib
from tpjax.mesh import make_mesh, start_devices
from tpjax.presets import preset_run
from tpjax.resolve import resolve
from tpjax.restore import Restoration
from tpjax.resume import about
from tpjax.saver import Saver
from tpjax.state import TrainState, abstract_state, create_state

WAYS = ("copy", "no copy", "restore")
TIMES = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--mesh", default="fsdp=8")
    parser.add_argument("--json", default="")
    parser.add_argument("--way", choices=WAYS, help="only this one, as JSON, in --folder")
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    if args.way:
        print(json.dumps(measure(args.model, args.mesh, args.way, args.folder)))
        return
    with tempfile.TemporaryDirectory(prefix="tpjax-checkpoint-") as folder:
        rows = [run(args.model, args.mesh, way, folder) for way in WAYS]
    if args.json:
        Path(args.json).write_text(json.dumps(rows, indent=2) + "\n")
    Console().print(table(rows, f"{args.model}, float32 state, {args.mesh} on simulated devices"))


def run(model: str, mesh: str, way: str, folder: str) -> dict:
    """`measure` in a process of its own."""
    flags = ["--model", model, "--mesh", mesh, "--way", way, "--folder", folder]
    command = [sys.executable, "-m", "benchmarks.checkpoint", *flags]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def measure(model: str, mesh_name: str, way: str, folder: Path) -> dict:
    """Bytes and seconds of one way: the state's and its largest shard's bytes, those beside it at
    the peak; seconds of a plain copy (None where nothing is saved), until training can go on, and
    until all is done. Restoring is from what the way before has saved."""
    sizes = MeshConfig.parse(mesh_name)
    devices = start_devices(sizes.num_devices)
    run = dataclasses.replace(preset_run(model), mesh=sizes)
    data = dataclasses.replace(run.data, batch_size=8 * sizes.num_devices)
    run = dataclasses.replace(run, data=data)
    config = resolve(run, num_devices=len(devices), platform="cpu")
    mesh = make_mesh(sizes, config.model, devices)
    shapes = abstract_state(config, mesh)
    leaves = jax.tree.leaves(shapes)
    shards = [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves]
    state_bytes = sum(x.size * x.dtype.itemsize for x in leaves)
    if way == "restore":
        found = choose(folder, "must")
        assert found is not None
        with Peak() as peak:
            done = blocked = _seconds(Restoration(found, config, mesh).state)
        copied, peak.bytes = None, peak.bytes - state_bytes
    else:
        state = jax.block_until_ready(create_state(config, mesh))
        copied = statistics.median(_seconds(lambda: _copy(state)) for _ in range(TIMES))
        saver = Saver(folder, RecoveryConfig(checkpoint_copy=way == "copy"), shapes)
        times = []
        with saver, Peak() as peak:
            first = len(steps_in(folder)) * TIMES
            for step in range(first, first + TIMES):
                beside = about(config, "", Progress(step=step))
                waits = _seconds(lambda beside=beside: saver.save(state, beside))
                times.append((waits, waits + _seconds(saver.wait)))
        blocked, done = map(statistics.median, zip(*times, strict=True))
    return {
        "way": way,
        "state_bytes": state_bytes,
        "largest_shard_bytes": max(shards),
        "beside_bytes": peak.bytes,
        "copy_seconds": copied,
        "blocked_seconds": blocked,
        "done_seconds": done,
    }


class Peak:
    """A context that finds by how much the process's anonymous memory grows at most."""

    bytes = 0

    def __enter__(self) -> Peak:
        self._before, self._done = _anonymous_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.bytes = max(self.bytes, _anonymous_bytes() - self._before)


def _anonymous_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


def _copy(state: TrainState) -> list[np.ndarray]:
    return [np.array(s.data) for x in jax.tree.leaves(state) for s in x.addressable_shards]


def _seconds(action: Callable) -> float:
    begun = time.perf_counter()
    jax.block_until_ready(action())
    return time.perf_counter() - begun


def table(rows: list[dict], title: str) -> Table:
    table = Table("", "beside the state", "blocked", "÷ copy", "done after", title=title)
    for row in rows:
        beside, copied = max(row["beside_bytes"], 0), row["copy_seconds"]
        of_state, of_shard = (beside / row[f"{of}_bytes"] for of in ("state", "largest_shard"))
        table.add_row(
            row["way"],
            f"{gib(beside)} = {of_state:.2f} states, {of_shard:.1f} shards",
            f"{row['blocked_seconds']:.2f} s",
            "" if copied is None else f"{row['blocked_seconds'] / copied:.2f} ×",
            f"{row['done_seconds']:.2f} s",
        )
    return table


if __name__ == "__main__":
    main()
