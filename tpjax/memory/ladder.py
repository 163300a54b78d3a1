"""The lecture's table of memory techniques, compiled: each alone, and one on top of the other;
and two steps further down than its last line.

A rung is nothing but settings of a run (`MemoryConfig`): any of them can be given to
experiments.plan and experiments.train as flags.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from tpjax.config import ConfigError, MemoryConfig, TrainConfig
from tpjax.memory.compiled import absent_devices, init_peak_bytes
from tpjax.memory.explain import report_run
from tpjax.memory.timing import roofline
from tpjax.mesh import make_mesh
from tpjax.resolve import resolve

NONE = MemoryConfig(
    params="fp32",
    compute="fp32",
    moments="fp32",
    tie_embeddings=False,
    embedding="replicated",
    init="eager",
    remat="none",
    attention="materialised",
    loss_chunks=1,
    donate=False,
)
"""No technique at all, but for what tensor parallelism brings with it."""

TECHNIQUES: dict[str, dict[str, Any]] = {
    # Tied where the model is by itself: anything else would be another model.
    "sharing + lazy loading": {"tie_embeddings": None, "embedding": "sharded", "init": "lazy"},
    "gradient checkpointing": {"remat": "full"},
    "quantisation + mixed precision": {"compute": "bf16", "params": "bf16", "moments": "int8"},
    # JAX preallocates the pool in any case; buffers are reused in it where they are donated.
    "pooling + preallocation": {"donate": True},
}
"""What each of the lecture's lines changes."""

FURTHER: dict[str, dict[str, Any]] = {
    "everything": {"update": "layerwise", "attention": "auto", "loss_chunks": 0},
    "leanest": {"params": "int8", "moments": "factored", "remat": "nested"},
}
"""What tpjax has beyond the lecture."""

OFFLOAD: dict[str, Any] = {"offload": "residuals,moments"}

LECTURE = {
    "none": (120, 600),
    "sharing + lazy loading": (90, 580),
    "gradient checkpointing": (70, 700),
    "quantisation + mixed precision": (60, 550),
    "pooling + preallocation": (50, 500),
}
"""Its figures for 10⁹ parameters on 4 GPUs, each line with those before it: GB (10⁹ bytes) on
all of them, seconds per epoch. It names no model, batch or data."""


@dataclass(frozen=True, kw_only=True)
class Rung:
    """Settings that a step is compiled with.

    Attributes:
        name: of its last technique.
        memory: all settings.
        alone: whether the technique is the only one; else those before it are there too.
    """

    name: str
    memory: MemoryConfig
    alone: bool = False

    @property
    def lecture_gb(self) -> float | None:
        """As `LECTURE`; None where the lecture has no such line."""
        return LECTURE[self.name][0] if self._in_lecture else None

    @property
    def lecture_seconds(self) -> float | None:
        """As `LECTURE`; None where the lecture has no such line."""
        return LECTURE[self.name][1] if self._in_lecture else None

    @property
    def _in_lecture(self) -> bool:
        return not self.alone and self.name in LECTURE


def rungs() -> list[Rung]:
    """None, the lecture's techniques one on top of the other, and what goes further: all these
    without and with what can be offloaded; then the lecture's techniques alone."""
    memory, found = NONE, [Rung(name="none", memory=NONE)]
    for name, changes in (TECHNIQUES | FURTHER).items():
        memory = dataclasses.replace(memory, **changes)
        found.append(Rung(name=name, memory=memory))
    for rung in [rung for rung in found if rung.name in FURTHER]:
        offloaded = dataclasses.replace(rung.memory, **OFFLOAD)
        found.append(Rung(name=f"{rung.name}, offloaded", memory=offloaded))
    for name, changes in TECHNIQUES.items():
        found.append(Rung(name=name, memory=dataclasses.replace(NONE, **changes), alone=True))
    return found


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What the compiler and the counts say of a step; sizes are of one device.

    Attributes:
        num_devices: of the mesh.
        peak_bytes: of XLA's pool, while a step runs.
        host_bytes: pinned host memory.
        init_peak_bytes: while the state is made, on the device that holds most.
        flops: of a step on all devices, with what is computed a second time.
        wire_bytes: that a device sends per step.
        roofline_seconds: an estimate from below of a step's time; None where rates of the card
            are not known.
        fits: whether the step fits into the card; None where that is unknown.
        bytes_by_kind: of what is there at the peak; adds up to `peak_bytes`.
    """

    num_devices: int
    peak_bytes: int
    host_bytes: int
    init_peak_bytes: int
    flops: float
    wire_bytes: int
    roofline_seconds: float | None
    fits: bool | None
    bytes_by_kind: dict[str, int]

    @property
    def total_gb(self) -> float:
        """On all devices at the peak, in 10⁹ bytes."""
        return self.num_devices * self.peak_bytes / 1e9


@dataclass(frozen=True, kw_only=True)
class Row:
    """A rung and what is known of it: figures, or the reason why there are none."""

    rung: Rung
    figures: Figures | None
    reason: str | None = None

    def as_json(self) -> dict:
        """Plain values for a file."""
        rung, figures = self.rung, self.figures
        return {
            "name": rung.name,
            "alone": rung.alone,
            "total_gb": figures and figures.total_gb,
            "lecture_gb": rung.lecture_gb,
            "lecture_seconds": rung.lecture_seconds,
            "reason": self.reason,
            "figures": figures and dataclasses.asdict(figures),
            "settings": dataclasses.asdict(rung.memory),
        }


def climb(run: TrainConfig, gpu: str, steps: Sequence[Rung] | None = None) -> Iterator[Row]:
    """A row for each rung, as soon as it is compiled, which takes some seconds each.

    A rung that does not go with the model or the mesh, or that XLA cannot compile, gets a row
    with the reason. Equal settings are compiled once.

    Args:
        run: model, mesh (where it is None, one device) and batch; not its memory settings.
        gpu: as of `compile_for`.
        steps: the rungs to compile; by default all `rungs`.

    Raises:
        ConfigError: at once, where no rung is possible: the batch or the model does not go with
            the mesh, or the kind of GPU is unknown.
    """
    num_devices = 1 if run.mesh is None else run.mesh.num_devices
    devices = absent_devices(gpu, num_devices)
    resolve(
        dataclasses.replace(run, memory=MemoryConfig()), num_devices=num_devices, platform="gpu"
    )
    return _rows(run, gpu, devices, rungs() if steps is None else steps)


def _rows(run: TrainConfig, gpu: str, devices: list, steps: Sequence[Rung]) -> Iterator[Row]:
    done: dict[TrainConfig, tuple[Figures | None, str | None]] = {}
    for rung in steps:
        config = dataclasses.replace(run, memory=rung.memory)
        try:
            config = resolve(config, num_devices=len(devices), platform="gpu")
        except ConfigError as error:
            yield Row(rung=rung, figures=None, reason=str(error))
            continue
        if config not in done:
            try:
                done[config] = _figures(config, gpu, devices), None
            except jax.errors.JaxRuntimeError as error:
                words = " ".join(str(error).split())[:200]
                done[config] = None, f"XLA cannot compile it: {words}"
        figures, reason = done[config]
        yield Row(rung=rung, figures=figures, reason=reason)


def _figures(config: TrainConfig, gpu: str, devices: list) -> Figures:
    """Of a resolved run."""
    report = report_run(config, gpu=gpu)
    least = roofline(config, report)
    assert config.mesh is not None  # resolved
    assert report.flops is not None  # a run's are counted
    return Figures(
        num_devices=report.num_devices,
        peak_bytes=report.peak_bytes,
        host_bytes=report.host_bytes,
        init_peak_bytes=init_peak_bytes(config, make_mesh(config.mesh, config.model, devices)),
        flops=report.flops,
        wire_bytes=report.wire_bytes,
        roofline_seconds=least and least.seconds,
        fits=report.fits,
        bytes_by_kind=report.bytes_by_kind,
    )
