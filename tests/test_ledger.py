"""The ledger of our training step: every byte counted once, by a name that is right.

Compiled for H100s by XLA's GPU compiler; no GPU is needed. What it should say
is counted by hand from the model's sizes.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from conftest import mesh_of, tiny_config
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from test_collectives import WEIGHTS, B, D, F, H, K, L, N, T, V, compiled, run

from tpjax import memory
from tpjax.config import DataConfig, MeshConfig, TrainConfig
from tpjax.gpus import Outside
from tpjax.memory.buffers import segments
from tpjax.memory.compiled import Compilation, compile_lowered
from tpjax.memory.hlo import Program
from tpjax.memory.names import Namer
from tpjax.memory.paths import Place
from tpjax.memory.records import KINDS, Line
from tpjax.presets import preset
from tpjax.step import lower_train_step

MESHES, REMATS = ("tensor=4", "fsdp=2,tensor=2"), ("none", "dots", "full")
SET_UPS = pytest.mark.parametrize(("mesh", "remat"), [(m, r) for m in MESHES for r in REMATS])
CHUNKS = 4


def local_shapes(mesh: str, layers: bool = True) -> dict[str, tuple[int, ...]]:
    """Path of each parameter → a device's part of it."""
    sizes = MeshConfig.parse(mesh)
    parts = {D: sizes.fsdp, N: sizes.tensor, K: sizes.tensor, F: sizes.tensor, V: sizes.tensor}
    stack = (L,) if layers else ()
    found = {"norm.gain": (D,), "embedding": (V // sizes.tensor, D // sizes.fsdp)}
    for name in ("attention_norm", "mlp_norm"):
        found[f"blocks.{name}.gain"] = (*stack, D)
    for name, shape in WEIGHTS.items():
        half = "attention" if name in "qkvo" else "mlp"
        local = (size if size == H else size // parts[size] for size in shape)
        found[f"blocks.{half}.{name}"] = (*stack, *local)
    return found


def bytes_of(lines, kind: str, dtype: str = "f32") -> dict[str, int]:
    return {line.name: line.bytes for line in lines if line.kind == kind and line.dtype == dtype}


def at_peak(step: Compilation, name: str) -> list[int]:
    return [line.bytes for line in step.ledger.lines if line.name == name and line.shape]


@SET_UPS
def test_lines_add_up_to_what_the_program_needs(mesh, remat):
    step = compiled(run(mesh, remat=remat))
    sizes = step.executable.memory_analysis()
    assert sizes is not None
    lines = step.ledger.lines
    assert sum(line.bytes for line in lines) == (
        sizes.argument_size_in_bytes
        + sizes.output_size_in_bytes
        - sizes.alias_size_in_bytes
        + sizes.temp_size_in_bytes
    )
    assert all(line.bytes > 0 for line in lines)
    assert {line.kind for line in lines} <= set(KINDS)
    assert list(lines) == sorted(lines, key=lambda line: -line.bytes)
    assert step.ledger.host_lines == ()
    assert step.host_bytes == 0


@SET_UPS
def test_nearly_every_byte_has_a_kind_and_a_name(mesh, remat):
    step = compiled(run(mesh, remat=remat))
    unknown = [line.bytes for line in step.ledger.lines if line.kind in ("other", "unused")]
    assert sum(unknown) <= 0.05 * step.peak_bytes
    for line in step.ledger.lines:
        if line.bytes > 0.001 * step.peak_bytes:
            assert not re.search(r"\.\d+$|fusion|custom-call|^argument \d", line.name), line
            assert "rope_tables" not in line.name
    for segment, description in step.ledger.moving:  # zeros, for what a loop makes of them
        assert "broadcast" not in description.name or segment.size < 0.001 * step.peak_bytes


@SET_UPS
def test_state_and_batch_by_hand(mesh, remat):
    all_lines = compiled(run(mesh, remat=remat)).ledger.lines
    lines = [line for line in all_lines if not line.name.endswith(" (copy)")]
    expected = {name: 4 * math.prod(shape) for name, shape in local_shapes(mesh).items()}
    arguments = [line for line in lines if line.source is None]
    found = {
        name: size
        for name, size in bytes_of(arguments, "parameters").items()
        if name.startswith("state.params.")  # what is gathered of them goes by their names too
    }
    assert found == {f"state.params.{name}": size for name, size in expected.items()}
    moments = {}
    for name, size in expected.items():
        part = "blocks" if name.startswith("blocks.") else "rest"
        part = f"tables.{name}" if name in ("embedding", "head") else part
        for moment in ("mu", "nu"):
            tail = name.removeprefix("blocks.")
            moments[f"state.opt_state.{part}[0].{moment}.{tail}"] = size
    assert bytes_of(lines, "moments") == moments
    rows = B * T // MeshConfig.parse(mesh).fsdp
    assert {line.name: line.bytes for line in lines if line.kind == "inputs"} == {
        "batch.tokens_BT": 4 * rows,
        "batch.targets_BT": 4 * rows,
        "batch.valid_BT": rows,
        "state.step": 4,
        "state.seed": 4,
    }


def test_saved_activations_by_hand():
    """With dots, each layer keeps what its projections give and what enters it, in bf16."""
    step = compiled(run("tensor=4", remat="dots"))
    layers, here = L * B * T * 2, 4
    for name in ("gate", "up"):
        assert at_peak(step, f"layers/mlp/{name}") == [layers * F // here]
    assert at_peak(step, "layers/attention/q") == [layers * N * H // here]
    for name in ("k", "v"):
        assert at_peak(step, f"layers/attention/{name}") == [layers * K * H // here]
    assert at_peak(step, "layers/attention/o") == [layers * D // here]
    assert at_peak(step, "layers") == [layers * D // here]
    full = compiled(run("tensor=4", remat="full"))
    assert at_peak(full, "layers") == [layers * D // here]
    for name in ("mlp/gate", "mlp/up", "attention/q", "attention/o"):
        assert at_peak(full, f"layers/{name}") == []


@pytest.mark.parametrize("remat", ["dots", "full"])
@pytest.mark.parametrize("mesh", MESHES)
def test_gradients_by_hand(mesh, remat):
    """The peak is in the backward pass, with all layers' gradients there, in float32; the
    table's as it is used, gathered over fsdp."""
    lines = compiled(run(mesh, remat=remat)).ledger.lines
    # Newer XLA makes one matmul of several, whose parts can be told apart by shape alone.
    names = [
        (line.name.removeprefix("gradient of ").split(" or "), line.bytes)
        for line in lines
        if line.kind == "gradients" and line.dtype == "f32"
    ]
    names.sort(key=lambda found: len(found[0]))
    for name, shape in local_shapes(mesh).items():
        if "norm" in name:
            continue
        gathered = MeshConfig.parse(mesh).fsdp if name == "embedding" else 1
        size = 4 * math.prod(shape) * gathered
        (found, *_) = [f for f in names if f"state.params.{name}" in f[0] and f[1] == size]
        names.remove(found)
    if jax.__version_info__ < (0, 11):
        assert all(len(alternatives) == 1 for alternatives, size in names if size > 4 * L * D)


@SET_UPS
def test_names_of_parameters_and_gradients_fit_their_sizes(mesh, remat):
    """What goes by a parameter's name has its elements, or those of one layer, in a device's
    part or gathered over fsdp; collectives that move several arrays at once included."""
    step, fsdp = compiled(run(mesh, remat=remat)), MeshConfig.parse(mesh).fsdp
    whole = {f"state.params.{n}": math.prod(s) for n, s in local_shapes(mesh).items()}
    layer = {f"state.params.{n}": math.prod(s) for n, s in local_shapes(mesh, False).items()}
    seen = set()
    for segment, description in step.ledger.moving:
        name = description.name.rpartition(" of ")[2].removesuffix(" (copy)")
        if name in whole and segment.size >= 1024:
            allowed = {n * scale for n in (whole[name], layer[name]) for scale in (1, fsdp)}
            assert allowed & {math.prod(v.shape) for v in segment.values}, (segment, description)
            seen.add(name)
    assert len(seen) >= 8
    for c in step.collectives:
        name = c.name.rpartition(" of ")[2]
        if name in whole:
            assert math.prod(c.shape) in (fsdp * whole[name], fsdp * layer[name])


HLO = """HloModule joined, is_scheduled=true

%body (p: (f32[2,8], f32[8,8])) -> (f32[2,8], f32[8,8]) {
  %p = (f32[2,8]{1,0}, f32[8,8]{1,0}) parameter(0)
  %row = f32[8]{0} bitcast(%p#0), metadata={op_name="jit(f)/row"}
  ROOT %next = (f32[2,8]{1,0}, f32[8,8]{1,0}) tuple(%p#0, %p#1)
}

ENTRY %main (a: f32[2,8], b: f32[8,8]) -> f32[] {
  %a = f32[2,8]{1,0} parameter(0), metadata={op_name="params['a']"}
  %b = f32[8,8]{1,0} parameter(1), metadata={op_name="params['b']"}
  %g-start = ((f32[2,8]{1,0}, f32[8,8]{1,0}), (f32[4,8]{1,0}, f32[16,8]{1,0})) \
all-gather-start(%a, %b), dimensions={0}
  %g-done = (f32[4,8]{1,0}, f32[16,8]{1,0}) all-gather-done(%g-start)
  %g = f32[16,8]{1,0} get-tuple-element(%g-done), index=1
  %s-start = (f32[2,8]{1,0}, f32[8,8]{1,0}) all-reduce-start(%a, %b), to_apply=%add
  %s-done = (f32[2,8]{1,0}, f32[8,8]{1,0}) all-reduce-done(%s-start)
  %s = f32[8,8]{1,0} get-tuple-element(%s-done), index=1
  %in = (f32[2,8]{1,0}, f32[8,8]{1,0}) tuple(%s-done#0, %s-done#1)
  %loop = (f32[2,8]{1,0}, f32[8,8]{1,0}) while(%in), condition=%c, body=%body
  %pair = ((f32[2,8]{1,0}, f32[8,8]{1,0}), f32[]) custom-call(%loop#1)
  ROOT %end = f32[8,8]{1,0} copy(%pair#0#1)
}
"""


def test_joined_collectives_are_told_apart():
    """Which of the arrays that one collective moves a value is; by either way of writing a
    tuple's elements (the `%a#1` of newer XLA)."""
    program = Program.parse(HLO)
    for name, collective in (("g", "g-start"), ("s", "s-start"), ("loop#1", "s-start")):
        origin = program.origin(name)
        assert origin.instruction.name == collective
        assert origin.operand_number == 1
    assert program.origin("g-start", (0, 1)).instruction.name == "b"
    assert program.origin("g-start", (1, 0)).operand_number == 0
    assert program.origin("loop", (0,)).operand_number == 0
    namer = Namer(program, ["result"], [2])
    assert namer.operand(program.instructions["g-start"], 1, (16, 8)).name == "params.b"
    assert namer.made(program.origin("g"), (16, 8)).name == "params.b"
    assert namer.made(program.origin("s"), (8, 8)).name == "params.b"


@pytest.mark.parametrize(
    ("op_name", "place"),
    [
        ("jit(f)/jvp(a/b)/while/body/closed_call/mul", Place("a/b", "mul", False, False)),
        ("jit(f)/transpose(jvp())/while/body/c/jit(g)/add", Place("c", "add", True, False)),
        ("jit(f)/transpose(jvp())/rematted_computation/c/add", Place("c", "add", False, True)),
        ("jit(f)/jit(_uniform)", Place("", "_uniform", False, False)),
        ("jit(f)/a/mul;jit(f)/b/add", Place("a", "mul", False, False)),
        ("jit(f)/(transpose(jvp(a))/mul:jvp(b)/add)", Place("a", "mul", True, False)),
        ("jit(f)/cond/branch_1_fun/a/sin", Place("a", "sin", False, False)),
        ("jit(f)/a/BTD,DF->BTF/dot_general", Place("a", "dot_general", False, False)),
        ("x", Place("", "x", False, False)),
    ],
)
def test_op_names_taken_apart(op_name, place):
    assert Place.parse(op_name) == place


def test_elements_of_tuples_have_their_shape():
    program = Program.parse(HLO)
    element = program.instructions["pair#0#1"]
    assert (element.opcode, element.result) == ("get-tuple-element", "f32[8,8]{1,0}")
    assert element.operands == ("pair#0",)
    assert program.origin("end").instruction.name == "pair"
    assert program.origin("end").index == (0, 1)
    assert program.unchanged("p#1", 1)
    assert not program.unchanged("p#1", 0)


@pytest.mark.parametrize("mesh", MESHES)
def test_a_chunk_of_logits_comes_and_goes(mesh):
    sizes = MeshConfig.parse(mesh)
    chunk = B // sizes.fsdp * T // CHUNKS * V // sizes.tensor * 4
    step = compiled(run(mesh, remat="dots"))
    moving = step.ledger.moving
    logits = [s.size for s, d in moving if d.kind == "logits"]
    assert max(logits) == chunk
    timeline = step.ledger.timeline
    over_time = timeline.bytes_by_kind["logits"]
    assert chunk <= max(over_time) <= 2.1 * chunk  # and their gradient, in bf16
    (loss,) = [loop for loop in timeline.loops if loop.name == "loss"]
    alive = [position for position, size in enumerate(over_time) if size >= chunk]
    assert loss.start <= min(alive) <= max(alive) <= loss.end


@pytest.mark.parametrize("mesh", MESHES)
def test_recomputation_takes_activations_from_the_peak(mesh):
    kinds = []
    for remat in REMATS:
        step = compiled(run(mesh, remat=remat))
        sums = dict.fromkeys(KINDS, 0)
        for line in step.ledger.lines:
            sums[line.kind] += line.bytes
        kinds.append(sums)
    none, dots, full = (sums["activations"] for sums in kinds)
    assert none > dots > full
    assert len({sums["moments"] for sums in kinds}) == 1


@SET_UPS
def test_timeline_never_exceeds_the_peak(mesh, remat):
    step = compiled(run(mesh, remat=remat))
    timeline, length = step.ledger.timeline, len(step.assignment.schedule)
    assert len(timeline.labels) == length
    assert {len(series) for series in timeline.bytes_by_kind.values()} == {length}
    unused = sum(line.bytes for line in step.ledger.lines if line.kind == "unused")
    assert timeline.total_bytes(timeline.peak) + unused == step.peak_bytes
    assert max(map(timeline.total_bytes, range(length))) == timeline.total_bytes(timeline.peak)
    for kind, series in timeline.bytes_by_kind.items():
        assert min(series) >= 0
        here = sum(line.bytes for line in step.ledger.lines if line.kind == kind)
        assert series[timeline.peak] == here, kind
    assert [(loop.trips, loop.name) for loop in timeline.loops] == [
        (L, "layers"),
        (CHUNKS, "loss"),
        (L, "backward layers"),
        (L, "update"),
    ]
    ends = [position for loop in timeline.loops for position in (loop.start, loop.end)]
    assert ends == sorted(ends)
    assert 0 <= ends[0] < ends[-1] < length


def cpu_step() -> Compilation:
    config = tiny_config("fsdp=2,tensor=2")
    mesh = mesh_of(config)
    return compile_lowered(lower_train_step(config, mesh), mesh)


@pytest.mark.parametrize("target", ["cpu", *MESHES])
def test_no_byte_of_the_arena_is_in_two_buffers(target):
    step = cpu_step() if target == "cpu" else compiled(run(target, remat="none"))
    assert sum(line.bytes for line in step.ledger.lines) == step.peak_bytes
    arenas = [a for a in step.assignment.allocations if a.use == "temporary"]
    assert arenas
    for arena in arenas:
        found = segments(arena)
        assert all(s.offset + s.size <= arena.size for s in found)
        for position in range(len(step.assignment.schedule)):
            alive = [s for s in found if s.start <= position < s.end]
            alive.sort(key=lambda s: s.offset)
            for one, other in itertools.pairwise(alive):
                assert one.offset + one.size <= other.offset, (position, one, other)


NEEDED = {"peak_bytes", "host_bytes", "argument_bytes", "temp_bytes", "outside_pool_bytes", "fits"}
NEEDED |= {"ledger", "collectives", "wire_bytes", "findings", "title", "gpu", "mesh", "flops"}


@lru_cache
def small_report() -> memory.MemoryReport:
    return memory.report_run(run("tensor=4", remat="full"), gpu="h100")


def test_report_as_json():
    report = small_report()
    plain = report.as_json()
    assert json.loads(json.dumps(plain, allow_nan=False)).keys() == plain.keys()
    assert plain.keys() >= NEEDED
    assert "timeline" not in plain
    line, collective = (json.loads(json.dumps(plain[n][0])) for n in ("ledger", "collectives"))
    assert line.keys() == {"kind", "name", "dtype", "shape", "bytes", "source"}
    assert Line(**{**line, "shape": tuple(line["shape"])}) == report.ledger[0]
    assert collective.keys() >= {"op", "axis", "dtype", "shape", "bytes", "count", "in_scan"}
    assert isinstance(collective["asynchronous"], bool)
    assert plain["peak_bytes"] == report.peak_bytes == sum(x["bytes"] for x in plain["ledger"])
    assert plain["bytes_by_kind"] == report.bytes_by_kind
    assert list(report.bytes_by_kind.values()) == sorted(report.bytes_by_kind.values())[::-1]
    assert plain["wire_bytes"] == sum(c["wire_bytes"] for c in plain["collectives"])
    assert plain["outside_pool_bytes"] == sum(part["bytes"] for part in plain["outside_pool"])
    assert plain["mesh"] == {"tensor": 4}
    assert (plain["gpu"], plain["num_devices"]) == ("h100", 4)


NOTHING = (Outside(what="nothing", bytes=0, source="made up"),)


def test_fits_counts_what_lies_outside_the_pool():
    small = small_report()
    assert small.fits is True
    assert small.pool_fraction is None
    assert small.outside_pool_bytes is not None
    need = small.peak_bytes + small.outside_pool_bytes
    assert dataclasses.replace(small, capacity_bytes=need).fits is True
    assert dataclasses.replace(small, capacity_bytes=need - 1).fits is False
    assert dataclasses.replace(small, capacity_bytes=None).fits is None
    assert dataclasses.replace(small, capacity_bytes=None).pool_fraction is None
    assert dataclasses.replace(small, outside_pool=()).fits is None
    assert dataclasses.replace(small, outside_pool=()).outside_pool_bytes is None
    for share, expected in ((0.74, None), (0.75, None), (0.76, 0.76), (0.901, 0.91)):
        card = math.ceil(small.peak_bytes / share)
        enough = dataclasses.replace(small, capacity_bytes=card, outside_pool=NOTHING)
        assert enough.pool_fraction == expected
        assert dataclasses.replace(enough, capacity_bytes=card // 2).pool_fraction is None


def test_a_card_too_small_is_told():
    """12 bytes of state per parameter of 8 billion, over four cards of 8 GB."""
    config = TrainConfig(
        model=preset("llama3.1-8b"),
        mesh=MeshConfig(tensor=4),
        data=DataConfig(batch_size=4, seq_len=512),
    )
    report = memory.report_run(config, gpu="rtx4060")
    assert report.argument_bytes >= 12 * config.model.num_parameters / 4
    assert report.fits is False


LARGEST = """
import json, pathlib, re, time
start = time.monotonic()
from tpjax import DataConfig, MeshConfig, TrainConfig, preset
from tpjax.memory import report_run
config = TrainConfig(
    model=preset("llama3.1-70b"),
    mesh=MeshConfig(data=16, fsdp=8, tensor=8),
    data=DataConfig(batch_size=128, seq_len=4096),
)
report = report_run(config, gpu="h100", nodes=128)
status = pathlib.Path("/proc/self/status").read_text()
resident = int(re.search(r"VmHWM:\\s+(\\d+) kB", status)[1]) * 1024
seconds = time.monotonic() - start
lines = sum(line.bytes for line in report.ledger)
print(json.dumps([report.peak_bytes, lines, report.num_devices, resident, seconds]))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's /proc")
def test_seventy_billion_parameters_on_a_thousand_gpus_need_little_of_this_machine():
    """Nothing is allocated: the compiler alone."""
    env = os.environ | {"JAX_PLATFORMS": "cpu"}
    folder = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", LARGEST], cwd=folder, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    peak, lines, num_devices, resident, seconds = json.loads(done.stdout.splitlines()[-1])
    print(f"\n70B on 1,024 GPUs: {seconds:.1f} s, {resident / 2**30:.2f} GiB of this machine")
    assert lines == peak
    assert num_devices == 1024
    assert 70e9 * 12 / 64 < peak < 80e9
    assert resident < 4 * 2**30


@pytest.fixture
def cache(tmp_path):
    """JAX's cache on disk, on."""
    settings = {
        "jax_enable_compilation_cache": True,
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: jax.config.values[name] for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def _entries(folder: Path) -> int:
    return len(list(folder.glob("*-cache")))


@pytest.mark.parametrize("gpu", [None, "h100"])
def test_a_warm_cache_changes_nothing(cache, gpu):
    x = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    step = jax.jit(lambda x: jnp.tanh(x @ x.T).sum(0))
    step.lower(x).compile()
    entries = _entries(cache)
    assert entries > 0
    first, second = (memory.report(step, x, gpu=gpu) for _ in range(2))
    assert first == second
    assert sum(line.bytes for line in first.ledger) == first.peak_bytes > 0
    assert jax.config.values["jax_enable_compilation_cache"] is True
    assert _entries(cache) == entries  # what is dumped of it is kept nowhere
    jax.jit(lambda x: jnp.sin(x).sum(0)).lower(x).compile()
    assert _entries(cache) > entries  # it is in use again


def test_the_cache_is_on_again_after_a_failure(cache):
    class Failing:
        def compile(self, **_):
            assert jax.config.values["jax_enable_compilation_cache"] is False
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        compile_lowered(Failing(), None)  # type: ignore[arg-type]
    assert jax.config.values["jax_enable_compilation_cache"] is True


def test_offloaded_activations_are_counted_on_the_host():
    """A user's scan that keeps its inputs in pinned host memory; weights and x as given."""
    layers, rows, width, devices = 4, 512, 256, 4
    mesh = memory.absent_mesh("h100", {"data": devices})
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["kept"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def loss(params, x, policy):
        def body(x, w):
            return jnp.tanh(checkpoint_name(x, "kept") @ w), None

        x, _ = jax.lax.scan(jax.checkpoint(body, policy=policy), x, params)
        return (x**2).mean()

    params = jax.ShapeDtypeStruct(
        (layers, width, width), jnp.float32, sharding=NamedSharding(mesh, P())
    )
    x = jax.ShapeDtypeStruct((rows, width), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    step = jax.jit(jax.grad(loss), static_argnums=2)
    kept, offloaded = (memory.report(step, params, x, p) for p in (None, policy))
    stack = layers * rows // devices * width * 4
    assert kept.host_bytes == 0
    assert kept.host_ledger == ()
    assert offloaded.host_bytes == stack
    (line,) = offloaded.host_ledger
    assert (line.kind, line.shape, line.bytes) == (
        "activations",
        (layers, rows // devices, width),
        stack,
    )
    for report in (kept, offloaded):
        assert sum(line.bytes for line in report.ledger) == report.peak_bytes
    stacks = [line.bytes for line in offloaded.ledger if line.kind == "activations"]
    assert max(stacks) < stack


def test_arguments_and_results_in_host_memory():
    """Moments that live on the host: named there, and not on the device too."""
    mesh = memory.absent_mesh("h100", {"data": 4})
    on_host, on_device = (
        NamedSharding(mesh.abstract_mesh, P("data"), memory_kind=kind)
        for kind in ("pinned_host", "device")
    )

    def update(moments, x):
        moments = 0.9 * jax.device_put(moments, on_device) + x
        return jax.device_put(moments, on_host), 2 * moments

    def array(sharding):
        return jax.ShapeDtypeStruct((512, 256), jnp.float32, sharding=sharding)

    report = memory.report(
        jax.jit(update, donate_argnums=0), array(on_host), array(on_device), mesh=mesh
    )
    part = 512 // 4 * 256 * 4
    assert report.host_bytes == part  # the result takes the argument's place
    assert [(line.kind, line.name, line.bytes) for line in report.host_ledger] == [
        ("moments", "moments", part)
    ]
    assert report.argument_bytes == part
    assert "moments" not in [line.name for line in report.ledger]
    assert sum(line.bytes for line in report.ledger) == report.peak_bytes
