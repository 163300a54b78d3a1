"""What generation needs: the cache and the two programs, for GPUs that need not be there."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from tpjax.cache import Kind, abstract_cache
from tpjax.config import MeshConfig, TrainConfig
from tpjax.generate import Decoding, lower_prefill, lower_step
from tpjax.memory.compiled import absent_devices, compile_lowered
from tpjax.memory.explain import explain
from tpjax.memory.lint import lint
from tpjax.memory.records import MemoryReport
from tpjax.mesh import make_mesh, start_devices
from tpjax.resolve import resolve
from tpjax.sampling import Sampling
from tpjax.sharding import bytes_per_device


class GenerationReport(NamedTuple):
    """Of the program that makes a token for every sequence, and of the one that reads a prompt
    as long as the context; and the cache's bytes on each device."""

    decode: MemoryReport
    prefill: MemoryReport
    cache_bytes: int


def report_generation(
    config: TrainConfig, *, context: int, cache: Kind | None = None, gpu: str | None, nodes: int = 1
) -> GenerationReport:
    """What generating `batch_size` sequences needs of each device.

    Args:
        context: positions of each sequence.
        cache: how keys and values are kept; None: as computed.
        gpu: a name of `tpjax.gpus.GPUS`, or None for the devices that are there.

    Raises:
        ConfigError: the mesh does not go with the model, or the context is too long for it.
    """
    memory = dataclasses.replace(config.memory, remat="none", sequence_parallel=False)
    data = dataclasses.replace(config.data, seq_len=context)
    config = dataclasses.replace(config, memory=memory, data=data)
    if gpu is None:
        devices = start_devices(config.devices, config.pool)
    else:
        devices = absent_devices(gpu, (config.mesh or MeshConfig()).num_devices, nodes)
    platform = devices[0].platform
    config = resolve(config, num_devices=len(devices), platform=platform, trains=False)
    assert config.mesh is not None  # resolved
    mesh = make_mesh(config.mesh, config.model, devices)
    compute = config.memory.compute
    assert compute != "auto"  # resolved
    decoding = Decoding(
        context=context,
        prompt_len=context,
        batch_size=config.data.batch_size,
        cache=cache or compute,
        sampling=Sampling(top_k=40, top_p=0.9),  # these need the most
    )
    sizes = (decoding.batch_size, context, decoding.cache)
    held = bytes_per_device(abstract_cache(config.model, mesh, *sizes))
    title = (
        f"{config.model.name}, {decoding.batch_size} × {context} positions, cache "
        f"{decoding.cache}, {config.mesh} × {gpu or devices[0].device_kind}, parameters "
        f"{config.memory.params}"
    )
    reports = []
    for lower, what in ((lower_step, "one token each"), (lower_prefill, "reading a prompt")):
        compilation = compile_lowered(lower(config, mesh, decoding), mesh)
        found = lint(compilation)
        titled = f"{what}: {title}"
        reports.append(
            explain(compilation, title=titled, findings=found, flops=None, pool=config.pool)
        )
    return GenerationReport(*reports, cache_bytes=held)
