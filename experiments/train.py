"""Trains a transformer on real text: `python -m experiments.train --remat=dots`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from experiments.flags import fail, parse_run
from tpjax.config import ConfigError, TrainConfig
from tpjax.layerwise import clip_each
from tpjax.loop import Diverged, OutOfMemory, Result, train
from tpjax.memory.records import gib


def main() -> None:
    config = parse_run(__doc__ or "")
    try:
        result = train(config)
    except (ConfigError, Diverged) as error:
        fail(str(error))
    except OutOfMemory as error:
        fail(str(error), status=1)
    Console().print(summary(result))


def summary(result: Result) -> Table:
    """What a run came to, for a person."""
    config, memory = result.config, result.memory
    table = Table(show_header=False, title="summary", title_justify="left")
    rows = {
        "model": f"{config.model.name}, {config.model.num_parameters:,} parameters",
        "devices": f"{config.devices} × {result.platform}, mesh {config.mesh}",
        "parameters": f"{gib(memory.parameters_bytes)} per device ({config.memory.params})",
        "moments": f"{gib(memory.moments_bytes)} per device ({config.memory.moments})",
        "compiled peak": f"{gib(memory.compiled_peak_bytes)} per device "
        f"(remat {config.memory.remat})",
        "offloaded": _offloaded(result),
        "clipping": _clipping(config),
        "live peak": f"not available, because {memory.live_peak_reason}"
        if memory.live_peak_bytes is None
        else f"{gib(memory.live_peak_bytes)} per device",
        "host memory": f"not available, because {memory.host_peak_reason}"
        if memory.host_peak_bytes is None
        else f"{gib(memory.host_peak_bytes)} at most",
        "text": f"{' '.join(config.data.corpus)}, tokenizer {config.data.tokenizer}",
        "compilation": f"{result.compile_seconds:.1f} s",
    }
    if memory.pool is not None:
        rows["pool"] = memory.pool
    if result.out is not None:
        rows |= {
            "speed": f"{result.tokens_per_s:,.0f} tokens/s",
            "final loss": f"{result.train_loss:.3f} on the last batch, "
            f"{result.eval_loss:.3f} on held-out text",
            "sample": f"{result.prompt!r} → {result.sample!r}",
            "written to": str(result.out),
        }
    else:
        rows["dry run"] = "all checks passed; nothing was trained"
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _offloaded(result: Result) -> str:
    """What waits in the host's memory, and a warning where nothing does though asked for."""
    if result.config.memory.offload == "none":
        return "nothing"
    if result.memory.offloaded_bytes:
        return f"{gib(result.memory.offloaded_bytes)} per device ({result.config.memory.offload})"
    where = " on simulated devices, which have no memory of their own" * (result.platform == "cpu")
    return f"[yellow]warning: --offload={result.config.memory.offload} moved nothing{where}[/]"


def _clipping(config: TrainConfig) -> str:
    """To which norm the gradient is clipped, and in how many parts."""
    if not config.optim.clip:
        return "none"
    if config.memory.update == "whole":
        return f"the gradient's norm, {config.optim.clip:g}"
    return (
        f"by --update=layerwise: the norm of each layer, each table and the rest, "
        f"{clip_each(config):.3g}; of all together at most {config.optim.clip:g}"
    )


if __name__ == "__main__":
    main()
