"""What the compiled step of a GPU mesh moves and holds: the mathematics' needs and no more.

Compiled for H100s by XLA's GPU compiler; no GPU is needed. The model has the
widths of Llama-3.2-1B's ratios in small, with sizes that tell every tensor apart.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from functools import lru_cache

import pytest

from tpjax.config import DataConfig, MemoryConfig, MeshConfig, ModelConfig, TrainConfig
from tpjax.generate import Decoding, lower_step
from tpjax.memory.compiled import Compilation, absent_devices, compile_for, compile_lowered
from tpjax.memory.records import Collective
from tpjax.mesh import make_mesh
from tpjax.resolve import resolve
from tpjax.sampling import Sampling
from tpjax.sharding import bytes_per_device
from tpjax.state import abstract_state
from tpjax.step import lower_eval_step

B, T, D, N, K, H, F, V, L = 8, 512, 256, 16, 4, 32, 1024, 6144, 9
MODEL = ModelConfig(
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
SMALL_BYTES = 64 * 1024  # norm gains, scalars, sums per token: nothing worth a plan


def run(mesh: str, *, accumulate: int = 1, model: ModelConfig = MODEL, **memory) -> TrainConfig:
    return TrainConfig(
        model=model,
        mesh=MeshConfig.parse(mesh),
        memory=MemoryConfig(**{"loss_chunks": 4, **memory}),
        data=DataConfig(batch_size=B, seq_len=T, accumulate=accumulate),
    )


@lru_cache
def compiled(config: TrainConfig) -> Compilation:
    return compile_for(config, gpu="h100")


def moved(config: TrainConfig) -> Counter:
    """(kind, axes, sizes of a layer's activation, weight or chunk) → runs per step.

    Small sums are left out; a gather or scatter never is, however small.
    """
    found = Counter()
    for c in compiled(config).collectives:
        if c.op != "all-reduce" or c.bytes > SMALL_BYTES:
            assert c.count is not None
            found[c.op, c.axis, tuple(sorted(c.shape))] += c.count
    return found


def key(kind: str, axes: str, *shape: int):
    return kind, axes, tuple(sorted(shape))


# Gathers and scatters of the residual stream that the backward pass repeats per layer.
RECOMPUTED = {
    "none": (0, 0),
    "dots": (2, 0),
    "attention": (2, 1),
    "attention,qkv,mlp_in": (2, 0),
    "full": (2, 1),
    "nested": (4, 3),
}


@pytest.mark.parametrize("remat", RECOMPUTED)
def test_tensor_parallel_step_moves_activations_only(remat):
    """Per layer two gathers and two scatters forward, as many backward, and those of the
    recomputation; a chunk of x per chunk of the loss; the embedding's sum and its gradient."""
    gathers, scatters = RECOMPUTED[remat]
    chunk = T // 4
    assert moved(run("tensor=4", remat=remat)) == {
        key("all-gather", "tensor", B, T, D): L * (4 + gathers) + 1,
        key("reduce-scatter", "tensor", B, T, D): L * (4 + scatters) + 1,
        key("all-gather", "tensor", B, chunk, D): 4,
        key("reduce-scatter", "tensor", B, chunk, D): 4,
    }


def test_without_sequence_parallelism_sums_are_whole():
    found = totals(moved(run("tensor=4", remat="full", sequence_parallel=False)))
    assert found == {
        ("all-reduce", "tensor", B * T * D): L * 5 + 1,
        ("all-reduce", "tensor", B * T // 4 * D): 4,
    }


WEIGHTS = {"q": (D, N, H), "k": (D, K, H), "v": (D, K, H), "o": (N, H, D)}
WEIGHTS |= {"gate": (D, F), "up": (D, F), "down": (F, D)}


def weight_traffic(tensor: int, axis: str, passes: int) -> Counter:
    """Each weight gathered once per pass and its gradient scattered once; the tied table
    gathered once for embedding and head together, its two gradients scattered apart."""
    found = Counter()
    for shape in WEIGHTS.values():
        local = [size // tensor if size in (N, K, F) else size for size in shape]
        found[key("all-gather", axis, *local)] += passes * L
        found[key("reduce-scatter", axis, *local)] += L
    found[key("all-gather", axis, V // tensor, D)] += 1
    found[key("reduce-scatter", axis, V // tensor, D)] += 2
    return found


def totals(found: Counter) -> Counter:
    """(kind, axes, elements): XLA may join or reorder the dimensions of a weight."""
    sums = Counter()
    for (kind, axes, shape), n in found.items():
        sums[kind, axes, math.prod(shape)] += n
    return sums


def test_fsdp_gathers_each_weight_once_a_pass_and_scatters_its_gradient():
    found = totals(moved(run("fsdp=4", remat="full")))
    assert found == totals(weight_traffic(1, "fsdp", 2))
    assert totals(moved(run("fsdp=4", remat="none"))) == totals(weight_traffic(1, "fsdp", 1))


def test_fsdp_beside_tensor():
    found = totals(moved(run("fsdp=2,tensor=2", remat="full")))
    weights = weight_traffic(2, "fsdp", 2)
    chunk, rows = T // 4, B // 2
    activations = Counter(
        {
            key("all-gather", "tensor", rows, T, D): L * 6 + 1,
            key("reduce-scatter", "tensor", rows, T, D): L * 5 + 1,
            key("all-gather", "tensor", rows, chunk, D): 4,
            key("reduce-scatter", "tensor", rows, chunk, D): 4,
        }
    )
    assert found == totals(weights + activations)


def test_data_parallel_gradients_are_summed_once():
    found = moved(run("data=2,tensor=2", remat="full"))
    summed = {shape: n for (kind, axes, shape), n in found.items() if axes == "data"}
    assert {kind for (kind, axes, _) in found if axes == "data"} == {"all-reduce"}
    elements = sum(math.prod(shape) * n for shape, n in summed.items())
    weights = sum(math.prod(shape) for shape in WEIGHTS.values()) * L // 2
    small = sum(math.prod(WEIGHTS[w]) for w in "kv") * L // 2  # 16 KiB each: below SMALL_BYTES
    table = V * D // 2  # as embedding and as head; XLA may add the two first, on the device
    scalars = 8  # summed along with something large
    expected = {weights + n * table - left_out for n in (1, 2) for left_out in (0, small)}
    assert any(0 <= elements - size <= scalars for size in expected)


def test_copied_key_value_heads_cost_one_small_sum():
    """tensor=8 with four key/value heads: activations move as ever; over the copies
    only the gradients of k and v do."""
    step = compiled(run("tensor=8", remat="full"))
    over_copies = [c for c in step.collectives if c.axis == "kv_copy"]
    assert over_copies
    assert all(c.op == "all-reduce" and c.bytes <= 2 * D * H * 2 for c in over_copies)
    found = moved(run("tensor=8", remat="full"))
    assert found[key("all-gather", "tensor,kv_copy", B, T, D)] == L * 6 + 1
    assert found[key("reduce-scatter", "tensor,kv_copy", B, T, D)] == L * 5 + 1
    assert len(found) == 4


def test_accumulation_moves_no_more_kinds():
    whole, parts = (moved(run("fsdp=2,tensor=2", remat="full", accumulate=n)) for n in (1, 2))
    assert {(kind, axes) for kind, axes, _ in parts} == {(kind, axes) for kind, axes, _ in whole}


@pytest.mark.parametrize("tie", [True, False])
def test_no_vocabulary_is_gathered_outside_training_either(tie):
    model = dataclasses.replace(MODEL, vocab_size=V - 5, tie_embeddings=tie)
    config = resolve(run("tensor=4", model=model), num_devices=4, platform="gpu")
    assert config.mesh is not None
    mesh = make_mesh(config.mesh, model, absent_devices("h100", 4))
    for c in compile_lowered(lower_eval_step(config, mesh), mesh).collectives:
        assert V not in c.shape, c
        assert V - 5 not in c.shape, c


@pytest.mark.parametrize("cache", ["bf16", "int8"])
def test_decoding_moves_one_activation_a_projection_and_no_logits(cache):
    config = resolve(run("tensor=4"), num_devices=4, platform="gpu")
    assert config.mesh is not None
    mesh = make_mesh(config.mesh, config.model, absent_devices("h100", 4))
    sampling = Sampling(top_k=40, top_p=0.9)
    decoding = Decoding(context=T, prompt_len=64, batch_size=2, cache=cache, sampling=sampling)
    found = compile_lowered(lower_step(config, mesh, decoding), mesh).collectives
    large = [c for c in found if math.prod(c.shape) > 2 * 16]
    assert {(c.op, math.prod(c.shape)) for c in large} == {("all-reduce", 2 * D)}
    assert sum(c.count for c in large) == 2 * L + 1


def test_peaks_fall_with_recomputation_and_all_state_is_reused():
    peaks = []
    for remat in ("none", "dots", "attention", "full"):
        config = run("tensor=4", remat=remat)
        step = compiled(config)
        peaks.append(step.peak_bytes)
        sizes = step.executable.memory_analysis()
        assert sizes is not None
        config = resolve(config, num_devices=4, platform="gpu")
        assert step.mesh is not None
        assert sizes.alias_size_in_bytes >= bytes_per_device(abstract_state(config, step.mesh))
    none, dots, attention, full = peaks
    assert none > dots > full
    assert none > attention > full


@pytest.mark.parametrize(
    ("remat", "runs"),
    [("none", 1), ("attention", 1), ("attention,qkv,mlp_in", 1), ("full", 2), ("nested", 3)],
)
def test_kept_attention_is_not_run_again(remat, runs):
    text = compiled(run("tensor=4", remat=remat)).executable.as_text() or ""
    assert text.count('custom_call_target="__cudnn$fmhaSoftmax"') == runs
    assert text.count('custom_call_target="__cudnn$fmhaSoftmaxBackward"') == 1


def test_logits_are_held_one_chunk_at_a_time():
    """The largest array with the vocabulary in it is a chunk of logits, or the head."""
    text = compiled(run("tensor=4", remat="full")).executable.as_text() or ""
    with_vocabulary = {
        dims for dims in re.findall(r"f32\[([\d,]+)\]", text) if str(V // 4) in dims.split(",")
    }
    sizes = {math.prod(map(int, dims.split(","))) for dims in with_vocabulary}
    assert max(sizes) == B * T // 4 * V // 4
    assert f"{B * T // 4},{V // 4}" in with_vocabulary


def test_collective_bytes_by_hand():
    gathered = Collective(
        op="all-gather",
        axis="tensor",
        group_size=4,
        dtype="bf16",
        shape=(8, 4),
        bytes=64,
        count=3,
        in_scan=True,
        asynchronous=False,
        kind="activations",
        name="x",
        source=None,
    )
    assert gathered.wire_bytes == 64 * 3 * 3 // 4
    assert dataclasses.replace(gathered, op="all-reduce").wire_bytes == 64 * 3 * 3 // 2
    assert dataclasses.replace(gathered, count=None).wire_bytes is None
