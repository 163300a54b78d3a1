"""What a compiled program does that costs memory or traffic for nothing, with remedies."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import jax
from jax.sharding import NamedSharding

from tpjax.memory import loops
from tpjax.memory.compiled import Compilation, result_name
from tpjax.memory.records import Finding, gib
from tpjax.sharding import bytes_per_device

STATE_SHARE = 0.1  # of the peak: state that is whole on every device of an axis


@dataclass(frozen=True, kw_only=True)
class _Argument:
    """One argument of the program, with its sharding."""

    number: int
    name: str
    kind: str
    leaf: jax.ShapeDtypeStruct
    donated: bool

    @property
    def bytes(self) -> int:
        return bytes_per_device([self.leaf])

    @property
    def axes(self) -> set[str]:
        """The mesh axes that shard it."""
        assert isinstance(self.leaf.sharding, NamedSharding)
        parts = [part if isinstance(part, tuple) else (part,) for part in self.leaf.sharding.spec]
        return {axis for part in parts for axis in part if axis is not None}


def lint(compilation: Compilation) -> list[Finding]:
    """All findings, the most costly first. Knows no model: any program can be asked."""
    found = [finding for rule in _RULES for finding in rule(compilation)]
    return sorted(found, key=lambda finding: -(finding.bytes or 0))


def _arguments(compilation: Compilation) -> list[_Argument]:
    """The program's arguments; empty where it dropped some, so that none is mistaken."""
    infos = jax.tree_util.tree_leaves_with_path(compilation.lowered.args_info)
    shardings = jax.tree.leaves(compilation.executable.input_shardings)
    if not len(infos) == len(shardings) == len(compilation.namer.arguments):
        return []
    found = []
    for number, ((_, info), sharding) in enumerate(zip(infos, shardings, strict=True)):
        described = compilation.namer.argument(number)
        leaf = jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding)
        found.append(
            _Argument(
                number=number,
                name=described.name,
                kind=described.kind,
                leaf=leaf,
                donated=info.donated,
            )
        )
    return found


def _replicated(compilation: Compilation) -> Iterator[Finding]:
    """An array whole on every device of an axis that shards others of its kind."""
    mesh = compilation.mesh
    arguments = [a for a in _arguments(compilation) if isinstance(a.leaf.sharding, NamedSharding)]
    if mesh is None:
        return
    kinds = {a.kind for a in arguments}
    used = {k: set().union(*(a.axes for a in arguments if a.kind == k)) for k in kinds}
    for argument in arguments:
        for axis in sorted(used[argument.kind] - argument.axes):
            size, cost = mesh.shape[axis], argument.bytes * (1 - 1 / mesh.shape[axis])
            local = argument.leaf.sharding.shard_shape(argument.leaf.shape)
            if size > 1 and cost >= compilation.large_bytes and any(d % size == 0 for d in local):
                yield Finding(
                    rule="replicated",
                    name=argument.name,
                    message=f"{argument.name} {list(local)} is whole on all {size} devices of "
                    f"{axis}, which shards others of the {argument.kind}.",
                    remedy=f"Shard a dimension that {size} divides over {axis}; saves "
                    f"{gib(round(cost))} per device.",
                    bytes=round(cost),
                )


def _replicated_state(compilation: Compilation) -> Iterator[Finding]:
    """Parameters or moments none of which an axis shards."""
    mesh = compilation.mesh
    arguments = [a for a in _arguments(compilation) if isinstance(a.leaf.sharding, NamedSharding)]
    if mesh is None:
        return
    state = [a for a in arguments if a.kind in ("parameters", "moments")]
    used = set().union(*(a.axes for a in state)) if state else set()
    total = sum(a.bytes for a in state)
    for axis, size in mesh.shape.items():
        cost = total * (1 - 1 / size)
        if axis not in used and cost >= STATE_SHARE * compilation.peak_bytes:
            yield Finding(
                rule="replicated-state",
                name="parameters and moments",
                message=f"Parameters and moments are whole on all {size} devices of {axis}.",
                remedy=f"Move devices from {axis} to an axis that shards them (fsdp): up to "
                f"{gib(round(cost))} less per device.",
                bytes=round(cost),
            )


def _donation(compilation: Compilation) -> Iterator[Finding]:
    """A donated array that no result takes the place of, and state that was not donated."""
    head = compilation.assignment.text.partition("\n")[0]
    reused = {int(n) for n in re.findall(r"\{[\d, ]*\}: \((\d+),", head)}
    results = jax.tree_util.tree_leaves_with_path(compilation.lowered.out_info)
    outputs = [
        (leaf.shape, leaf.dtype)
        for path, leaf in results
        if result_name(path) not in compilation.namer.gradient_results
    ]
    kept = []
    for argument in _arguments(compilation):
        if argument.number in reused:
            continue
        if argument.donated and argument.bytes >= compilation.large_bytes:
            yield Finding(
                rule="donated-not-reused",
                name=argument.name,
                message=f"{argument.name} was donated, but no result has its shape, dtype and "
                "sharding, so nothing reuses its memory.",
                remedy="Give the result that replaces it the same dtype and sharding "
                "(out_shardings), or do not donate it.",
                bytes=argument.bytes,
            )
        elif argument.kind in ("parameters", "moments") and (
            (argument.leaf.shape, argument.leaf.dtype) in outputs
        ):
            kept.append(argument)
    cost = sum(argument.bytes for argument in kept)
    if cost >= compilation.large_bytes:
        largest = max(kept, key=lambda argument: argument.bytes)
        yield Finding(
            rule="not-donated",
            name=largest.name,
            message=f"{len(kept)} arrays of the state ({largest.name} is the largest) go in and "
            "come out in two copies.",
            remedy="Donate the state (jax.jit(..., donate_argnums=...); in tpjax --donate).",
            bytes=cost,
        )


def _gathered(compilation: Compilation) -> Iterator[Finding]:
    """Logits put together, or a parameter's whole stack."""
    whole = {n: math.prod(s) for n, s in compilation.namer.parameters.items()}
    for c in compilation.collectives:
        if c.op != "all-gather" or c.bytes < compilation.large_bytes:
            continue
        if c.kind == "logits":
            yield Finding(
                rule="gathered-logits",
                name=c.name,
                message=f"The logits {c.dtype}{list(c.shape)} are gathered over {c.axis}.",
                remedy="Take log-sum-exp and the target's logit on each shard of the "
                "vocabulary and sum those.",
                bytes=c.bytes,
            )
        elif c.kind == "parameters" and (
            math.prod(c.shape) >= whole.get(c.name, math.inf) * c.group_size and not c.in_scan
        ):
            yield Finding(
                rule="gathered-weight",
                name=c.name,
                message=f"{c.name} is gathered whole over {c.axis}: {c.dtype}{list(c.shape)}.",
                remedy="Use it sharded, or gather one layer at a time inside the scan.",
                bytes=c.bytes,
            )


def _offload(compilation: Compilation) -> Iterator[Finding]:
    """A program that asks for host memory and has none."""
    asks = "annotate_device_placement" in compilation.lowered.as_text()
    if asks and not compilation.host_bytes:
        yield Finding(
            rule="offload-moved-nothing",
            name="host memory",
            message="The program asks to place arrays in host memory, and none is there.",
            remedy="Check the memory kind (pinned_host) and that the target supports it; "
            "XLA for CPU moves nothing.",
        )


_RULES = (
    _replicated,
    _replicated_state,
    _donation,
    _gathered,
    _offload,
    loops.remat,
    loops.gradient_copies,
    loops.scan_copies,
)
