"""How long a step takes at least: the roofline of each resource, from published peaks.

An estimate, and one from below: no program reaches a peak, and nothing is said of what
overlaps. It tells what limits a step, and what another setting would cost.
"""

from __future__ import annotations

from dataclasses import dataclass

from tpjax.config import TrainConfig
from tpjax.flops import step_flops
from tpjax.gpus import GPUS, Gpu
from tpjax.memory.policies import kept_bytes
from tpjax.memory.records import MemoryReport

_PCIE_5 = (9, 0)  # compute capability from which server cards have it


@dataclass(frozen=True, kw_only=True)
class Roofline:
    """Seconds that one step keeps each resource of a device busy, at its peak rate.

    Attributes:
        compute: matrix units, all operations with those repeated.
        memory: the device's own, for the state (read and written), and what is kept.
        network: the link to the other devices.
        host: the link to the host, for what is offloaded: out, and at once in again.
    """

    compute: float
    memory: float
    network: float
    host: float

    @property
    def seconds(self) -> float:
        """Of the busiest resource: the step takes no less."""
        return max(self.compute, self.memory, self.network, self.host)


def roofline(config: TrainConfig, report: MemoryReport, nodes: int = 1) -> Roofline | None:
    """Of a resolved run's step and the report on it, in `nodes` machines; None where the card
    is unknown, or no rate of it for what the step does."""
    if report.gpu is None:
        return None
    gpu = GPUS[report.gpu]
    # XLA multiplies float32 in TF32 unless told otherwise.
    rate = gpu.rates["tf32" if config.memory.compute == "fp32" else config.memory.compute]
    link = gpu.link_bandwidth if nodes == 1 else gpu.network_bandwidth
    if rate is None or link is None:
        return None
    # Without remat XLA may keep less than differentiating would.
    kept = min(kept_bytes(config), report.temp_bytes + report.host_bytes)
    moved_bytes = 2 * (report.argument_bytes + kept)
    return Roofline(
        compute=step_flops(config) / config.devices / rate,
        memory=moved_bytes / gpu.memory_bandwidth,
        network=(report.wire_bytes or 0) / link,
        host=report.host_bytes / host_bandwidth(gpu),
    )


def host_bandwidth(gpu: Gpu) -> float:
    """Between a card and its host, bytes per second and direction: the nominal rate of its
    PCIe slot (of server cards with NVLink: 16 lanes of version 4.0 or 5.0)."""
    if gpu.link == "PCIe":
        return gpu.link_bandwidth
    return 63e9 if gpu.compute_capability >= _PCIE_5 else 31.5e9
