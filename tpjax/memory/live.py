"""What devices say of their memory while a program runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class LivePeak:
    """The most bytes in use on any device so far, or None and why."""

    peak_bytes: int | None
    reason: str | None = None


def live_peak(devices: Sequence) -> LivePeak:
    """Asks each device's allocator."""
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in devices]
    known = [peak for peak in peaks if peak is not None]
    if len(known) == len(peaks):
        return LivePeak(max(known))
    return LivePeak(None, f"the {devices[0].platform} backend reports no memory statistics")
