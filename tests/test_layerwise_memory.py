"""What the layer-by-layer update holds and moves: no gradient of all layers or of a table.

Compiled for H100s by XLA's GPU compiler; no GPU is needed.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from functools import lru_cache, partial

import pytest
from test_needs import LLAMA, B, D, F, K, N, T, V, run

from tpjax import architecture
from tpjax.config import TrainConfig
from tpjax.memory.compiled import Compilation, absent_devices, compile_for, init_peak_bytes
from tpjax.memory.needs import needed, unneeded
from tpjax.mesh import make_mesh
from tpjax.sharding import bytes_per_device
from tpjax.state import abstract_state

L = 23  # of no other dimension, and enough for the gradients of all to be most of the peak
DEEP = dataclasses.replace(LLAMA, num_layers=L)
WIDE = dataclasses.replace(LLAMA, num_layers=2, vocab_size=16 * V)
INT8 = {"params": "int8", "moments": "int8"}
MATRICES = 2 * D * D + 2 * D * K * (D // N) + 3 * D * F  # elements of a layer


@pytest.fixture(autouse=True, scope="module")
def _four_parts_of_tables():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(architecture, "TABLE_PART_BYTES", V * D * 4 // 4)
        assert DEEP.table_parts == 4
        yield


def deep(mesh: str = "tensor=4", **settings) -> TrainConfig:
    defaults = {"update": "layerwise", "remat": "full", "split": 2, **INT8}
    return run(mesh, model=DEEP, **(defaults | settings))


whole = partial(deep, update="whole", split=1)


@lru_cache
def compiled(config: TrainConfig) -> Compilation:
    return compile_for(config, gpu="h100")


def shapes(step: Compilation, dtypes: str) -> set[tuple[int, ...]]:
    """Of every array of these types in the program."""
    found = re.findall(rf"\b(?:{dtypes})\[(\d[\d,]*)\]", step.executable.as_text() or "")
    return {tuple(map(int, dims.split(","))) for dims in found}


def stacked_matrices(step: Compilation) -> set[tuple[int, ...]]:
    """Values, not codes, of one matrix of all layers (the smallest are keys and values)."""
    least = L * D * K * (D // N) // 4
    kept = {(L, B, T // 4, D), (L, 1, B, T // 4, D)}  # each layer's input
    found = shapes(step, "f32|bf16")
    return {s for s in found if s[0] == L and math.prod(s) >= least} - kept


def most_of(step: Compilation, kind: str) -> int:
    """Bytes of one kind where there are most of them."""
    return max(step.ledger.timeline.bytes_by_kind[kind])


def test_no_gradient_outlives_its_layer():
    layer_bytes = MATRICES // 4 * 4  # float32, a quarter of it on each device
    at_once, together = compiled(deep()), compiled(whole())
    assert not stacked_matrices(at_once)
    assert (L, D, D) in stacked_matrices(together)  # F / 4 = D
    # Beside one layer's, those of one matrix more or of a part of a table.
    assert layer_bytes <= most_of(at_once, "gradients") < 2.5 * layer_bytes
    assert most_of(together, "gradients") > L * layer_bytes / 2  # in bfloat16


def test_no_table_has_a_gradient_in_float32():
    table = (V // 4, D)
    assert table not in shapes(compiled(deep()), "f32")
    assert (V // 4 // 4, D) in shapes(compiled(deep()), "f32")


def test_the_peak_falls_by_the_gradients_and_with_each_split():
    config = deep()
    saved = compiled(whole()).peak_bytes - compiled(config).peak_bytes
    assert saved > 0.9 * (L - 1) * MATRICES // 4 * 2
    halves, one = compiled(config), compiled(deep(split=1))
    # What half the rows of a layer need is free in the other half: at least the two inner
    # activations of the feed-forward half, in bfloat16.
    assert one.peak_bytes - halves.peak_bytes > 2 * (B // 2) * T * F // 4 * 2


MESHES = {
    "tensor": deep(),
    "fsdp,tensor": deep("fsdp=2,tensor=2", split=1),
    "data,tensor": deep("data=2,tensor=2", params="bf16", moments="bf16"),
    "copied heads": deep("tensor=8"),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_it_moves_nothing_unneeded(mesh):
    config = MESHES[mesh]
    found = compiled(config).collectives
    assert unneeded(config, found) == []
    largest = max(found, key=lambda c: (c.wire_bytes or 0, c.in_scan))
    extra = unneeded(config, [*found, largest])
    assert {(c.op, c.shape) for c, _ in extra} == {(largest.op, largest.shape)}


def test_what_it_moves_by_hand():
    """fsdp=2, tensor=2: a layer's weights are gathered forward and once more going back, for
    both the second run and the gradients; a table's for embedding and loss together, and a part
    of its rows for each part of the head's gradient."""
    found = Counter()
    for need in needed(MESHES["fsdp,tensor"]):
        found[need.op, need.axis, need.elements] += need.count
    rows, q, up, table = B // 2 * T * D, D * D // 2, D * F // 2, V * D // 2
    assert found["all-gather", "fsdp", q] == 2 * L * 2
    assert found["reduce-scatter", "fsdp", q] == 2 * L
    assert table // 4 == up
    assert found["all-gather", "fsdp", up] == 3 * L * 2 + 4
    assert found["reduce-scatter", "fsdp", up] == 3 * L + 2 * 4
    assert found["all-gather", "fsdp", table] == 1
    # Two halves of a layer: gathered forward, again, and for the gradients; the sum of the last
    # half is not made a second time. At the end the normed output and the gradient of the
    # embedding are gathered for the tables, and embedding and its gradient scattered.
    assert found["all-gather", "tensor", rows] == L * (2 + 2 + 2) + 1 + 1
    assert found["reduce-scatter", "tensor", rows] == L * (2 + 1 + 2) + 1


@pytest.mark.parametrize(
    "config",
    [
        deep("fsdp=2,tensor=2", split=1),
        run("tensor=4", model=WIDE, params="int8", moments="factored"),
    ],
    ids=["layers", "tables"],
)
def test_making_the_state_needs_no_more_than_the_state(config):
    """What is drawn in float32, a layer or a part of a table at a time, lies where the state is
    not yet."""
    assert config.mesh is not None
    mesh = make_mesh(config.mesh, config.model, absent_devices("h100", 4))
    state_bytes = bytes_per_device(abstract_state(config, mesh))
    # In all: of what is drawn, at most once what a device has of a matrix or a part of a table.
    drawn = {D * F // 4 * 4, WIDE.padded_vocab_size * D // WIDE.table_parts // 4 * 4}
    assert drawn == {2**20}
    assert state_bytes <= init_peak_bytes(config, mesh) < state_bytes + 2**20
