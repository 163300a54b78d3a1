"""Reports on functions that are not ours: any jitted function, on devices there or absent.

Sizes are counted by hand. B rows, D and F widths, L layers, on small arrays.
"""

from __future__ import annotations

import json
import textwrap
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpjax import memory
from tpjax.config import ConfigError
from tpjax.memory.records import KINDS, MemoryReport

B, D, F, L = 512, 32, 192, 5
GPUS = pytest.mark.parametrize("gpu", [None, "h100"])


def abstract(*shape: int, dtype=jnp.float32, sharding=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def checked(report: MemoryReport) -> MemoryReport:
    """Whatever the function, these hold."""
    assert sum(line.bytes for line in report.ledger) == report.peak_bytes
    assert sum(line.bytes for line in report.host_ledger) == report.host_bytes
    for line in (*report.ledger, *report.host_ledger):
        assert line.bytes > 0
        assert line.kind in KINDS
        assert line.name
    length = len(report.timeline.labels)
    totals = [report.timeline.total_bytes(position) for position in range(length)]
    gaps = sum(line.bytes for line in report.ledger if line.kind == "unused")
    assert max(totals) == totals[report.timeline.peak] == report.peak_bytes - gaps
    large = [line for line in report.ledger if line.bytes > 0.01 * report.peak_bytes]
    tables = "tables of pointers"  # large only where all else is small
    assert not [line for line in large if line.kind == "other" and line.name != tables]
    return report


def report(*args, **options) -> MemoryReport:
    return checked(memory.report(*args, **options))


def sizes(found: MemoryReport, *kinds: str) -> dict[str, int]:
    return {line.name: line.bytes for line in found.ledger if line.kind in kinds}


def here(text: str) -> str:
    """ "file.py:line" of the line of this file that says `text`."""
    lines = Path(__file__).read_text().splitlines()
    (number,) = [n for n, line in enumerate(lines, 1) if line.strip() == text]
    return f"test_report.py:{number}"


def loss(params: dict, x: jax.Array) -> jax.Array:
    h = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return jnp.mean((h @ params["out"]["kernel"]) ** 2)


PARAMS = {
    "hidden": {"kernel": abstract(D, F), "bias": abstract(F)},
    "out": {"kernel": abstract(F, D)},
}
NAMES = {"hidden.kernel": 4 * D * F, "hidden.bias": 4 * F, "out.kernel": 4 * F * D}


def prefixed(prefix: str) -> dict[str, int]:
    return {f"{prefix}.{name}": size for name, size in NAMES.items()}


@GPUS
def test_gradients_of_a_small_network(gpu):
    found = report(jax.jit(jax.grad(loss)), PARAMS, abstract(B, D), gpu=gpu)
    state = sum(NAMES.values())
    assert found.title == "loss"
    assert found.argument_bytes == state + 4 * B * D
    assert found.output_bytes == state + 3 * 8  # and the table of the results
    assert found.alias_bytes == 0
    assert sizes(found, "parameters") == prefixed("params")
    assert prefixed("result").items() <= sizes(found, "gradients").items()
    assert sizes(found, "inputs") == {"x": 4 * B * D}
    tanh = [line for line in found.ledger if line.name == "tanh"]
    assert {(line.kind, line.bytes) for line in tanh} == {("activations", 4 * B * F)}
    wanted = here('h = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])')
    assert {line.source for line in tanh} == {wanted}
    shapes = {line.name: line.shape for line in found.ledger}
    assert shapes["params.hidden.kernel"] == shapes["result.hidden.kernel"] == (D, F)
    assert found.gpu == gpu
    assert found.fits is (None if gpu is None else True)
    assert (found.mesh, found.num_devices, found.collectives) == ({}, 1, ())


def test_an_optax_step_of_a_user_is_updated_in_place():
    optimizer = optax.adamw(1e-3)

    def step(params, opt_state, x):
        value, gradients = jax.value_and_grad(loss)(params, x)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    opt_state = jax.eval_shape(optimizer.init, PARAMS)
    donated, kept = (
        report(jax.jit(step, donate_argnums=n), PARAMS, opt_state, abstract(B, D), gpu="a100-80g")
        for n in ((0, 1), ())
    )
    state = sum(NAMES.values())
    moments = prefixed("opt_state[0].mu") | prefixed("opt_state[0].nu")
    assert donated.argument_bytes == 3 * state + 4 + 4 * B * D
    assert donated.alias_bytes == 3 * state + 4  # and the count of steps
    assert kept.alias_bytes == 0
    for found in (donated, kept):
        assert sizes(found, "parameters").items() >= prefixed("params").items()
        assert sizes(found, "moments").items() >= moments.items()
    results = {name for name in sizes(kept, *KINDS) if name.startswith("result[")}
    assert {"result[0].out.kernel", "result[1][0].mu.out.kernel"} <= results
    assert sizes(kept, "moments")["result[1][0].mu.out.kernel"] == 4 * F * D
    assert not [name for name in sizes(donated, *KINDS) if name.startswith("result[0]")]
    sources = {line.source for found in (donated, kept) for line in found.ledger if line.source}
    assert {source.partition(":")[0] for source in sources} == {"test_report.py"}  # not optax's
    assert [f.rule for f in donated.findings if "donat" in f.rule] == []


@GPUS
def test_an_nnx_step(gpu):
    class Network(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.hidden, self.out = nnx.Linear(D, F, rngs=rngs), nnx.Linear(F, D, rngs=rngs)

        def __call__(self, x):
            return self.out(nnx.relu(self.hidden(x)))

    network = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(network, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(network, optimizer, x):
        value, gradients = nnx.value_and_grad(lambda n: jnp.mean(n(x) ** 2))(network)
        optimizer.update(network, gradients)
        return value

    found = report(step, network, optimizer, jnp.ones((B, D)), gpu=gpu)
    parameters = 4 * (2 * D * F + F + D)
    assert found.title == "step"
    assert found.argument_bytes == 3 * parameters + 4 + 4 + 4 * B * D
    assert found.gpu == gpu


def placed(mesh: Mesh, shape: tuple[int, ...], *spec: str | None) -> jax.Array:
    return jax.device_put(np.ones(shape, np.float32), NamedSharding(mesh, P(*spec)))


def test_explicit_axes_move_from_simulated_devices_to_absent_gpus():
    """Real arrays on a mesh of CPU devices; the mesh's shape and axis types are kept."""
    mesh = jax.make_mesh((2, 4), ("rows", "columns"), axis_types=(AxisType.Explicit,) * 2)
    weights = {
        "kernel_in": placed(mesh, (D, F), None, "columns"),
        "kernel_out": placed(mesh, (F, D), "columns", None),
    }
    x = placed(mesh, (B, D), "rows", None)

    def apply(weights, x):
        h = jnp.tanh(x @ weights["kernel_in"])
        y = jnp.einsum("bf,fd->bd", h, weights["kernel_out"], out_sharding=P("rows", None))
        return jnp.mean(y**2)

    step = jax.jit(jax.grad(apply))
    on_cpu, on_gpu = report(step, weights, x), report(step, weights, x, gpu="h100")
    for found in (on_cpu, on_gpu):
        assert found.mesh == {"rows": 2, "columns": 4}
        assert found.num_devices == 8
        assert found.argument_bytes == 4 * (2 * D * F // 4 + B * D // 2)
        moved = {
            (c.op, c.axis): sum(o.bytes for o in found.collectives if o.axis == c.axis)
            for c in found.collectives
        }
        # y is summed over columns, the gradients of both weights over rows.
        assert moved[("all-reduce", "columns")] == 4 * B // 2 * D
        assert moved[("all-reduce", "rows")] >= 4 * 2 * D * F // 4
        assert {axis for _, axis in moved} == {"rows", "columns"}
        assert {c.group_size for c in found.collectives if c.axis == "columns"} == {4}
        assert {c.count for c in found.collectives} == {1}
        wire = sum(c.wire_bytes or 0 for c in found.collectives)
        assert found.wire_bytes == wire
    assert (on_cpu.gpu, on_gpu.gpu) == (None, "h100")
    assert on_gpu.outside_pool_bytes
    assert on_cpu.outside_pool_bytes is None


def test_abstract_arguments_on_an_absent_mesh():
    mesh = memory.absent_mesh("h100", {"data": 4})
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    params = jax.tree.map(lambda p: abstract(*p.shape, sharding=whole), PARAMS)
    found = report(jax.jit(jax.grad(loss)), params, abstract(B, D, sharding=split))
    assert found.argument_bytes == sum(NAMES.values()) + 4 * B * D // 4
    assert sizes(found, "inputs") == {"x": 4 * B * D // 4}
    assert sum(c.bytes for c in found.collectives) == sum(NAMES.values())
    assert {(c.op, c.axis, c.group_size) for c in found.collectives} == {("all-reduce", "data", 4)}
    assert found.wire_bytes == round(sum(NAMES.values()) * 2 * 3 / 4)
    assert next(line for line in found.ledger if line.name == "tanh").shape == (B // 4, F)
    results = {line.name: line.shape for line in found.ledger if line.kind == "gradients"}
    assert results["result.hidden.kernel"] == (D, F)  # though it comes out of a joined sum
    # Without a word about where they lie, arguments are whole on each device of the mesh.
    same = report(jax.jit(jax.grad(loss)), PARAMS, abstract(B, D, sharding=split), mesh=mesh)
    assert same.argument_bytes == found.argument_bytes
    # The kind that is named wins over that of the mesh.
    assert report(jax.jit(jnp.sum), abstract(B, sharding=split), gpu="b200").gpu == "b200"


def test_what_holds_fast_to_other_devices_is_refused():
    mesh = jax.make_mesh((4,), ("data",))
    x = placed(mesh, (B, D), "data")
    fixed = jax.jit(lambda x: 2 * x, out_shardings=NamedSharding(mesh, P("data")))
    mapped = jax.jit(
        jax.shard_map(
            lambda x: jax.lax.pmean(x, "data"), mesh=mesh, in_specs=P("data"), out_specs=P()
        )
    )
    for function in (fixed, mapped):
        assert report(function, x).mesh == {"data": 4}  # on its own devices it is fine
        with pytest.raises(ConfigError, match="has captured a mesh or sharding"):
            memory.report(function, x, gpu="h100")


def test_errors_of_the_function_stay_its_own():
    with pytest.raises(TypeError, match="incompatible shapes"):
        memory.report(jax.jit(lambda x, y: x + y), abstract(3), abstract(4), gpu="h100")
    with pytest.raises(ValueError, match="my own"):
        memory.report(jax.jit(_raise), abstract(3))


def _raise(x):
    raise ValueError("my own")


def test_wrong_arguments_are_refused_in_one_line():
    with pytest.raises(ConfigError, match=r"is no jitted function; pass jax\.jit"):
        memory.report(loss, PARAMS, abstract(B, D))
    with pytest.raises(ConfigError, match=r"gpu 'h1000' is unknown\. Did you mean h100"):
        memory.report(jax.jit(loss), PARAMS, abstract(B, D), gpu="h1000")
    with pytest.raises(ConfigError, match="does not divide"):
        memory.absent_mesh("h100", {"data": 4}, nodes=3)


def test_a_loop_of_unknown_length():
    mesh = memory.absent_mesh("h100", {"data": 4}, axis_types=(AxisType.Explicit,))

    def settle(x):
        def once(x):
            return jnp.sin(x) + jax.lax.pmean(x, "data")

        return jax.lax.while_loop(lambda x: jnp.abs(x[0, 0]) > 1e-3, once, x)

    step = jax.jit(
        lambda x: jax.shard_map(settle, in_specs=P("data"), out_specs=P("data"), check_vma=False)(x)
    )
    x = abstract(B, D, sharding=NamedSharding(mesh, P("data")))
    found = report(step, x)
    (loop,) = found.timeline.loops
    assert loop.trips is None
    (collective,) = found.collectives
    assert (collective.count, collective.wire_bytes, collective.in_scan) == (None, None, True)
    assert found.wire_bytes == 0
    assert found.as_json()["collectives"][0]["count"] is None


@GPUS
def test_functions_of_every_shape(gpu):
    """One result, none, no argument, numbers, static and unused arguments."""
    x, size = abstract(B, D), 4 * B * D
    one = report(jax.jit(lambda x: jnp.sin(x)), x, gpu=gpu)
    assert (one.argument_bytes, one.output_bytes, one.temp_bytes) == (size, size, 0)
    assert sizes(one, *KINDS) == {"result": size, "x": size}
    assert report(jax.jit(lambda x: None), x, gpu=gpu).peak_bytes == 0
    none = report(jax.jit(lambda: jnp.zeros((16, 4))), gpu=gpu)
    assert (none.argument_bytes, none.output_bytes) == (0, 256)
    numbers = report(jax.jit(lambda x, n, f: x * n + f), x, 3, 0.5, gpu=gpu)
    assert sizes(numbers, "inputs") == {"x": size, "n": 4, "f": 4}
    for static in ({"static_argnums": 1}, {"static_argnames": "n"}):
        split = jax.jit(lambda x, n: 2 * x.reshape(n, -1), **static)
        lines = {line.name: line for line in report(split, x, 16, gpu=gpu).ledger}
        assert (lines["result"].shape, lines["x"].shape) == ((16, B * D // 16), (B, D))
    unused = report(jax.jit(lambda a, x, b: -x), abstract(9), x, abstract(7), gpu=gpu)
    assert sizes(unused, "inputs") == {"x": size}
    empty = report(jax.jit(lambda x: 2 * x), abstract(0, 4), gpu=gpu)
    assert empty.peak_bytes == 0


@GPUS
def test_dtypes(gpu):
    arrays = {
        "bits": abstract(33, dtype=jnp.bool_),
        "bytes": abstract(5, 7, dtype=jnp.int8),
        "complex": abstract(8, 8, dtype=jnp.complex64),
        "float8": abstract(16, 16, dtype=jnp.float8_e4m3fn),
        "half": abstract(3, dtype=jnp.bfloat16),
        "long": abstract(4, dtype=jnp.uint32),
    }
    expected = {f"arrays.{name}": a.size * a.dtype.itemsize for name, a in arrays.items()}
    flip = jax.jit(lambda arrays: jax.tree.map(lambda a: a[::-1], arrays))
    found = report(flip, arrays, gpu=gpu)
    assert sizes(found, "inputs") == expected
    results = {line.name: line for line in found.ledger if line.name.startswith("result")}
    for name, array in arrays.items():
        assert results[f"result.{name}"].shape == array.shape
        assert results[f"result.{name}"].bytes == expected[f"arrays.{name}"]
    dtypes = {line.dtype for line in results.values()}
    assert dtypes == {"pred", "s8", "c64", "f8e4m3fn", "bf16", "u32"}


def test_random_keys_are_arguments_too():
    found = report(jax.jit(lambda k: jax.random.normal(k, (B, D))), jax.random.key(0), gpu="h100")
    assert found.argument_bytes == 8
    assert sizes(found, "inputs") == {"k": 8}


def test_named_scopes_name_the_arrays():
    def scores(x):
        with jax.named_scope("my_scores"):
            s = jnp.sin(x @ x.T)
        with jax.named_scope("deep/er"):
            return jnp.cos(s @ s).sum()

    found = report(jax.jit(scores), abstract(B, D), gpu="h100")
    assert (
        sizes(found, "activations").items()
        >= {
            "my_scores": 4 * B * B,
            "deep/er": 4 * B * B,
        }.items()
    )
    assert any("my_scores" in label for label in found.timeline.labels)


@GPUS
def test_branches_and_maps(gpu):
    def branch(flag, x):
        return jax.lax.cond(
            flag,
            lambda x: jnp.sin(x @ x.T).sum(0),
            lambda x: jnp.cos(jnp.tanh(x @ x.T) @ x).sum(1),
            x,
        )

    found = report(jax.jit(branch), abstract(dtype=jnp.bool_), abstract(B, D), gpu=gpu)
    if gpu is not None:  # newer XLA for CPUs has it in one kernel, whose scratch it does not count
        assert max(sizes(found, "activations").values()) == 4 * B * B
    assert not [line for line in found.ledger if "branch" in line.name]
    rows = report(
        jax.jit(lambda x: jax.lax.map(lambda r: jnp.tanh(jnp.outer(r, r)), x)),
        abstract(B, D),
        gpu=gpu,
    )
    assert rows.output_bytes == 4 * B * D * D
    assert [loop.trips for loop in rows.timeline.loops] == [B]
    together = report(jax.jit(jax.vmap(lambda r: jnp.sort(r * r))), abstract(B, D), gpu=gpu)
    assert together.output_bytes == 4 * B * D


@GPUS
def test_a_scan_keeps_a_stack(gpu):
    def apply(params, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)
        return jnp.mean(x**2)

    found = report(jax.jit(jax.grad(apply)), abstract(L, D, D), abstract(B, D), gpu=gpu)
    stacks = [line for line in found.ledger if line.shape == (L, B, D)]
    assert stacks
    assert {line.bytes for line in stacks} == {4 * L * B * D}
    assert {line.kind for line in stacks} == {"activations"}
    assert sizes(found, "gradients")["result"] == 4 * L * D * D
    assert [loop.trips for loop in found.timeline.loops] == [L, L]
    assert [loop.name for loop in found.timeline.loops] == ["scan", "backward scan"]


def test_values_forward_are_no_gradients_though_of_a_weight_s_shape():
    """x here is as large as the square weight; without scopes the shape alone says nothing."""

    def apply(params, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ params["kernel"]) @ params["kernel"]))

    params = {"kernel": abstract(D, D)}
    found = report(jax.jit(apply), params, abstract(D, D), gpu="h100")
    assert sizes(found, "gradients") == {}
    both = report(jax.jit(jax.grad(apply)), params, abstract(D, D), gpu="h100")
    assert sizes(both, "gradients")["result.kernel"] == 4 * D * D


def test_the_mesh_that_is_set_counts():
    """`report` inside `jax.set_mesh`, of a function that names axes by PartitionSpec."""
    spread = jax.jit(lambda x: jnp.sin(jax.sharding.reshard(x, P("rows"))).sum(0))
    x = np.ones((B, D), np.float32)
    with jax.set_mesh(jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Explicit,))):
        on_cpu, on_gpu = report(spread, x), report(spread, x, gpu="h100")
    absent = memory.absent_mesh("h100", {"rows": 4}, axis_types=(AxisType.Explicit,))
    with jax.set_mesh(absent):
        on_four = report(spread, abstract(B, D))
    assert on_four == report(spread, abstract(B, D), mesh=absent)
    for found, number in ((on_cpu, 8), (on_gpu, 8), (on_four, 4)):
        assert found.mesh == {"rows": number}
        (collective,) = found.collectives
        assert (collective.op, collective.axis, collective.bytes) == ("all-reduce", "rows", 4 * D)


def test_five_lines_in_a_notebook_cell():
    """A cell's file name is no path, and may have odd characters."""
    cell = textwrap.dedent(
        """
        import jax, jax.numpy as jnp, tpjax
        def f(w, x):
            return jnp.tanh(x @ w).sum()
        x, w = jnp.ones((512, 32)), jnp.ones((32, 192))
        report = tpjax.memory.report(jax.jit(jax.grad(f)), w, x, gpu="h100")
        """
    )
    for name in ("<ipython-input-1-a b'c>", '/tmp/ipykernel_1/"odd" (1).py', "<cell [2]>"):
        scope: dict = {"__name__": "__main__"}
        exec(compile(cell, name, "exec"), scope)
        found = checked(scope["report"])
        assert found.argument_bytes == 4 * (B * D + D * F)
        assert sizes(found, "gradients")["result"] == 4 * D * F
        assert any((line.source or "").endswith(":4") for line in found.ledger), found.ledger


def test_a_report_is_plain_data():
    found = report(jax.jit(jax.grad(loss)), PARAMS, abstract(B, D), gpu="h100")
    plain = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert plain["flops"] is None
    assert plain["mesh"] == {}
    assert plain["ledger"][0]["shape"] == list(found.ledger[0].shape)
    assert sum(line["bytes"] for line in plain["ledger"]) == plain["peak_bytes"]


def test_what_is_captured_counts_and_is_found():
    """An array that the function closes over is part of the program, on every device."""
    captured = jnp.asarray(np.random.default_rng(0).normal(size=(1024, 1024)), jnp.float32)
    x = jax.ShapeDtypeStruct((8, 1024), jnp.float32)
    found = report(jax.jit(lambda x: x @ captured), x, gpu="h100")
    given = report(jax.jit(lambda x, c: x @ c), x, captured, gpu="h100")
    (finding,) = [f for f in found.findings if f.rule == "captured-constant"]
    assert finding.bytes == 4 * 1024**2
    assert found.outside_pool_bytes == (given.outside_pool_bytes or 0) + 4 * 1024**2
    assert not [f for f in given.findings if f.rule == "captured-constant"]


def test_weak_types_are_kept():
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)
    found = report(jax.jit(lambda x, s: x * s), x, jnp.asarray(2.0), gpu="h100")
    assert found.output_bytes == 2 * 1024**2


def test_pinned_host_arguments_of_one_device_are_host_memory():
    device = jax.sharding.SingleDeviceSharding(jax.devices()[0], memory_kind="pinned_host")
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=device)
    found = report(jax.jit(lambda x: jax.device_put(x, jax.memory.Space.Device) * 2), x, gpu="h100")
    assert found.host_bytes >= 4 * 1024**2
    assert found.argument_bytes == 0


def test_collectives_of_branches_and_of_conditions_are_seen():
    mesh = memory.absent_mesh("h100", {"data": 2})
    split = NamedSharding(mesh, P("data"))
    x = jax.ShapeDtypeStruct((1024, 8), jnp.float32, sharding=split)

    @jax.jit
    @partial(jax.shard_map, in_specs=P("data"), out_specs=P("data"))
    def branches(x):
        def total(x):
            return x + jax.lax.psum(x, "data")

        return jax.lax.cond(x[0, 0] > 0, total, lambda x: x * 2, x)

    @jax.jit
    @partial(jax.shard_map, in_specs=P("data"), out_specs=P("data"))
    def loops(x):
        return jax.lax.while_loop(lambda x: jax.lax.psum(x.sum(), "data") < 3, lambda x: x + 1, x)

    (one,) = report(branches, x, mesh=mesh).collectives
    assert (one.op, one.axis, one.shape, one.count) == ("all-reduce", "data", (512, 8), 1)
    (two,) = report(loops, x, mesh=mesh).collectives
    assert (two.op, two.axis, two.count) == ("all-reduce", "data", None)


def test_callbacks_are_refused_for_a_gpu_that_is_not_there():
    def shout(x):
        jax.debug.print("{}", x.sum())
        return x * 2

    with pytest.raises(ConfigError, match="calls back to Python"):
        report(jax.jit(shout), jnp.ones(8), gpu="h100")


def test_keyword_arguments_go_through():
    found = report(jax.jit(lambda x, *, scale: x * scale), jnp.ones(8), scale=jnp.ones(8), gpu="l4")
    assert found.argument_bytes == 64


def test_new_parameters_are_parameters():
    """By whatever of the usual names the tree goes, and when its leaves have others."""
    tree = {"w1": jnp.ones((512, 512)), "out": jnp.ones((512, 512))}

    def step(p, g):
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, g)

    found = report(jax.jit(step), tree, tree, gpu="h100")
    kinds = {line.name: line.kind for line in found.ledger}
    assert kinds["p.out"] == kinds["p.w1"] == "parameters"
    assert kinds["result.out"] == kinds["result.w1"] == "parameters"
    assert "not-donated" in {f.rule for f in found.findings}
