"""Rules on loops and rematerialisation: each finds its fault and is silent about what is right.

Letters: B batch, T sequence, D model width, F feed-forward width, V vocabulary, L layers.
"""

from __future__ import annotations

import re
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from programs import (
    BF16,
    F32,
    B,
    D,
    F,
    L,
    T,
    V,
    cross_entropy,
    forward,
    found,
    layer,
    loss,
    on,
    only,
    tensor4,
    tokens,
    weights,
)

from tpjax.memory import loops, report


def test_remat_that_keeps_everything_is_found():
    keep = jax.checkpoint_policies.everything_saveable
    step = partial(loss, wrap=partial(jax.checkpoint, policy=keep))
    findings = found(jax.grad(step), weights(tensor4()), tokens(tensor4()))
    only(findings, "remat-saved-nothing")
    # What it keeps of the weights is found apart.
    assert findings.keys() == {"remat-saved-nothing", "scan-keeps-copies"}
    kept = findings["scan-keeps-copies"][0]
    assert set(kept.name.split(", ")) == {"params.up", "params.down"}
    assert kept.bytes == 2 * L * D * F * 2 // 4


def around(params, batch):
    """jax.checkpoint around the scan instead of its body."""
    run = jax.checkpoint(partial(forward, wrap=lambda body: body))
    return cross_entropy(params, run(params, batch), batch)


def around_in_parts(params, batch):
    halves = jax.tree.map(lambda x: x.reshape(2, B // 2, T), batch)
    zeros = jax.tree.map(jnp.zeros_like, params)

    def add(total, half):
        return jax.tree.map(jnp.add, total, jax.grad(around)(params, half)), None

    return jax.lax.scan(add, zeros, halves)[0]


@pytest.mark.parametrize(("step", "rows"), [(jax.grad(around), B), (around_in_parts, B // 2)])
def test_remat_around_a_scan_is_found(step, rows):
    findings = found(step, weights(tensor4()), tokens(tensor4()))
    finding = only(findings, "remat-around-scan")
    # At least x and the arrays of F / 4 before and after the activation.
    assert finding.bytes is not None
    assert L * rows * T * (D + 2 * F // 4) * 2 <= finding.bytes < 10 * L * rows * T * D * 2
    assert "body" in finding.remedy


def attend(x, wrap):
    """Attention by blocks of 64 rows, in a scan of its own."""

    def block(_, rows):
        scores = jax.nn.softmax((rows @ x.swapaxes(1, 2)).astype(F32))
        return None, scores.astype(BF16) @ x

    blocks = jnp.moveaxis(x.reshape(B, T // 64, 64, D), 1, 0)
    rows = jax.lax.scan(wrap(block), None, blocks)[1]
    return jnp.moveaxis(rows, 0, 1).reshape(x.shape)


def with_attention(wrap, x, w):
    return layer(x + attend(x, wrap), w)


def scanned(stacked, x):
    """What attention keeps is there for one layer at a time."""
    body = partial(with_attention, lambda block: block)
    return jax.lax.scan(jax.checkpoint(body), x, stacked)[0].astype(F32).sum()


def layer_by_layer(stacked, x):
    """The layers in a loop of Python's, each with a checkpoint of its own: the scan that is
    repeated keeps its result alone."""
    body = jax.checkpoint(partial(with_attention, jax.checkpoint))
    for i in range(2):
        x = body(x, jax.tree.map(lambda w, i=i: w[i], stacked))[0]
    return x.astype(F32).sum()


@pytest.mark.parametrize("step", [scanned, layer_by_layer])
def test_a_scan_inside_of_a_rematerialised_layer_is_right(step):
    stacked = {name: weights(tensor4(), dtype=BF16)[name] for name in ("up", "down")}
    assert found(jax.grad(step), stacked, on(tensor4(), (B, T, D), dtype=BF16)) == {}


@pytest.mark.parametrize("copied", [True, False])
def test_float32_copies_of_gradients_are_found(copied):
    def step(params, batch):
        gradients = jax.grad(loss)(jax.tree.map(lambda p: p.astype(BF16), params), batch)
        if copied:
            whole = jax.tree.map(lambda g: g.astype(F32), gradients)
            gradients = jax.lax.optimization_barrier(whole)
        squares = [jnp.sum(g.astype(F32) ** 2) for g in jax.tree.leaves(gradients)]
        norm = jnp.sqrt(sum(squares))
        return jax.tree.map(lambda p, g: p - g.astype(F32) / norm, params, gradients)

    findings = found(step, weights(tensor4()), tokens(tensor4()), donate=0)
    assert findings.keys() == ({"float32-gradients"} if copied else set())
    if copied:
        finding = only(findings, "float32-gradients")
        # Without scopes, by their shapes, which some share.
        assert {"params.up", "params.down", "params.embedding"} <= set(
            re.findall(r"[\w.]+", finding.name)
        )
        assert finding.bytes == (V * D + 2 * L * D * F) * 4 // 4


@pytest.mark.parametrize(("take", "read"), [(lambda ys: ys[-1], "25%"), (jnp.sum, None)])
def test_a_stack_of_which_one_is_read_is_found(take, read):
    def last(params, x):
        return take(jax.lax.scan(lambda x, w: (layer(x, w)[0],) * 2, x, params)[1])

    stacked = {name: weights(tensor4())[name] for name in ("up", "down")}
    findings = found(last, stacked, on(tensor4(), (B, T, D), dtype=BF16))
    assert findings.keys() == ({"scan-keeps-unread"} if read else set())
    if read:
        finding = only(findings, "scan-keeps-unread")
        assert finding.bytes == L * B * T * D * 2
        assert read in finding.message


def test_each_reader_of_a_stack_is_asked_once(monkeypatch):
    """What is read of a scan's stacks spreads over all that follows: asked again on every way
    there, it took time without end."""
    asked = []
    count = loops._Readers._count

    def counted(self, one, handed_on):
        asked.append((id(self), one.name, handed_on.name))
        return count(self, one, handed_on)

    monkeypatch.setattr(loops._Readers, "_count", counted)

    def f(params, x):
        last, every = jax.lax.scan(lambda c, p: (jnp.tanh(c @ p), c), x, params["scanned"])
        x = every + last
        for w in params["unrolled"]:
            centred = x - x.mean(-1, keepdims=True)
            scale = jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
            x = x + jax.nn.gelu((centred / scale) @ w) @ w.T
        return (x**2).sum()

    shape = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    params = {"scanned": shape((8, 256, 256)), "unrolled": [shape((256, 1024))] * 3}
    report(jax.jit(jax.value_and_grad(f)), params, shape((512, 256)))
    assert asked
    assert len(asked) == len(set(asked))
