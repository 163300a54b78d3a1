"""Says what a training step needs of each GPU, before there is one.

    python -m experiments.plan --model llama3.2-1b --gpu h100 --mesh tensor=4
    python -m experiments.plan diff A.json B.json

Takes the flags of experiments.train; --corpus, --out and the like change nothing.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console

from experiments import screen
from experiments.flags import check_writable, fail, parse
from tpjax.checks import check_fields
from tpjax.config import ConfigError, MeshConfig, TrainConfig, require
from tpjax.flops import model_flops
from tpjax.gpus import GPUS
from tpjax.memory.advice import advise
from tpjax.memory.compiled import absent_devices
from tpjax.memory.explain import report_run
from tpjax.memory.generation import report_generation
from tpjax.memory.picture import draw
from tpjax.memory.policies import policies
from tpjax.memory.records import gib
from tpjax.memory.timing import roofline
from tpjax.mesh import gpu_driver_present, start_devices
from tpjax.resolve import resolve


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A run, and what it is planned for."""

    run: TrainConfig
    gpu: str = ""
    """Kind of GPU; by default those of this machine."""
    nodes: int = 1
    """Machines that share the GPUs evenly."""
    json: str = ""
    """File for the whole report."""
    timeline: str = ""
    """File for a picture of the memory over the step, .png or .html."""
    generate: bool = False
    """Plan generation, not training: a cache for --batch-size sequences of --context positions;
    --params is bf16 by default."""
    context: int = 0
    """Positions of each sequence in generation; by default all that the model has."""
    cache: Literal["auto", "fp32", "bf16", "fp16", "int8"] = "auto"
    """How generation keeps keys and values; auto is as they are computed."""

    def __post_init__(self) -> None:
        require(
            bool(self.gpu) or self.nodes == 1,
            f"nodes={self.nodes} is for GPUs that are not here; name their kind with --gpu.",
        )
        require(
            not self.timeline or Path(self.timeline).suffix in (".png", ".html"),
            f"timeline={self.timeline} must end in .png or .html.",
        )
        check_fields(self, non_negative="context")
        require(
            self.generate or (not self.context and self.cache == "auto"),
            "--context and --cache are for --generate; add it.",
        )
        require(
            not (self.generate and (self.json or self.timeline)),
            "--generate plans two programs and writes no file; leave out --json and --timeline.",
        )
        check_writable(self.json, self.timeline)


def main() -> None:
    words = sys.argv[1:]
    try:
        if words[:1] == ["diff"]:
            return Console().print(screen.difference(*_read_two(words[1:])))
        generates = "--generate" in words
        plan = parse(Plan, lambda run: _default(run, generates), __doc__ or "", None)
        _make(plan)
    except ConfigError as error:
        fail(str(error))


def _default(run: TrainConfig, generates: bool) -> Plan:
    if generates:
        run = dataclasses.replace(run, memory=dataclasses.replace(run.memory, params="bf16"))
    return Plan(run=run)


def _make_generation(plan: Plan) -> None:
    cache = None if plan.cache == "auto" else plan.cache
    context = plan.context or plan.run.model.max_seq_len
    found = report_generation(
        plan.run, context=context, cache=cache, gpu=plan.gpu or None, nodes=plan.nodes
    )
    console = Console()
    for report in (found.decode, found.prefill):
        console.print(screen.whole(report))
    console.print(f"the cache: {gib(found.cache_bytes)} per device")


def _make(plan: Plan) -> None:
    """Compiles, prints, and writes what was asked for."""
    present = gpu_driver_present()
    require(
        present or bool(plan.gpu),
        f"there is no GPU in this machine; name a kind: --gpu {'|'.join(GPUS)}.",
    )
    if plan.generate:
        return _make_generation(plan)
    report = report_run(plan.run, gpu=plan.gpu or None, nodes=plan.nodes)
    run, devices = _resolved(plan)
    console = Console()
    console.print(screen.whole(report))
    console.print(screen.roofline(roofline(run, report, plan.nodes)))
    console.print(screen.policies(policies(run), model_flops(run)))
    if report.fits is False:
        console.print("It does not fit. Compiling what would help …")
        console.print(screen.advice(advise(run, devices)))
    if plan.json:
        Path(plan.json).write_text(json.dumps(report.as_json(), indent=1) + "\n")
    if plan.timeline:
        draw(report, plan.timeline)
    return None


def _resolved(plan: Plan) -> tuple[TrainConfig, list]:
    """The run with nothing left to decide, and the devices of the plan."""
    if not plan.gpu:
        devices = start_devices(plan.run.devices, plan.run.pool)
    else:
        num_devices = (plan.run.mesh or MeshConfig()).num_devices
        devices = absent_devices(plan.gpu, num_devices, plan.nodes)
    platform = devices[0].platform
    return resolve(plan.run, num_devices=len(devices), platform=platform), devices


def _read_two(paths: list[str]) -> tuple[dict, dict]:
    require(len(paths) == 2, "diff takes two files that --json has written.")
    return _read(paths[0]), _read(paths[1])


def _read(path: str) -> dict:
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a report: {error}.") from error
    known = isinstance(found, dict) and {"ledger", "peak_bytes", "title"} <= found.keys()
    require(known, f"{path} is no report that --json has written.")
    return found


if __name__ == "__main__":
    main()
