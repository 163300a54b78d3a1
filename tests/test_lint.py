"""Every rule finds its fault, by name and size, and is silent about what is right.

Functions as users write them and our own step, compiled for H100s by XLA's GPU
compiler; no GPU is needed.

Letters: B batch, T sequence, D model width, F feed-forward width, V vocabulary, L layers.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.lax import with_sharding_constraint as constrain
from jax.sharding import PartitionSpec as P
from programs import (
    BF16,
    F32,
    B,
    D,
    F,
    L,
    T,
    V,
    data2_tensor2,
    data4,
    forward,
    found,
    layer,
    loss,
    on,
    only,
    sgd,
    tensor4,
    tokens,
    weights,
)
from test_needs import RUNS, compiled, run, with_up_gathered

from tpjax.memory import report
from tpjax.memory.compiled import absent_mesh
from tpjax.memory.explain import report_run
from tpjax.memory.lint import lint

# Right programs


def accumulated(params, batch):
    """Gradients of two halves of a batch, added up."""
    halves = jax.tree.map(lambda x: x.reshape(2, B // 2, T), batch)
    zeros = jax.tree.map(jnp.zeros_like, params)

    def add(total, half):
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, half)), None

    return jax.lax.scan(add, zeros, halves)[0]


def clipped(params, batch):
    gradients = jax.grad(loss)(params, batch)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradients)))
    return jax.tree.map(lambda g: g * jnp.minimum(1, 1 / norm), gradients)


def generate(params, cache, x):
    """A step of decoding after another, with a cache that it reads and writes."""

    def step(carry, i):
        cache, x = carry
        cache = jax.lax.dynamic_update_slice_in_dim(cache, x[:, None], i, 1)
        scores = jax.nn.softmax(jnp.einsum("BD,BTD->BT", x, cache))
        x = jnp.einsum("BT,BTD->BD", scores, cache) + x @ params["up"][0, :, :D].astype(BF16)
        return (cache, x), x

    return jax.lax.scan(step, (cache, x), jnp.arange(T))[1]


@pytest.mark.parametrize("function", [clipped, accumulated, loss])
def test_tensor_parallel_functions_are_right(function):
    """Gradients as large as weights are no state, nor is a model that is only used."""
    assert found(function, weights(tensor4()), tokens(tensor4())) == {}


def test_decoding_with_weights_that_stay_is_right():
    mesh = data4()
    cache, x = on(mesh, (2 * B, T, D), P("data"), BF16), on(mesh, (2 * B, D), P("data"), BF16)
    assert found(generate, weights(mesh, None), cache, x) == {}


def test_fsdp_by_hand_is_right():
    """Each layer's weights gathered in the scan, the table once."""

    def gather(w):
        return constrain(w.astype(BF16), P())

    def fsdp(params, batch):
        table = {"embedding": gather(params["embedding"])}
        body = partial(layer, read=gather)
        return loss(params | table, batch, body=body)

    assert found(jax.grad(fsdp), weights(data4(), "data"), tokens(data4(), "data")) == {}


def test_weights_of_any_name_are_not_compared_with_the_batch():
    mesh = data4()
    net = {"first": on(mesh, (D, F)), "second": on(mesh, (F, D))}
    x = on(mesh, (B * T, D), P("data"))
    assert found(lambda net, x: x @ net["first"] @ net["second"], net, x) == {}


def test_copies_of_heads_are_there_on_purpose():
    mesh = absent_mesh("h100", {"tensor": 2, "kv_copy": 2})
    params = {
        "q": on(mesh, (D, F), P(None, ("tensor", "kv_copy"))),
        "k": on(mesh, (D, F), P(None, "tensor")),
    }
    x = on(mesh, (B, D))
    assert found(lambda params, x: (x @ params["q"], x @ params["k"]), params, x) == {}


def test_small_models_are_right_however_they_are_made():
    mesh = data4()
    params = {"w": on(mesh, (64, 64)), "v": on(mesh, (64, 64), P("data"))}
    x = on(mesh, (8, 64), P("data"))

    def step(params, x):
        gradients = jax.grad(lambda p: (x @ p["w"] @ p["v"]).sum())(params)
        return jax.tree.map(jnp.subtract, params, gradients)

    assert found(step, params, x) == {}


# Faults


def test_a_replicated_weight_is_found():
    whole = weights(tensor4(), embedding=P())
    # One name that only parameters have, "embedding", tells what "p" is.
    finding = only(found(lambda p, b: loss(p, b), whole, tokens(tensor4())), "replicated")
    assert (finding.name, finding.bytes) == ("p.embedding", V * D * 4 * 3 // 4)
    assert "over tensor" in finding.remedy


def test_a_batch_whose_targets_are_not_split_is_found():
    mesh = data4()
    images, labels = on(mesh, (64, 256, 256), P("data")), on(mesh, (64, 256, 256))
    finding = only(found(lambda b: b["x"] - b["y"], {"x": images, "y": labels}), "replicated")
    assert (finding.name, finding.bytes) == ("b.y", 64 * 256 * 256 * 4 * 3 // 4)


def test_state_that_no_axis_of_the_batch_shards_is_found():
    mesh = data2_tensor2()
    batch = tokens(mesh, "data", rows=2)  # little beside the state
    findings = found(sgd, weights(mesh), batch, donate=0)
    finding = only(findings, "replicated-state")
    assert finding.name == "parameters"
    assert finding.bytes == (V * D + 2 * L * D * F) * 4 // 2 // 2
    assert "data" in finding.message
    assert findings.keys() == {"replicated-state"}
    assert found(loss, weights(mesh), batch) == {}  # nothing is trained


def test_a_donated_array_that_changes_dtype_is_found():
    def halved(params, batch):
        return jax.tree.map(lambda p: p.astype(BF16), sgd(params, batch))

    findings = found(halved, weights(tensor4()), tokens(tensor4()), donate=0)
    assert findings.keys() == {"donated-not-reused"}
    assert {f.name: f.bytes for f in findings["donated-not-reused"]} == {
        "params.embedding": V * D * 4 // 4,
        "params.up": L * D * F * 4 // 4,
        "params.down": L * D * F * 4 // 4,
    }


def averaged(params, ema, batch):
    params = sgd(params, batch)
    return params, jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, ema, params)


@pytest.mark.parametrize(("donate", "kept"), [(0, 1), ((0, 1), 0)])
def test_state_that_is_not_donated_is_found(donate, kept):
    """An average of the weights is state as they are."""
    args = weights(tensor4()), weights(tensor4()), tokens(tensor4())
    findings = found(averaged, *args, donate=donate)
    assert findings.keys() == ({"not-donated"} if kept else set())
    if kept:
        finding = only(findings, "not-donated")
        assert finding.bytes == kept * (V * D + 2 * L * D * F) * 4 // 4
        assert finding.name.startswith("ema.")


def test_arguments_that_nothing_reads_hide_no_finding():
    def step(params, unused, batch):
        return sgd(params, batch)

    args = weights(tensor4()), on(tensor4(), (5,)), tokens(tensor4())
    finding = only(found(step, *args), "not-donated")
    assert finding.name.startswith("params.")


def gathered_logits(params, batch):
    """Each device's logits are put together; the vocabulary's axis is that of the mesh."""
    x = forward(params, batch)

    @partial(jax.shard_map, in_specs=(P(), P("tensor")), out_specs=P(), check_vma=False)
    def logits(x, table):
        return jax.lax.all_gather(x @ table.T, "tensor", axis=2, tiled=True)

    target = batch["targets"][..., None]
    whole = logits(x, params["embedding"].astype(BF16)).astype(F32)
    return (jax.nn.logsumexp(whole, -1) - jnp.take_along_axis(whole, target, -1)[..., 0]).mean()


@pytest.mark.parametrize("scope", [None, "logits"])
def test_gathered_logits_are_found(scope):
    """By the scope that names them, or by the size of the vocabulary."""
    function = gathered_logits if scope is None else jax.named_scope(scope)(gathered_logits)
    finding = only(found(function, weights(tensor4()), tokens(tensor4())), "gathered-logits")
    assert finding.bytes == B * T * V * 2
    assert f"bf16[{B}, {T}, {V}]" in finding.message


def test_weights_gathered_over_the_tensor_axis_are_found():
    def whole(w):
        return constrain(w.astype(BF16), P())

    def step(params, batch):
        return loss(params, batch, body=partial(layer, read=whole))

    mesh = data2_tensor2()
    findings = found(jax.grad(step), weights(mesh), tokens(mesh, "data"))["gathered-weight"]
    sizes = {f.name: f.bytes for f in findings}
    assert {"params.up", "params.down"} <= sizes.keys()
    assert sizes["params.down"] == D * F * 2


def test_a_stack_gathered_at_once_is_found():
    def step(params, batch):
        whole = jax.tree.map(lambda w: constrain(w, P()), params)
        return loss(whole, batch)

    findings = found(jax.grad(step), weights(data4(), "data"), tokens(data4(), "data"))
    stacks = {f.name: f.bytes for f in findings["gathered-weight"]}
    assert stacks == {f"params.{name}": L * D * F * 4 for name in ("up", "down")}
    assert all("one layer" in f.remedy for f in findings["gathered-weight"])


def test_an_offload_that_moves_nothing_is_found():
    """XLA drops a way to the host and straight back."""
    host, device = jax.memory.Space.Host, jax.memory.Space.Device

    def there_and_back(params, x):
        return x @ jax.device_put(jax.device_put(params["up"], host), device)[0]

    x = on(tensor4(), (B, D))
    only(found(there_and_back, weights(tensor4()), x), "offload-moved-nothing")


def test_an_offload_that_moves_something_is_right():
    offload = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["x"],
        offload_src="device",
        offload_dst="pinned_host",
    )

    def named(x, w):
        return layer(checkpoint_name(x, "x"), w)

    step = partial(loss, wrap=partial(jax.checkpoint, policy=offload), body=named)
    result = report(jax.jit(jax.grad(step)), weights(tensor4()), tokens(tensor4()))
    assert result.host_bytes == L * B * T * D * 2
    assert result.findings == ()


# Our own step


@pytest.mark.parametrize("name", RUNS)
def test_findings_of_our_step(name):
    """None but these: without remat a scan keeps what it reads of the weights, cast and
    gathered; nothing shards the state over data, of which beside adapters there is little."""
    expected = {}
    if name == "tensor none":  # gate, up and down; the others are below a MiB
        names = [f"state.params.blocks.mlp.{w}" for w in ("down", "gate", "up")]
        expected["scan-keeps-copies"] = (names, 3 * L * D * F // 4 * 2)
    if name == "fsdp none untied":
        names = [f"state.params.blocks.attention.{w}" for w in ("o", "q")]
        names += [f"state.params.blocks.mlp.{w}" for w in ("down", "gate", "up")]
        expected["scan-keeps-copies"] = (names, L * (3 * D * F + 2 * D * D) * 2)
    if name.startswith("data") and "adapters" not in name:
        heads = 2 * D * D + 2 * D * 4 * 32
        state = 3 * 4 * (V * D + L * (3 * D * F + heads)) // 2  # fsdp or tensor: 2
        expected["replicated-state"] = (["parameters and moments"], state // 2)
    findings = {f.rule: f for f in lint(compiled(RUNS[name]))}
    assert findings.keys() == expected.keys()
    for rule, (names, size) in expected.items():
        assert sorted(findings[rule].name.split(", ")) == names
        assert findings[rule].bytes == pytest.approx(size, rel=0.01)  # gains and scalars


def test_a_replicated_embedding_and_a_state_that_is_not_donated_are_found():
    config = run("tensor=4", remat="full", donate=False, embedding="replicated")
    findings = report_run(config, gpu="h100").findings
    replicated = {f.name: f for f in findings if f.rule == "replicated"}
    moments = "state.opt_state.tables.embedding[0]"
    tables = ["state.params.embedding", f"{moments}.mu.embedding", f"{moments}.nu.embedding"]
    assert sorted(replicated) == sorted(tables)
    assert {f.bytes for f in replicated.values()} == {V * D * 4 * 3 // 4}
    assert all("over tensor" in f.remedy for f in replicated.values())
    (kept,) = [f for f in findings if f.rule == "not-donated"]
    assert kept.name in tables
    blocks = L * (3 * D * F + 2 * D * D + 2 * D * 4 * 32)
    assert kept.bytes == pytest.approx(3 * 4 * (V * D + blocks // 4), rel=0.01)
    assert "--donate" in kept.remedy


def test_a_weight_gathered_in_our_step_is_found():
    findings = [f for f in lint(with_up_gathered()) if f.rule == "gathered-weight"]
    assert [(f.name, f.bytes) for f in findings] == [("state.params.blocks.mlp.up", D * F * 2)]
