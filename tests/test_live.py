"""What is said of memory while a program runs: a count, or None and why; never a false 0."""

from __future__ import annotations

import dataclasses
import json
import resource
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from tpjax.memory import live
from tpjax.memory.live import live_memory

FIGURES = {f.name for f in dataclasses.fields(live.DeviceMemory)} - {"device", "reasons"}

# What XLA's GPU pool says (key for key as `memory_stats` of a CUDA device gives it): 1000 bytes
# taken from the driver, 600 of them in use, the largest free piece 300 of the free 400.
POOL = {
    "num_allocs": 42,
    "bytes_in_use": 600,
    "peak_bytes_in_use": 900,
    "largest_alloc_size": 500,
    "bytes_limit": 2000,
    "bytes_reserved": 0,
    "peak_bytes_reserved": 0,
    "largest_free_block_bytes": 300,
    "pool_bytes": 1000,
    "peak_pool_bytes": 1000,
}


class FakeDevice:
    """A device whose allocator says `stats`, or fails as that exception."""

    device_kind, local_hardware_id = "made up", 0

    def __init__(self, stats, platform: str = "gpu", name: str = "cuda:0"):
        self.stats, self.platform, self.name = stats, platform, name

    def __str__(self) -> str:
        return self.name

    def memory_stats(self):
        if isinstance(self.stats, Exception):
            raise self.stats
        return self.stats


def without(*names: str, **changed) -> dict:
    return {k: v for k, v in (POOL | changed).items() if k not in names}


def ask(stats) -> live.DeviceMemory:
    """One device's figures; each that is None has its reason, and no other has one."""
    device = live_memory([FakeDevice(stats)]).devices[0]
    unknown = {name for name in FIGURES if getattr(device, name) is None}
    assert device.reasons.keys() == unknown
    assert all(device.reasons.values())
    return device


def test_every_figure_of_xlas_pool():
    device = ask(POOL)
    assert dataclasses.asdict(device) == {
        "device": "cuda:0",
        "bytes_in_use": 600,
        "peak_bytes_in_use": 900,
        "pool_bytes": 1000,
        "bytes_limit": 2000,
        "largest_free_block_bytes": 300,
        "fragmentation": pytest.approx(1 - 300 / (1000 - 600)),
        "num_allocs": 42,
        "reasons": {},
    }


@pytest.mark.parametrize(("largest", "fragmentation"), [(400, 0.0), (100, 0.75), (1, 0.9975)])
def test_fragmentation_is_what_the_largest_piece_leaves_of_the_free_bytes(largest, fragmentation):
    assert ask(POOL | {"largest_free_block_bytes": largest}).fragmentation == pytest.approx(
        fragmentation
    )


def test_simulated_devices_count_nothing_and_say_so():
    memory = live_memory(jax.devices())
    assert len(memory.devices) == 8
    for device in memory.devices:
        assert all(getattr(device, name) is None for name in FIGURES)
        assert device.reasons == dict.fromkeys(
            FIGURES, "the cpu backend reports no memory statistics"
        )
    assert memory.peak_bytes is None
    assert memory.peak_reason == "the cpu backend reports no memory statistics"


@pytest.mark.parametrize("stats", [None, {}])
def test_no_statistics(stats):
    assert ask(stats).reasons == dict.fromkeys(
        FIGURES, "the gpu backend reports no memory statistics"
    )


def test_an_allocator_that_fails_is_a_reason():
    """As JAX does for the devices of another process."""
    error = RuntimeError("INVALID_ARGUMENT: allowed only\n for addressable devices")
    assert set(ask(error).reasons.values()) == {
        "cuda:0 does not answer: INVALID_ARGUMENT: allowed only for addressable devices"
    }


@pytest.mark.parametrize(
    ("stats", "unknown"),
    [
        (without("peak_bytes_in_use"), {"peak_bytes_in_use"}),
        (without("bytes_limit", "num_allocs"), {"bytes_limit", "num_allocs"}),
        (without("pool_bytes"), {"pool_bytes", "fragmentation"}),
        (without("largest_free_block_bytes"), {"largest_free_block_bytes", "fragmentation"}),
        (without("bytes_in_use"), {"bytes_in_use", "fragmentation"}),
        ({"bytes_in_use": 600}, FIGURES - {"bytes_in_use"}),
        # JAX's −1 for what a plugin does not set.
        (POOL | {"peak_bytes_in_use": -1, "num_allocs": -1}, {"peak_bytes_in_use", "num_allocs"}),
        # jaxlib 0.10.2's pool never fills it in: 0, while 400 bytes are free.
        (
            POOL | {"largest_free_block_bytes": 0},
            {"largest_free_block_bytes", "fragmentation"},
        ),
        # Zeros and sizes that cannot be counts of what is in use.
        (POOL | {"peak_bytes_in_use": 0}, {"peak_bytes_in_use"}),
        (POOL | {"pool_bytes": 0}, {"pool_bytes", "fragmentation"}),
        (POOL | {"bytes_limit": 0}, {"bytes_limit"}),
        (POOL | {"largest_free_block_bytes": 401}, {"fragmentation"}),
    ],
)
def test_a_figure_that_is_not_counted_is_none(stats, unknown):
    device = ask(stats)
    assert device.reasons.keys() == unknown
    assert device.bytes_in_use == (None if "bytes_in_use" in unknown else 600)


def test_without_a_pool_all_that_may_be_reserved_is_one():
    """As a TPU's allocator: a heap of fixed size."""
    device = ask(without("pool_bytes", bytes_reservable_limit=2000, largest_free_block_bytes=700))
    assert device.pool_bytes == 2000
    assert device.fragmentation == pytest.approx(0.5)


def test_before_anything_is_allocated_nothing_is_in_use():
    device = ask(dict.fromkeys(POOL, 0) | {"bytes_limit": 2000})
    assert (device.bytes_in_use, device.peak_bytes_in_use, device.num_allocs) == (0, 0, 0)
    assert device.fragmentation is None


def test_a_steps_line_has_the_most_on_any_device():
    other = POOL | {"peak_bytes_in_use": 950, "largest_free_block_bytes": 200, "pool_bytes": 1010}
    memory = live_memory([FakeDevice(POOL), FakeDevice(other, name="cuda:1")])
    assert memory.metrics() == {
        "peak_bytes": 950,
        "bytes_in_use": 600,
        "host_bytes": memory.host_bytes,
        "pool_bytes": 1010,
        "largest_free_block_bytes": 200,
        "fragmentation": 1 - 200 / 410,
    }
    json.dumps(dataclasses.asdict(memory), allow_nan=False)


def test_the_most_is_not_known_where_one_device_does_not_count():
    memory = live_memory([FakeDevice(POOL), FakeDevice(None, name="cuda:1")])
    reason = "the gpu backend reports no memory statistics"
    line = memory.metrics()
    assert (line["peak_bytes"], line["bytes_in_use"], line["peak_reason"]) == (None, None, reason)
    assert not line.keys() & {"pool_bytes", "largest_free_block_bytes", "fragmentation"}
    partial = live_memory([FakeDevice(without("bytes_in_use"))]).metrics()
    assert (partial["peak_bytes"], partial["bytes_in_use"]) == (900, None)
    assert partial["in_use_reason"] == "the gpu backend does not count it"
    assert "peak_reason" not in partial


def test_no_devices_is_a_reason_too():
    assert live_memory([]).metrics()["peak_reason"] == "there are no devices"


def test_resident_memory_follows_what_the_process_touches():
    size = 64 * 2**20
    before = live_memory([])
    array = np.ones(size, np.uint8)  # ones, not zeros: every page is touched
    during = live_memory([])
    assert before.host_bytes is not None
    assert during.host_bytes is not None
    assert during.host_bytes - before.host_bytes == pytest.approx(size, rel=0.1)
    del array
    after = live_memory([])
    assert after.host_bytes is not None
    assert after.host_peak_bytes is not None
    assert during.host_bytes - after.host_bytes == pytest.approx(size, rel=0.1)
    assert after.host_peak_bytes > 0.999 * during.host_bytes  # the kernel counts it in batches


def test_the_hosts_peak_is_what_the_system_accounts():
    """In a process of its own: `getrusage` starts at the parent's size, and only grows."""
    size = 400 * 2**20
    code = (
        "import resource, numpy as np; from tpjax.memory.live import live_memory\n"
        f"before = live_memory([]); big = np.ones({size}, np.uint8); del big\n"
        "after, usage = live_memory([]), resource.getrusage(resource.RUSAGE_SELF)\n"
        "print(before.host_bytes, after.host_peak_bytes, usage.ru_maxrss * 1024)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    before, peak, accounted = map(int, done.stdout.split())
    assert peak - before == pytest.approx(size, rel=0.01)
    assert peak <= 1.001 * accounted


def test_without_proc_the_peak_is_that_of_getrusage(monkeypatch, tmp_path):
    monkeypatch.setattr(live, "_STATUS", tmp_path / "status")
    accounted = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    memory = live_memory([])
    assert memory.host_bytes is None
    assert memory.host_peak_bytes == pytest.approx(accounted, rel=0.05)
    assert memory.host_reason == f"{tmp_path / 'status'} does not give it on this system"
    assert memory.metrics()["host_reason"] == memory.host_reason
    Path(live._STATUS).write_text("Name:\tpython\n")  # there, but without the figures
    assert live_memory([]).host_reason == memory.host_reason


def test_capacity_is_the_least_limit_of_a_gpu(monkeypatch):
    monkeypatch.setattr(live, "gpu_memory_bytes", lambda device: None)
    devices = [FakeDevice(POOL), FakeDevice(POOL | {"bytes_limit": 1900})]
    assert live.capacity(devices) == (1900, None)
    known, reason = live.capacity([FakeDevice(POOL), FakeDevice(without("bytes_limit"))])
    assert known is None
    assert reason == "the gpu backend does not count it"


def test_simulated_devices_share_the_machine(monkeypatch, tmp_path):
    devices = [FakeDevice(None, platform="cpu")] * 4
    machine, container = tmp_path / "meminfo", tmp_path / "memory.max"
    monkeypatch.setattr(live, "_MEMORY", machine)
    monkeypatch.setattr(live, "_CONTAINER", (container,))
    assert live.capacity(devices) == (None, f"{machine} does not give it on this system")
    machine.write_text("MemTotal: 9000 kB\nMemAvailable:    8000 kB\n")
    assert live.capacity(devices) == (2000 * 1024, None)
    container.write_text("max\n")
    assert live.capacity(devices) == (2000 * 1024, None)
    container.write_text("4096000\n")
    assert live.capacity(devices) == (1000 * 1024, None)
