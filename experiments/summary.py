"""What a run came to, for a person."""

from __future__ import annotations

import shlex

from rich.table import Table

from tpjax.config import TrainConfig
from tpjax.layerwise import clip_each
from tpjax.loop import Result
from tpjax.memory.records import gib


def how_to_go_on(result: Result, argv: list[str]) -> str:
    """One line: where a run stopped, and the command that goes on from there."""
    anew = ("--resume=never", "--resume", "never")  # as it was begun
    argv = [word for word in argv if word not in anew or result.config.recovery.resume != "never"]
    words = ["python", "-m", "experiments.train", *argv]
    if not result.config.out and result.out is not None:
        words += ["--out", str(result.out)]
    where = (
        f"after step {result.steps} of {result.config.steps}" if result.steps else "at its start"
    )
    return f"stopped by {result.stopped} {where}; to go on: {shlex.join(words)}"


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
    if (lora := config.model.lora).targets:
        beside = "all projections" if lora.lora_targets == "all" else lora.lora_targets
        rows["adapters"] = f"rank {lora.lora_rank}, alpha {lora.lora_alpha:g}, beside {beside}"
    if memory.pool is not None:
        rows["pool"] = memory.pool
    if result.out is not None:
        rows |= {"steps": f"{result.steps} of {config.steps}", **_outcome(result)}
        rows |= {"checkpoint": str(result.checkpoint), "written to": str(result.out)}
    elif result.config.dry_run:
        rows["dry run"] = "\n".join((*result.notes, "all checks passed; nothing was trained"))
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _outcome(result: Result) -> dict[str, str]:
    """Speed, losses and sample, as far as there are any."""
    rows = {}
    if result.tokens_per_s is not None:
        rows["speed"] = f"{result.tokens_per_s:,.0f} tokens/s"
    if result.bad_steps:
        rows["bad steps"] = f"{result.bad_steps} left out: loss or gradient not finite"
    losses = {"the last batch": result.train_loss, "held-out text": result.eval_loss}
    said = [f"{loss:.3f} on {where}" for where, loss in losses.items() if loss is not None]
    if said:
        rows["final loss"] = ", ".join(said)
    if result.sample is not None:
        rows["sample"] = f"{result.prompt!r} → {result.sample!r}"
    return rows


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
