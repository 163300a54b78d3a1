"""What a training step of ours has to move between devices, by the mathematics.

Per layer, tensor parallelism with a sharded sequence gathers the residual stream
before attention and feed-forward and scatters their sums after them
(arXiv:2205.05198); fsdp gathers each weight when it is used and scatters its
gradient (arXiv:1910.02054); data parallelism sums each gradient once. Layer by layer
it is the same for each part that a layer's work is split into; the vocabulary's tables
have the gradients of their rows made part by part from whole sequences. Beside adapters
weights have no gradients, and what adapters move is as narrow as their rank.

Letters: B rows of a device's part of the batch, T sequence, D model width,
V vocabulary, L layers.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tpjax.config import TrainConfig
from tpjax.layers import PARAMETERS
from tpjax.memory.records import Collective, Finding, gib
from tpjax.mesh import TENSOR
from tpjax.remat import repeated

SMALL_SHARE = 0.01  # of the residual stream: what is summed of less is not worth a finding


@dataclass(frozen=True, kw_only=True)
class Need:
    """Collectives that a step cannot do without.

    Attributes:
        op, axis: as in `Collective`.
        elements: of the larger side.
        count: runs per step.
    """

    op: str
    axis: str
    elements: int
    count: int


def needed(config: TrainConfig) -> list[Need]:
    """All collectives of a resolved configuration's step, small sums left out."""
    return [*_activations(config), *_weights(config), *_tables(config)]


def _tensor_axis(config: TrainConfig) -> str:
    """The mesh axes of size > 1 that `tensor` is made of."""
    assert config.mesh is not None
    copies = max(1, config.mesh.tensor // config.model.num_kv_heads)
    sizes = (config.mesh.tensor // copies, copies)
    return ",".join(axis for axis, size in zip(TENSOR, sizes, strict=True) if size > 1)


def _residual_elements(config: TrainConfig) -> int:
    """B·T·D of a device's rows."""
    mesh, data = config.mesh, config.data
    assert mesh is not None
    rows = data.part_size // (mesh.data * mesh.fsdp)
    return rows * data.seq_len * config.model.embed_dim


def _adapts(config: TrainConfig) -> bool:
    return bool(config.model.adapted)


def _split(config: TrainConfig) -> int:
    """Parts of what is swept at once that go through a layer one after the other."""
    memory = config.memory
    return int(memory.split) if memory.update == "layerwise" else 1


def _activations(config: TrainConfig) -> Iterator[Need]:
    """The residual stream, in each layer, in each chunk of the loss, and of the embedding."""
    mesh, memory, A = config.mesh, config.memory, config.data.accumulate
    assert mesh is not None
    if mesh.tensor == 1:
        return
    again = repeated(memory)
    gathers, scatters = 2 * again["gather"], again["o"] + again["down"]
    axis, whole, L = _tensor_axis(config), _residual_elements(config), config.model.num_layers
    chunks, S = memory.loss_chunks, _split(config)
    # Of the embedding: its sum, and the gradient of it; layer by layer also the normed output,
    # for the head's gradient.
    outside = {"all-reduce": 1, "reduce-scatter": 1, "all-gather": 1}
    outside["all-gather"] += memory.update == "layerwise"
    outside["all-gather"] -= _adapts(config)
    extra = {"all-reduce": scatters, "reduce-scatter": scatters, "all-gather": gathers}
    for op in ("all-gather", "reduce-scatter") if memory.sequence_parallel else ("all-reduce",):
        yield Need(op=op, axis=axis, elements=whole // S, count=A * S * L * (4 + extra[op]))
        yield Need(op=op, axis=axis, elements=whole, count=A * outside[op])
        yield Need(op=op, axis=axis, elements=whole // chunks, count=A * chunks)


def _elements(config: TrainConfig, name: str, axes: Sequence[str]) -> int:
    """Of one weight on a device, where `axes` of the mesh are sharded and the others not."""
    mesh, sizes = config.mesh, config.model.sizes
    assert mesh is not None
    total = math.prod(sizes[letter] for letter in PARAMETERS[name].letters)
    if "tensor" in axes:
        heads = "K" in PARAMETERS[name].letters
        total //= min(mesh.tensor, sizes["K"]) if heads else mesh.tensor
    return total // mesh.fsdp if "fsdp" in axes else total


def _matrices(config: TrainConfig) -> list[str]:
    gate = ["gate"] if config.model.mlp == "swiglu" else []
    return ["q", "k", "v", "o", *gate, "up", "down"]


def _weights(config: TrainConfig) -> Iterator[Need]:
    """Each layer's weights, and their gradients."""
    mesh, L = config.mesh, config.model.num_layers
    assert mesh is not None
    A, passes = config.data.accumulate, 1 + repeated(config.memory)["gather"]
    parts = A * _split(config)  # sums wait for the last part of a layer, gathers do not
    for name in _matrices(config):
        gathered, stored = (_elements(config, name, a) for a in (("tensor",), ("tensor", "fsdp")))
        if mesh.fsdp > 1:
            yield Need(op="all-gather", axis="fsdp", elements=gathered, count=parts * L * passes)
        if _adapts(config):
            continue
        if mesh.fsdp > 1:
            yield Need(op="reduce-scatter", axis="fsdp", elements=gathered, count=parts * L)
        if mesh.data > 1:
            yield Need(op="all-reduce", axis="data", elements=stored, count=A * L)
        if name in "kv" and mesh.tensor > config.model.num_kv_heads:
            yield Need(op="all-reduce", axis="kv_copy", elements=gathered, count=A * L)


def _tables(config: TrainConfig) -> Iterator[Need]:
    """The vocabulary's tables: gathered for embedding and head, their gradients apart. Layer by
    layer each part of the head's rows is gathered again, for its gradient."""
    mesh, A, layerwise = config.mesh, config.data.accumulate, config.memory.update == "layerwise"
    assert mesh is not None
    gathered, tied = _elements(config, "embedding", ("tensor",)), config.model.tie_embeddings
    parts = config.model.table_parts if layerwise else 1
    if config.model.rope is None:
        yield from _positions(config)
    if mesh.fsdp > 1:
        yield Need(op="all-gather", axis="fsdp", elements=gathered, count=A * (1 if tied else 2))
        if layerwise:
            yield Need(op="all-gather", axis="fsdp", elements=gathered // parts, count=parts)
    if _adapts(config):
        return
    if mesh.fsdp > 1:
        count = A * 2 * parts
        yield Need(op="reduce-scatter", axis="fsdp", elements=gathered // parts, count=count)
    if mesh.data > 1:  # a tied table has the gradients of both
        stored = _elements(config, "embedding", ("tensor", "fsdp"))
        yield Need(op="all-reduce", axis="data", elements=stored // parts, count=A * 2 * parts)
    if mesh.tensor > 1 and config.memory.embedding == "replicated":  # each gradient, put together
        whole, axis = _elements(config, "embedding", ("fsdp",)), _tensor_axis(config)
        yield Need(op="all-gather", axis=axis, elements=whole, count=A * 2)


def _positions(config: TrainConfig) -> Iterator[Need]:
    """Learned positions: each device uses its part of the sequence. XLA scatters the
    gradient, or sums it and takes a part."""
    mesh, A = config.mesh, config.data.accumulate
    assert mesh is not None
    whole = config.model.max_seq_len * config.model.embed_dim
    summed = [",".join(axis for axis in ("data", "fsdp") if getattr(mesh, axis) > 1)]
    if mesh.fsdp > 1:
        yield Need(op="all-gather", axis="fsdp", elements=whole, count=A)
    if _adapts(config):
        return
    if mesh.fsdp > 1:
        yield Need(op="reduce-scatter", axis="fsdp", elements=whole, count=A)
        summed += ["data"] if mesh.data > 1 else []
    if config.memory.sequence_parallel:
        yield Need(op="all-gather", axis=_tensor_axis(config), elements=whole, count=A)
    for axis in filter(None, summed):
        yield Need(op="all-reduce", axis=axis, elements=whole, count=A)


def unneeded(config: TrainConfig, found: Sequence[Collective]) -> list[tuple[Collective, int]]:
    """Collectives beyond `needed`, each with the runs per step that are too many.

    Small sums are left out. XLA may join several arrays in one collective: what is
    left of both sides is compared by its total.
    """
    small, narrow = _small_elements(config), _narrow_elements(config)
    left: Counter = Counter()
    for need in needed(config):
        left[need.op, need.axis, need.elements] += need.count
    extra: list[tuple[Collective, int]] = []
    for c in found:
        elements = math.prod(c.shape)
        if elements <= narrow or c.count is None or (c.op == "all-reduce" and elements <= small):
            continue
        covered = min(left[c.op, c.axis, elements], c.count)
        left[c.op, c.axis, elements] -= covered
        if c.count > covered:
            extra.append((c, c.count - covered))
    totals: Counter = Counter()
    for (op, axis, elements), count in left.items():
        totals[op, axis] += elements * count
    for c, count in extra:
        totals[c.op, c.axis] -= math.prod(c.shape) * count
    allowed = {"all-reduce": small}
    return [(c, count) for c, count in extra if totals[c.op, c.axis] < -allowed.get(c.op, 0)]


def _small_elements(config: TrainConfig) -> float:
    """What an all-reduce may sum beside: gradients of all gains and biases, scalars of a
    chunk's tokens."""
    model, sizes = config.model, config.model.sizes
    tokens = _residual_elements(config) // sizes["D"]
    per_layer = 4 * sizes["D"]
    if model.qkv_bias or model.o_bias or model.mlp_bias:
        per_layer += 2 * sizes["F"] + (sizes["N"] + 2 * sizes["K"]) * sizes["H"]
    vectors = model.num_layers * per_layer + 2 * sizes["D"]
    share = SMALL_SHARE * tokens * sizes["D"]
    return max(share, vectors + tokens // config.memory.loss_chunks)


def _narrow_elements(config: TrainConfig) -> int:
    """What adapters have of activations between their matrices, or all of a layer's of weights."""
    sizes, targets = config.model.sizes, config.model.adapted
    tokens = _residual_elements(config) // sizes["D"]
    letters = [PARAMETERS[f"{name}_{part}"].letters for name in targets for part in "ab"]
    weights = sum(math.prod(sizes[letter] for letter in one) for one in letters)
    return max(tokens * sizes["A"], weights)


def audit(config: TrainConfig, found: Sequence[Collective]) -> list[Finding]:
    """A finding for each collective that the mathematics does not need."""
    alike: dict[tuple, list[tuple[Collective, int]]] = defaultdict(list)
    for c, count in unneeded(config, found):
        alike[c.op, c.name, c.axis, c.dtype, c.shape].append((c, count))
    findings = []
    for group in alike.values():
        c, runs = group[0][0], sum(count for _, count in group)
        wire_bytes = sum(_wire_bytes(one, count) for one, count in group)
        sources = dict.fromkeys(one.source for one, _ in group if one.source)
        findings.append(
            Finding(
                rule="unneeded-collective",
                name=c.name,
                message=f"{c.op} of {c.name} {c.dtype}{list(c.shape)} over {c.axis}, {runs} × a "
                f"step, is more than the mathematics needs: {gib(wire_bytes)} on the wire.",
                remedy=f"Look at the shardings around {' and '.join(sources) or 'it'}.",
                bytes=wire_bytes,
            )
        )
    return findings


def _wire_bytes(c: Collective, count: int) -> int:
    assert c.wire_bytes is not None
    assert c.count is not None
    return c.wire_bytes * count // c.count
