"""What a run's memory was predicted to be and what it was, in one type."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class MemoryReport:
    """Bytes of one device.

    Attributes:
        parameters_bytes, moments_bytes: its shards of the train state.
        compiled_peak_bytes: at the peak of the compiled step: state, batch, temporaries.
        live_peak_bytes: what its allocator counted while running; None if it does not.
        live_peak_reason: why `live_peak_bytes` is None.
    """

    parameters_bytes: int
    moments_bytes: int
    compiled_peak_bytes: int
    live_peak_bytes: int | None
    live_peak_reason: str | None


def gib(size_bytes: int) -> str:
    """A size for people: MiB below one GiB, else GiB."""
    if size_bytes < 1024**3:
        return f"{size_bytes / 1024**2:.1f} MiB"
    return f"{size_bytes / 1024**3:.2f} GiB"
