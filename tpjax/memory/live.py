"""What devices and the process say of their memory while a program runs.

A figure that nobody counts is None and has a reason; it is never 0.
"""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tpjax.config import ConfigError, PoolConfig
from tpjax.gpus import GPUS, kind_of, outside_pool
from tpjax.memory.records import gib
from tpjax.mesh import gpu_memory_bytes
from tpjax.pool import pool_is_limited

POOL_TOLERANCE = 0.01  # of a GPU's memory, between the pool's limit and what was asked for
_STATUS = Path("/proc/self/status")  # Linux: the kernel's view of this process
_MEMORY = Path("/proc/meminfo")  # and of the machine
_CONTAINER = (  # what a container may have of it, by version 2 and 1 of control groups
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """One device's allocator at one moment; sizes in bytes.

    Attributes:
        device: JAX's name of it, such as "cuda:0".
        bytes_in_use: held by arrays and by programs sent off. Whole blocks of the
            pool: rounding, and the rest of a block too small to split, count too.
        peak_bytes_in_use: the most so far, since the process began.
        pool_bytes: taken from the driver; free bytes of it are the allocator's own.
        bytes_limit: the most that the pool may grow to.
        largest_free_block_bytes: the greatest piece that an array can have without
            the pool growing.
        fragmentation: 1 − largest free block / free bytes of the pool; 0 is one piece.
        num_allocs: allocations so far.
        reasons: why, for each figure that is None.
    """

    device: str
    bytes_in_use: int | None
    peak_bytes_in_use: int | None
    pool_bytes: int | None
    bytes_limit: int | None
    largest_free_block_bytes: int | None
    fragmentation: float | None
    num_allocs: int | None
    reasons: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class LiveMemory:
    """All devices, and the process on the host.

    Attributes:
        host_bytes, host_peak_bytes: resident memory of the process, now and at most
            (the kernel counts the latter to within some hundred KiB).
        host_reason: why one of the two is None.
    """

    devices: tuple[DeviceMemory, ...]
    host_bytes: int | None
    host_peak_bytes: int | None
    host_reason: str | None = None

    @property
    def peak_bytes(self) -> int | None:
        """The most in use on any device so far; None where a device does not count it."""
        return self._most("peak_bytes_in_use")

    @property
    def peak_reason(self) -> str | None:
        """Why there is no peak."""
        return self._why("peak_bytes_in_use")

    def metrics(self) -> dict[str, int | float | str | None]:
        """For the line of one step: the most on any device, the host's, and why one is None;
        of the pool, what its allocator counts."""
        reasons = {"peak_reason": self.peak_reason, "host_reason": self.host_reason}
        if (in_use_reason := self._why("bytes_in_use")) != self.peak_reason:
            reasons["in_use_reason"] = in_use_reason
        return {
            "peak_bytes": self.peak_bytes,
            "bytes_in_use": self._most("bytes_in_use"),
            "host_bytes": self.host_bytes,
            **self._pool(),
            **{name: reason for name, reason in reasons.items() if reason},
        }

    def _pool(self) -> dict[str, int | float]:
        """The largest pool, the smallest greatest free block, the worst fragmentation; only
        what every device counts."""
        worst = {"pool_bytes": max, "largest_free_block_bytes": min, "fragmentation": max}
        found = {name: [getattr(d, name) for d in self.devices] for name in worst}
        return {name: worst[name](f) for name, f in found.items() if f and None not in f}

    def _most(self, figure: str) -> int | None:
        figures = [getattr(device, figure) for device in self.devices]
        return None if not figures or None in figures else max(figures)

    def _why(self, figure: str) -> str | None:
        if not self.devices:
            return "there are no devices"
        return next((d.reasons[figure] for d in self.devices if figure in d.reasons), None)


@dataclass(frozen=True, kw_only=True)
class RunMemory:
    """What a run's memory was predicted to be and what it was, per device.

    Attributes:
        parameters_bytes, moments_bytes: its shards of the train state.
        compiled_peak_bytes: at the peak of the compiled step: state, batch, temporaries. The
            next batch, which is placed meanwhile, comes on top: 9 bytes a token.
        offloaded_bytes: in the host's pinned memory, of what the step would hold else.
        capacity_bytes: what the device's pool (or, for simulated devices, each one's share
            of the machine's memory) can hold; None where nobody says, with the reason.
        live_peak_bytes: what its allocator counted while running; None with the reason.
        host_peak_bytes: the most resident memory of this process; None with the reason.
        pool: what became of the pool that was asked for; None where nothing was asked.
    """

    parameters_bytes: int
    moments_bytes: int
    compiled_peak_bytes: int
    offloaded_bytes: int
    capacity_bytes: int | None
    capacity_reason: str | None
    live_peak_bytes: int | None
    live_peak_reason: str | None
    host_peak_bytes: int | None
    host_peak_reason: str | None
    pool: str | None = None

    @property
    def fits(self) -> bool | None:
        """Whether the compiled peak is within the capacity; None where that is unknown."""
        if self.capacity_bytes is None:
            return None
        return self.compiled_peak_bytes <= self.capacity_bytes


def live_memory(devices: Sequence) -> LiveMemory:
    """Asks each device's allocator and the operating system. Never fails, waits for no device.

    Devices must be this process's own for their figures to be known.
    """
    host, peak, reason = _host_memory()
    return LiveMemory(
        devices=tuple(_device_memory(device) for device in devices),
        host_bytes=host,
        host_peak_bytes=peak,
        host_reason=reason,
    )


def capacity(devices: Sequence) -> tuple[int | None, str | None]:
    """What each device can hold, or None and why: the limit of its pool, or all of its
    memory less an estimate of what lies outside the pool where that is less; for
    simulated devices, an equal share of the memory that the machine has left."""
    if devices[0].platform == "cpu":
        free = _free_bytes()
        if free is None:
            return None, f"{_MEMORY} does not give it on this system"
        return free // len(devices), None
    if not pool_is_limited():
        return None, "this allocator has no limit"
    known = [_device_memory(device) for device in devices]
    limits = [one.bytes_limit for one in known if one.bytes_limit is not None]
    if len(limits) < len(known):
        return None, next(d.reasons["bytes_limit"] for d in known if d.bytes_limit is None)
    rooms = [total - _outside_bytes(devices) for total in map(gpu_memory_bytes, devices) if total]
    return min(limits + rooms), None


def _outside_bytes(devices: Sequence) -> int:
    """An estimate of what lies outside a GPU's pool; 0 where its kind is unknown."""
    kind = kind_of(devices[0].device_kind)
    parts = outside_pool(GPUS[kind], num_devices=len(devices)) if kind else ()
    return sum(part.bytes for part in parts)


def check_pool(pool: PoolConfig, devices: Sequence) -> str | None:
    """What became of the pool that was asked for, in one line; None where nothing was asked.

    Raises:
        ConfigError: a GPU's allocator has another limit than asked for.
    """
    if not pool.flags:
        return None
    asked = " ".join(pool.flags)
    if devices[0].platform == "cpu":
        return f"{asked}: no effect, because simulated devices have no pool"
    if pool.pool_fraction is None:
        return asked
    for device in devices:
        memory, total = _device_memory(device), gpu_memory_bytes(device)
        limit, reason = memory.bytes_limit, memory.reasons.get("bytes_limit")
        if limit is None or total is None:
            why = reason or "the driver does not say how much memory there is"
            return f"{asked}: whether it is so is not available, because {why}"
        if abs(limit - pool.pool_fraction * total) > POOL_TOLERANCE * total:
            raise ConfigError(
                f"the pool of {device} may take {gib(limit)} of {gib(total)}, which is not "
                f"{asked}: JAX started with other settings; start again, with nothing of JAX "
                "before tpjax.start_devices."
            )
        left, outside = total - limit, _outside_bytes(devices)
        if left < outside and pool.preallocate is not False:
            return (
                f"{asked}: takes {gib(limit)} of {gib(total)}, and leaves {gib(left)} where about "
                f"{gib(outside)} are needed outside the pool; lower --pool-fraction"
            )
    return asked


def _free_bytes() -> int | None:
    """What the machine, or the container that it is, has left."""
    try:
        free = re.search(r"^MemAvailable:\s+(\d+) kB", _MEMORY.read_text(), re.M)
    except OSError:
        return None
    if free is None:
        return None
    limits = [int(free[1]) * 1024]
    for path in _CONTAINER:
        with contextlib.suppress(OSError, ValueError):  # not there, or "max"
            limits.append(int(path.read_text()))
    return min(limits)


def _device_memory(device) -> DeviceMemory:
    stats, reason = {}, f"the {device.platform} backend reports no memory statistics"
    try:
        stats = device.memory_stats() or {}
    except Exception as error:  # a backend's own: another process's device, no allocator, …
        reason = f"{device} does not answer: {' '.join(str(error).split())[:200]}"
    if stats:
        reason = f"the {device.platform} backend does not count it"
    figures, reasons = _figures(stats, reason)
    return DeviceMemory(device=str(device), **figures, reasons=reasons)


def _figures(stats: dict, reason: str) -> tuple[dict, dict[str, str]]:
    """The figures that are counts; None for the others, and why."""

    def count(key: str) -> int | None:
        value = stats.get(key)
        return None if value is None or value < 0 else value  # JAX gives −1 for what is not set

    plain = ("bytes_in_use", "peak_bytes_in_use", "bytes_limit", "num_allocs")
    figures: dict = {name: count(name) for name in plain}
    # An allocator without a pool of its own carves from all that it may reserve.
    pool = count("pool_bytes")
    figures["pool_bytes"] = count("bytes_reservable_limit") if pool is None else pool
    reasons = {name: reason for name, value in figures.items() if value is None}
    in_use = figures["bytes_in_use"] or 0
    for name in ("peak_bytes_in_use", "pool_bytes"):
        if (value := figures[name]) is not None and value < in_use:
            figures[name], reasons[name] = None, f"it is said to be {value}, less than is in use"
    if figures["bytes_limit"] == 0:
        figures["bytes_limit"], reasons["bytes_limit"] = None, "it is said to be 0"
    largest = count("largest_free_block_bytes")
    figures |= {"largest_free_block_bytes": largest or None, "fragmentation": None}
    pool, in_use = figures["pool_bytes"], figures["bytes_in_use"]
    if not largest:  # XLA's pool never sets it up to jaxlib 0.10.2; later ones do
        why = reason if largest is None else "the allocator says 0, as one that counts none does"
        reasons |= dict.fromkeys(("largest_free_block_bytes", "fragmentation"), why)
    elif pool is None or in_use is None:
        reasons["fragmentation"] = "the free bytes of the pool are not known"
    elif largest > pool - in_use:
        reasons["fragmentation"] = f"{largest} bytes in one piece, but {pool - in_use} free in all"
    else:
        figures["fragmentation"] = 1 - largest / (pool - in_use)
    return figures, reasons


def _host_memory() -> tuple[int | None, int | None, str | None]:
    """Resident bytes of this process, now and at most, and why one is None."""
    try:
        text = _STATUS.read_bytes()
        now, peak = (int(text.split(key, 1)[1].split(None, 1)[0]) for key in (b"VmRSS:", b"VmHWM:"))
        return now * 1024, peak * 1024, None
    except (OSError, IndexError, ValueError):
        return None, _peak_of_usage(), f"{_STATUS} does not give it on this system"


def _peak_of_usage() -> int | None:
    """The most resident bytes by `getrusage`, where there is one."""
    try:
        import resource
    except ImportError:  # not a Unix
        return None
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit or None
