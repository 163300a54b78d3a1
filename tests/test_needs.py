"""What a step moves is what the mathematics needs, on every mesh; anything else is named.

Compiled for H100s by XLA's GPU compiler; no GPU is needed.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from functools import lru_cache

import jax
import pytest
from jax.sharding import PartitionSpec as P
from jax.sharding import reshard

from tpjax import mlp
from tpjax.config import DataConfig, LoraConfig, MemoryConfig, MeshConfig, ModelConfig, TrainConfig
from tpjax.memory.compiled import Compilation, compile_for
from tpjax.memory.hlo import Program
from tpjax.memory.names import Namer
from tpjax.memory.needs import audit, needed, unneeded
from tpjax.memory.records import Collective
from tpjax.memory.traffic import _replica_groups, collectives
from tpjax.resolve import resolve

B, T, D, N, K, H, F, V, L = 8, 512, 512, 16, 4, 32, 2048, 8192, 4
LLAMA = ModelConfig(
    name="small",
    vocab_size=V,
    num_layers=L,
    embed_dim=D,
    num_heads=N,
    num_kv_heads=K,
    head_dim=H,
    mlp_dim=F,
    max_seq_len=T,
)
UNTIED = dataclasses.replace(LLAMA, tie_embeddings=False, vocab_size=V - 5)
GPT2 = dataclasses.replace(
    LLAMA,
    name="small-gpt2",
    num_kv_heads=N,
    norm="layernorm",
    rope=None,
    mlp="gelu",
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    norm_bias=True,
)


ADAPTED = dataclasses.replace(LLAMA, lora=LoraConfig(lora_rank=8))


def run(mesh: str, *, model: ModelConfig = LLAMA, accumulate: int = 1, **memory) -> TrainConfig:
    """A resolved run on GPUs."""
    sizes = MeshConfig.parse(mesh)
    config = TrainConfig(
        model=model,
        mesh=sizes,
        memory=MemoryConfig(**{"loss_chunks": 4, **memory}),
        data=DataConfig(batch_size=B, seq_len=T, accumulate=accumulate),
    )
    return resolve(config, num_devices=sizes.num_devices, platform="gpu")


@lru_cache
def compiled(config: TrainConfig) -> Compilation:
    return compile_for(config, gpu="h100")


# Every mesh, policy and kind of model in few compilations, which tests/test_lint.py shares.
RUNS = {
    "tensor none": run("tensor=4", remat="none"),
    "tensor full": run("tensor=4", remat="full"),
    "fsdp none untied": run("fsdp=4", remat="none", model=UNTIED),
    "fsdp full gpt2": run("fsdp=4", remat="full", model=GPT2),
    "fsdp,tensor dots untied": run("fsdp=2,tensor=2", remat="dots", model=UNTIED),
    "data,fsdp full accumulated": run("data=2,fsdp=2", remat="full", accumulate=2),
    "data,tensor whole sequence": run("data=2,tensor=2", remat="dots", sequence_parallel=False),
    "fsdp,tensor nested": run("fsdp=2,tensor=2", remat="nested"),
    "fsdp,tensor names": run("fsdp=2,tensor=2", remat="qkv,mlp_in", offload="residuals"),
    "copied heads": run("fsdp=2,tensor=8", remat="attention"),
    "tensor adapters": run("tensor=4", model=ADAPTED, params="nf4", remat="full"),
    "fsdp adapters gpt2": run(
        "fsdp=4", model=dataclasses.replace(GPT2, lora=ADAPTED.lora), params="bf16", remat="full"
    ),
    "data,fsdp,tensor adapters": run("data=2,fsdp=2,tensor=2", model=ADAPTED, params="int8"),
}
COPIED_TABLES = {
    "tied": run("tensor=4", embedding="replicated", accumulate=2),
    "untied": run("fsdp=2,tensor=2", model=UNTIED, embedding="replicated"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_step_moves_nothing_unneeded(name):
    assert unneeded(RUNS[name], compiled(RUNS[name]).collectives) == []


def test_weights_beside_adapters_need_no_sums():
    """They are gathered, and the residual stream moves; no gradient of theirs does."""
    found = {(n.op, n.axis) for n in needed(RUNS["data,fsdp,tensor adapters"])}
    assert found == {("all-gather", "fsdp"), ("all-gather", "tensor"), ("reduce-scatter", "tensor")}


def test_needs_by_hand():
    """data=2, fsdp=2, tensor=2, two parts of the batch: one row of 512 tokens a device."""
    config = run("data=2,fsdp=2,tensor=2", model=UNTIED, remat="dots", accumulate=2)
    whole, chunk = 512 * 512, 128 * 512
    q, k, up, table = 512 * 512 // 2, 512 * 128 // 2, 512 * 2048 // 2, 8192 * 512 // 2
    found = Counter()
    for need in needed(config):
        found[need.op, need.axis, need.elements] += need.count
    assert found == {
        # Two sums a layer forward, two backward; gathers again in the recomputation.
        ("all-gather", "tensor", whole): 2 * (4 * 6 + 1),
        ("reduce-scatter", "tensor", whole): 2 * (4 * 4 + 1),
        ("all-gather", "tensor", chunk): 2 * 4,
        ("reduce-scatter", "tensor", chunk): 2 * 4,
        # q and o, k and v, gate, up and down; forward and backward, each layer, each part.
        ("all-gather", "fsdp", q): 2 * 2 * 4 * 2,
        ("all-gather", "fsdp", k): 2 * 2 * 4 * 2,
        ("all-gather", "fsdp", up): 3 * 2 * 4 * 2,
        ("reduce-scatter", "fsdp", q): 2 * 4 * 2,
        ("reduce-scatter", "fsdp", k): 2 * 4 * 2,
        ("reduce-scatter", "fsdp", up): 3 * 4 * 2,
        ("all-reduce", "data", q // 2): 2 * 4 * 2,
        ("all-reduce", "data", k // 2): 2 * 4 * 2,
        ("all-reduce", "data", up // 2): 3 * 4 * 2,
        # Embedding and head apart.
        ("all-gather", "fsdp", table): 2 * 2,
        ("reduce-scatter", "fsdp", table): 2 * 2,
        ("all-reduce", "data", table // 2): 2 * 2,
    }


def test_what_nested_repeats_by_hand():
    """Each layer is run three times: its weights and residual streams are gathered for each and
    for its gradients; the sum after the feed-forward half is left out the third time."""
    found = Counter()
    for need in needed(run("fsdp=2,tensor=2", remat="nested")):
        found[need.op, need.axis, need.elements] += need.count
    whole, up = B // 2 * T * D, D * F // 2
    assert found["all-gather", "tensor", whole] == 4 * (2 + 2 + 2 + 2) + 1
    assert found["reduce-scatter", "tensor", whole] == 4 * (2 + 2 + 1 + 2) + 1
    assert found["all-gather", "fsdp", up] == 3 * 4 * 3
    assert found["reduce-scatter", "fsdp", up] == 3 * 4


def test_a_tied_table_is_gathered_once_and_has_two_gradients():
    table = {n.op: n.count for n in needed(run("fsdp=4")) if n.elements == V * D}
    assert table == {"all-gather": 1, "reduce-scatter": 2}


@pytest.mark.parametrize(
    ("name", "elements", "count"),
    [("tied", V * D, 4), ("untied", V * D // 2, 2)],  # the former in two parts of the batch
)
def test_copies_of_the_tables_have_their_gradients_put_together(name, elements, count):
    """That of the embedding and that of the head, once a part; nothing else moves beside."""
    config = COPIED_TABLES[name]
    found = compiled(config).collectives
    assert unneeded(config, found) == []
    (need,) = [n for n in needed(config) if (n.elements, n.axis) == (elements, "tensor")]
    assert (need.op, need.count) == ("all-gather", count)
    memory = dataclasses.replace(config.memory, embedding="sharded")
    extra = unneeded(dataclasses.replace(config, memory=memory), found)
    assert sum(runs for _, runs in extra) == count
    assert {(c.op, c.axis, math.prod(c.shape)) for c, _ in extra} == {
        ("all-gather", "tensor", elements)
    }


def one_of(config: TrainConfig, op: str, axis: str, elements: int) -> Collective:
    """One of that kind, in the scan over layers if there is such a one."""
    alike = [
        c
        for c in compiled(config).collectives
        if (c.op, c.axis, math.prod(c.shape)) == (op, axis, elements)
    ]
    return max(alike, key=lambda c: c.in_scan)


PLANTS = RUNS["fsdp,tensor dots untied"]


@pytest.mark.parametrize(
    ("kind", "elements", "name"),
    [
        (("all-gather", "tensor"), B // 2 * T * D, "layers/"),
        (("reduce-scatter", "tensor"), B // 2 * T * D, "layers/"),
        (("all-gather", "fsdp"), D * F // 2, "state.params.blocks.mlp."),
        (("all-gather", "fsdp"), D * K * H // 2, "state.params.blocks.attention."),
        (("reduce-scatter", "fsdp"), D * F // 2, "gradient of state.params.blocks.mlp."),
        (("all-gather", "fsdp"), V * D // 2, "state.params."),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else str(value),
)
def test_one_collective_too_many_is_named(kind, elements, name):
    twice = one_of(PLANTS, kind[0], kind[1], elements)
    assert name in twice.name
    found = audit(PLANTS, [*compiled(PLANTS).collectives, twice])
    assert found, twice
    size = elements * 2 // 2 * twice.count  # bf16, half of it over two devices
    assert {(f.rule, f.bytes) for f in found} == {("unneeded-collective", size)}
    assert twice.name in {f.name for f in found}
    assert all(f.message and f.remedy for f in found)


def test_more_runs_than_needed_are_found():
    """A gather of the residual stream of every layer that happens twice."""
    one = one_of(PLANTS, "all-gather", "tensor", B // 2 * T * D)
    assert one.count == L
    found = [c for c in compiled(PLANTS).collectives if c is not one]
    found.append(dataclasses.replace(one, count=2 * L))
    (extra,) = unneeded(PLANTS, found)
    assert extra[1] == L
    (finding,) = audit(PLANTS, found)
    assert finding.bytes == L * (B // 2 * T * D) * 2 // 2


def test_the_wrong_axis_is_found():
    """The sums of the layers over fsdp instead of tensor."""
    found = list(compiled(PLANTS).collectives)
    one = one_of(PLANTS, "reduce-scatter", "tensor", B // 2 * T * D)
    found[found.index(one)] = dataclasses.replace(one, axis="fsdp")
    (finding,) = audit(PLANTS, found)
    assert finding.name == one.name
    assert "over fsdp" in finding.message
    assert finding.bytes == one.wire_bytes


@pytest.mark.parametrize("op", ["all-reduce", "all-to-all", "collective-permute"])
def test_other_kinds_of_traffic_are_found(op):
    one = dataclasses.replace(one_of(PLANTS, "all-gather", "tensor", B // 2 * T * D), op=op)
    (finding,) = audit(PLANTS, [*compiled(PLANTS).collectives, one])
    assert finding.bytes == one.wire_bytes


def test_sums_of_gains_and_scalars_are_no_findings():
    one = one_of(PLANTS, "all-gather", "tensor", B // 2 * T * D)
    small = dataclasses.replace(one, op="all-reduce", shape=(2 * L * D,), bytes=8 * L * D, count=1)
    assert audit(PLANTS, [*compiled(PLANTS).collectives, small]) == []
    gathered = dataclasses.replace(small, op="all-gather")  # no gather is small enough
    assert audit(PLANTS, [*compiled(PLANTS).collectives, gathered])


@lru_cache
def with_up_gathered() -> Compilation:
    """The step on tensor=4, where `up` is put together on every device before its use."""
    read = mlp.read

    def read_whole(weight, dtype, **how):
        stored = read(weight, dtype, **how)
        if weight.get_metadata()["name"] != "up":
            return stored
        whole = jax.lax.optimization_barrier(reshard(stored, P()))
        return reshard(whole, jax.typeof(stored).sharding.spec)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlp, "read", read_whole)
        return compile_for(RUNS["tensor full"], gpu="h100")


def test_a_weight_gathered_in_the_step_is_named():
    """`up` forward and in the recomputation, and its gradient on the way back."""
    weight, gradient = audit(RUNS["tensor full"], with_up_gathered().collectives)
    up = "state.params.blocks.mlp.up"
    assert weight.name == up
    assert gradient.name.startswith("gradient of")
    assert up in gradient.name
    once = L * D * F * 2 * 3 // 4
    assert (weight.bytes, gradient.bytes) == (2 * once, once)
    assert f"all-gather of {up} bf16[512, 2048] over tensor, 8 × a step" in weight.message
    assert "around tpjax/" in weight.remedy


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}, dim", [[0, 1], [2, 3]]),
        ("replica_groups={}, to_apply", [[0, 1, 2, 3]]),
        ("replica_groups=[2,2]<=[4], dim", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0), dim", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'a'}, dim", [[0, 2], [1, 3]]),
        ("source_target_pairs={{0,1},{1,0}}, meta", [[0, 1], [1, 0]]),
        ("source_target_pairs={}, meta", [[]]),
    ],
)
def test_groups_of_devices_in_every_notation(text, groups):
    assert _replica_groups(text, 4).tolist() == groups


@pytest.mark.parametrize(
    ("moves", "count"),
    [
        ("collective-permute(%p), source_target_pairs={}", 0),
        ("collective-permute(%p), source_target_pairs={{1,1},{0,0}}", 0),
        ("collective-permute(%p), source_target_pairs={{1,0},{0,1}}", 1),
        ("all-reduce(%p), replica_groups={{0},{1}}", 0),
        ("all-reduce(%p), replica_groups={{0,1}}", 1),
    ],
)
def test_collectives_of_one_device_move_nothing(moves, count):
    """XLA leaves some in."""
    program = Program.parse(f"""HloModule m

ENTRY %main (p: f32[8]) -> f32[8] {{
  %p = f32[8]{{0}} parameter(0)
  ROOT %moved = f32[8]{{0}} {moves}
}}
""")
    assert len(collectives(program, Namer(program, ["result"]), None)) == count


@pytest.mark.parametrize("name", ["fsdp,tensor dots untied", "copied heads"])
def test_loops_and_asynchrony_as_the_text_says(name):
    """Read again from the program's text, computation by computation."""
    text = compiled(RUNS[name]).assignment.text
    computations = {
        found[1]: found[2]
        for found in re.finditer(r"^(?:ENTRY )?%([\w.\-]+) [^\n]*\{\n(.*?)^\}", text, re.M | re.S)
    }
    looping = set(re.findall(r" body=%([\w.\-]+)", text))
    queue = list(looping)
    while queue:
        for called in re.findall(r"(?:calls|to_apply|body)=%([\w.\-]+)", computations[queue.pop()]):
            queue += {called} - looping
            looping.add(called)
    wrapped = dict(re.findall(r" async-start\(.*calls=%([\w.\-]+).*\"is_sync\":(\w+)", text))
    expected = Counter()
    for computation, body in computations.items():
        for line in body.splitlines():
            found = re.search(r" (all-gather|all-reduce|reduce-scatter)(-start)?\(([^)]*)\)", line)
            if found:
                sync = re.search(r'"is_sync":(\w+)', line)
                waits = sync[1] if found[2] and sync else wrapped.get(computation, "true")
                key = (found[1], computation in looping, waits == "false")
                expected[key] += found[3].count("%")
    moved = compiled(RUNS[name]).collectives
    assert Counter((c.op, c.in_scan, c.asynchronous) for c in moved) == expected
    assert len({(c.in_scan, c.asynchronous) for c in moved}) == 4
    assert all((c.count == 1) == (not c.in_scan) for c in moved)
