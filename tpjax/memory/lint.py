"""What a compiled program does that costs memory or traffic for nothing, with remedies."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

import jax
from jax.sharding import NamedSharding

from tpjax.memory import loops
from tpjax.memory.compiled import LARGE_BYTES, Compilation
from tpjax.memory.records import Finding, gib
from tpjax.sharding import bytes_per_device

STATE_SHARE = 0.1  # of the peak: state that is whole on every device of an axis
COPIES = {"kv_copy"}  # axes that are there to hold copies (`tpjax.mesh`)
_TABLE = re.compile(r"embed|head|vocab|wte", re.IGNORECASE)  # parameters over the vocabulary


@dataclass(frozen=True, kw_only=True)
class _Argument:
    """One argument of the program, with its sharding; `root` is what it is a part of."""

    number: int
    name: str
    root: str
    kind: str
    leaf: jax.ShapeDtypeStruct
    donated: bool

    @property
    def bytes(self) -> int:
        return bytes_per_device([self.leaf])

    @property
    def axes(self) -> set[str]:
        """The mesh axes that shard it."""
        if not isinstance(self.leaf.sharding, NamedSharding):
            return set()
        parts = [part if isinstance(part, tuple) else (part,) for part in self.leaf.sharding.spec]
        return {axis for part in parts for axis in part if axis is not None}

    @property
    def group(self) -> str:
        """Those that are sharded alike: all parameters, all moments, or parts of one input."""
        return "state" if self.kind in ("parameters", "moments") else self.root


def lint(compilation: Compilation) -> list[Finding]:
    """All findings, the most costly first. Knows no model: any program can be asked."""
    found = [finding for rule in _RULES for finding in rule(compilation)]
    return sorted(found, key=lambda finding: -(finding.bytes or 0))


def _arguments(compilation: Compilation) -> list[_Argument]:
    """The program's arguments, without those that it dropped because nothing reads them."""
    executable = compilation.executable
    infos = jax.tree.leaves(compilation.lowered.args_info)
    shardings = executable.in_tree.flatten_up_to(executable.input_shardings)  # None: dropped
    kept = [(i, s) for i, s in zip(infos, shardings, strict=True) if s is not None]
    found = []
    arguments = compilation.namer.arguments.values()  # the first may order effects: no arrays
    tokens = sum(one.result.startswith("token") for one in arguments)
    for number, (info, sharding) in enumerate(kept, start=tokens):
        described = compilation.namer.argument(number)
        found.append(
            _Argument(
                number=number,
                name=described.name,
                root=re.split(r"[.\[]", described.name)[0],
                kind=described.kind,
                leaf=jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=sharding),
                donated=info.donated,
            )
        )
    return found


def _replicated(compilation: Compilation) -> Iterator[Finding]:
    """An array whole on every device of an axis that shards others of its kind."""
    mesh, arguments = compilation.mesh, _arguments(compilation)
    if mesh is None:
        return
    used = {a.group: set[str]() for a in arguments}
    for argument in arguments:
        used[argument.group] |= argument.axes
    for argument in arguments:
        assert argument.leaf.sharding is not None
        local = argument.leaf.sharding.shard_shape(argument.leaf.shape)
        for axis in sorted(used[argument.group] - argument.axes - COPIES):
            size, cost = mesh.shape[axis], argument.bytes * (1 - 1 / mesh.shape[axis])
            if size > 1 and cost >= compilation.large_bytes and any(d % size == 0 for d in local):
                yield Finding(
                    rule="replicated",
                    name=argument.name,
                    message=f"{argument.name} {list(local)} is whole on all {size} devices of "
                    f"{axis}, which shards others of {argument.group}.",
                    remedy=f"Shard a dimension that {size} divides over {axis}; saves "
                    f"{gib(round(cost))} per device.",
                    bytes=round(cost),
                )


def _replicated_state(compilation: Compilation) -> Iterator[Finding]:
    """Parameters or moments, while training, none of which an axis shards."""
    mesh = compilation.mesh
    if mesh is None or not loops.has_backward(compilation.program):
        return
    state = [a for a in _arguments(compilation) if a.kind in ("parameters", "moments")]
    used = {axis for argument in state for axis in argument.axes}
    total = sum(a.bytes for a in state)
    what = " and ".join(dict.fromkeys(a.kind for a in state))
    for axis, size in mesh.shape.items():
        cost = total * (1 - 1 / size)
        large = cost >= max(STATE_SHARE * compilation.peak_bytes, compilation.large_bytes)
        if axis not in used and large:
            yield Finding(
                rule="replicated-state",
                name=what,
                message=f"All {what} are whole on all {size} devices of {axis}.",
                remedy=f"Move devices from {axis} to an axis that shards them (fsdp): up to "
                f"{gib(round(cost))} less per device.",
                bytes=round(cost),
            )


def _donation(compilation: Compilation) -> Iterator[Finding]:
    """A donated array that no result takes the place of, and state that was not donated."""
    head = compilation.assignment.text.partition("\n")[0]
    reused = {int(n) for n in re.findall(r"\{[\d, ]*\}: \((\d+),", head)}
    updated = set().union(*compilation.namer.updates.values())
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
        elif argument.kind in ("parameters", "moments") and argument.number in updated:
            kept.append(argument)
    cost = sum(argument.bytes for argument in kept)
    if cost >= compilation.large_bytes:
        largest = max(kept, key=lambda argument: argument.bytes)
        count = f"{len(kept)} arrays ({largest.name} is the largest)"
        yield Finding(
            rule="not-donated",
            name=largest.name,
            message=f"{count if len(kept) > 1 else largest.name} of the state: the old and the "
            "new value are both there.",
            remedy="Donate the state (jax.jit(..., donate_argnums=...); in tpjax --donate).",
            bytes=cost,
        )


def _gathered(compilation: Compilation) -> Iterator[Finding]:
    """Logits put together; weights over an axis that does not share the batch, so that all
    of its devices compute the same with them; a whole stack of weights at once."""
    arguments = _arguments(compilation)
    weights = {a.name: a.leaf for a in arguments if a.kind == "parameters"}
    batch = {axis for a in arguments if a.kind == "inputs" for axis in a.axes}
    vocabularies = {
        max(leaf.shape) for name, leaf in weights.items() if leaf.ndim == 2 and _TABLE.search(name)
    }
    trips = loops.trip_counts(compilation.program)
    found: dict[tuple[str, str], Finding] = {}
    for c in sorted(compilation.collectives, key=lambda c: c.bytes):
        if c.op != "all-gather" or c.bytes < compilation.large_bytes:
            continue
        what = f"{c.dtype}{list(c.shape)}"
        if c.kind == "logits" or (c.kind == "activations" and c.shape[-1] in vocabularies):
            found[c.name, c.axis] = Finding(
                rule="gathered-logits",
                name=c.name,
                message=f"The logits {what} are gathered over {c.axis}.",
                remedy="Take log-sum-exp and the target's logit on each shard of the "
                "vocabulary and sum those.",
                bytes=c.bytes,
            )
        elif (weight := weights.get(c.name)) is not None:
            stack = weight.shape[0] in trips and math.prod(c.shape) > math.prod(weight.shape[1:])
            if stack or (batch and not batch & set(c.axis.split(","))):
                found[c.name, c.axis] = Finding(
                    rule="gathered-weight",
                    name=c.name,
                    message=f"{c.name} is gathered over {c.axis}: {what}"
                    f"{', all layers at once' if stack else ''}.",
                    remedy="Gather one layer at a time inside the scan."
                    if stack
                    else "Use it sharded: shard what is computed with it alike.",
                    bytes=c.bytes,
                )
    yield from found.values()


def _captured(compilation: Compilation) -> Iterator[Finding]:
    """Arrays that are part of the program, on every device."""
    if (cost := compilation.assignment.constant_bytes) >= compilation.large_bytes:
        yield Finding(
            rule="captured-constant",
            name="captured arrays",
            message=f"The program has captured {gib(cost)} of arrays, which lie whole on every "
            "device, outside of XLA's pool.",
            remedy="Pass them as arguments.",
            bytes=cost,
        )


def _cpu_kernels(compilation: Compilation) -> Iterator[Finding]:
    """Kernels of XLA for CPU that take memory of their own as they run."""
    count = compilation.assignment.text.count('"__ynn_fusion"')
    if count and compilation.peak_bytes >= LARGE_BYTES:
        yield Finding(
            rule="cpu-kernels",
            name="XLA's kernels for the CPU",
            message=f"{count} kernels of this program for the CPU take memory of their own as they "
            "run, which no figure here counts.",
            remedy="Name a GPU (gpu=) for figures that are whole.",
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
    _captured,
    _cpu_kernels,
    _offload,
    loops.remat,
    loops.gradient_copies,
    loops.scan_copies,
    loops.unread_stacks,
)
