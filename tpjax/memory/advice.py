"""Which changes of a run's settings would make its step smaller, each compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax

from tpjax.config import ConfigError, TrainConfig
from tpjax.memory.compiled import compile_step, peak_bytes
from tpjax.memory.records import Line, gib, in_words
from tpjax.mesh import make_mesh
from tpjax.resolve import resolve


@dataclass(frozen=True)
class Advice:
    """One change, as flags, and the peak of the step with it, per device."""

    flags: str
    peak_bytes: int


def advise(config: TrainConfig, devices: Sequence, count: int = 3) -> list[Advice]:
    """The `count` single changes of a resolved run that lower its peak most, best first.

    Each is compiled for the devices, which takes some seconds a change.
    """
    before = _peak(config, devices)
    tried = []
    for flags, changed in _changes(config):
        try:
            tried.append(Advice(flags, _peak(changed, devices)))
        except (ConfigError, jax.errors.JaxRuntimeError):  # not allowed, or not compiled
            continue
    helping = [advice for advice in tried if advice.peak_bytes < before]
    return sorted(helping, key=lambda advice: advice.peak_bytes)[:count]


def _peak(config: TrainConfig, devices: Sequence) -> int:
    config = resolve(config, num_devices=len(devices), platform=devices[0].platform)
    assert config.mesh is not None  # resolved
    return peak_bytes(compile_step(config, make_mesh(config.mesh, config.model, devices)))


def _changes(config: TrainConfig) -> Iterator[tuple[str, TrainConfig]]:
    """Flags and the run with them, of everything that can still be leaner."""
    memory, data, mesh = config.memory, config.data, config.mesh
    assert mesh is not None  # resolved

    def with_memory(**changes) -> TrainConfig:
        return dataclasses.replace(config, memory=dataclasses.replace(memory, **changes))

    if memory.remat in ("none", "dots"):
        yield "--remat=attention", with_memory(remat="attention")
    if memory.remat != "nested":
        yield "--remat=nested", with_memory(remat="nested")
        if memory.remat != "full":
            yield "--remat=full", with_memory(remat="full")
    if not (memory.offloads_residuals and memory.offloads_moments):
        offload = "residuals,moments"
        yield f"--offload={offload}", with_memory(offload=offload)
    if memory.params == "fp32":
        yield "--params=bf16 --moments=int8", with_memory(params="bf16", moments="int8")
    elif memory.params == "bf16":
        yield "--params=int8", with_memory(params="int8")
    elif memory.params == "int8" and config.model.adapted:
        yield "--params=nf4", with_memory(params="nf4")
    if memory.moments in ("fp32", "bf16"):
        yield "--moments=int8", with_memory(moments="int8")
    if memory.update == "whole":
        remat = memory.remat if memory.remat in ("full", "nested") else "full"
        flags = f"--update=layerwise --remat={remat}"
        yield flags, with_memory(update="layerwise", remat=remat, split="auto")
        if memory.params == "fp32":  # the leanest of both in one
            leaner = with_memory(
                params="bf16", moments="int8", update="layerwise", remat=remat, split="auto"
            )
            yield f"--params=bf16 --moments=int8 {flags}", leaner
    if not memory.donate:
        yield "--donate", with_memory(donate=True)
    if not memory.sequence_parallel and mesh.tensor > 1:
        yield "--sequence-parallel", with_memory(sequence_parallel=True)
    for factor in (2, 4):
        parts = data.accumulate * factor
        split = dataclasses.replace(data, accumulate=parts)
        yield f"--accumulate={parts}", dataclasses.replace(config, data=split)
    if mesh.data > 1:
        sharded = dataclasses.replace(mesh, data=1, fsdp=mesh.fsdp * mesh.data)
        changed = dataclasses.replace(config, mesh=sharded)
        if memory.update == "whole":
            yield f"--mesh={sharded}", changed
        else:  # what is best for the mesh there is, is not for the other
            split = dataclasses.replace(memory, split="auto")
            yield f"--mesh={sharded} --split=auto", dataclasses.replace(changed, memory=split)


def explain_peak(ledger: Sequence[Line], advice: Sequence[Advice]) -> str:
    """The largest lines of a ledger and the changes, line by line for a terminal."""
    said = f"What the step holds on each device at its peak:\n{in_words(ledger)}"
    if not advice:
        return said
    changes = "\n".join(f"  {one.flags:<30} {gib(one.peak_bytes)}" for one in advice)
    return f"{said}\nWhat would help most, with the peak it gives:\n{changes}"
