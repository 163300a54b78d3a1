"""The chunked, vocabulary-parallel loss against log_softmax on whole logits."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY, mesh_of, tiny_config

from tpjax.loss import loss_and_x_gradient, next_token_loss
from tpjax.sharding import activation_spec, residual_spec, weight_spec

V = TINY.padded_vocab_size


def whole(x, head, targets, valid):
    """The same loss the plain way, in float64."""
    logits = np.asarray(x, np.float64) @ np.asarray(head, np.float64)[: TINY.vocab_size].T
    logits -= logits.max(-1, keepdims=True)
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    lse = np.log(np.exp(logits).sum(-1))
    picked = np.take_along_axis(logits, np.where(valid, targets, 0)[..., None], -1)[..., 0]
    dlogits = np.where(valid[..., None], p - np.eye(TINY.vocab_size)[targets * valid], 0)
    dx = dlogits @ np.asarray(head, np.float64)[: TINY.vocab_size]
    dhead = np.zeros(head.shape)
    dhead[: TINY.vocab_size] = np.einsum("BTV,BTD->VD", dlogits, np.asarray(x, np.float64))
    return (lse - picked)[valid].sum(), dx, dhead


def ours(mesh_text, x, head, targets, valid, chunks, sequence_parallel, scale=1.0):
    mesh = mesh_of(tiny_config(mesh_text))
    with jax.set_mesh(mesh):
        x = jax.device_put(x, residual_spec(sequence_parallel))
        head = jax.device_put(head, weight_spec("VD"))
        targets, valid = (jax.device_put(a, activation_spec("BT")) for a in (targets, valid))
        scale = jnp.float32(scale)
        loss = partial(
            next_token_loss,
            vocab_size=TINY.vocab_size,
            chunks=chunks,
            sequence_parallel=sequence_parallel,
        )
        both = jax.jit(
            jax.value_and_grad(lambda x, h: loss(x, h, targets, valid, scale), argnums=(0, 1))
        )
        value, (dx, dhead) = both(x, head)
        alone = jax.jit(loss)(x, head, targets, valid, scale)
    assert float(alone) == pytest.approx(float(value), rel=1e-6)
    return float(value), np.asarray(dx), np.asarray(dhead)


def inputs(scale=1.0):
    rng = np.random.default_rng(0)
    x = scale * rng.standard_normal((8, 32, 32)).astype(np.float32)
    head = rng.standard_normal((V, 32)).astype(np.float32)  # padding rows too
    targets = rng.integers(0, TINY.vocab_size, (8, 32)).astype(np.int32)
    return x, head, targets, rng.random((8, 32)) < 0.7


@pytest.mark.parametrize(
    ("mesh", "chunks", "sequence_parallel"),
    [
        ("tensor=1", 1, False),
        ("tensor=1", 8, False),
        ("tensor=4", 4, True),
        ("tensor=8", 2, False),
        ("data=2,fsdp=2,tensor=2", 4, True),
        ("fsdp=4", 32, False),
    ],
)
def test_value_and_gradients_equal_the_plain_way(mesh, chunks, sequence_parallel):
    args = inputs()
    value, dx, dhead = ours(mesh, *args, chunks, sequence_parallel)
    expected, expected_dx, expected_dhead = whole(*args)
    assert value == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(dx, expected_dx, atol=2e-5)
    np.testing.assert_allclose(dhead, expected_dhead, atol=5e-5)
    assert (dhead[TINY.vocab_size :] == 0).all()  # padding has no probability


def test_the_scale_multiplies_loss_and_gradients():
    args = inputs()
    one = ours("tensor=4", *args, 4, True)
    for a, b in zip(ours("tensor=4", *args, 4, True, scale=0.25), one, strict=True):
        np.testing.assert_array_equal(np.asarray(a), 0.25 * np.asarray(b))


@pytest.mark.parametrize("mesh", ["tensor=4", "data=2,fsdp=2,tensor=2"])
def test_the_gradient_in_x_alone_comes_with_the_log_sum_exp(mesh):
    x, head, targets, valid = args = inputs()
    value, dx, _ = ours(mesh, *args, 4, True, scale=0.25)
    with jax.set_mesh(mesh_of(tiny_config(mesh))):
        x_BTD = jax.device_put(x, residual_spec(True))
        head_VD = jax.device_put(head, weight_spec("VD"))
        tokens = [jax.device_put(a, activation_spec("BT")) for a in (targets, valid)]
        found = jax.jit(loss_and_x_gradient, static_argnums=(5, 6, 7))(
            x_BTD, head_VD, *tokens, jnp.float32(0.25), TINY.vocab_size, 4, True
        )
    assert float(found[0]) == value
    np.testing.assert_array_equal(np.asarray(found[1]), dx)
    logits = np.asarray(x, np.float64) @ np.asarray(head, np.float64)[: TINY.vocab_size].T
    np.testing.assert_allclose(found[2], np.log(np.exp(logits).sum(-1)), rtol=1e-6)


def test_targets_that_do_not_count_may_be_anything():
    x, head, targets, valid = inputs()
    wild = np.where(valid, targets, -100).astype(np.int32)
    calm = ours("tensor=4", x, head, targets, valid, 4, True)
    for a, b in zip(ours("tensor=4", x, head, wild, valid, 4, True), calm, strict=True):
        np.testing.assert_array_equal(a, b)


def test_large_logits_stay_finite():
    args = inputs(scale=100.0)
    value, dx, _ = ours("tensor=4", *args, 4, True)
    assert value == pytest.approx(whole(*args)[0], rel=1e-5)
    assert np.isfinite(dx).all()


def test_bf16_inputs_are_summed_in_float32():
    """bf16 would round a loss near 4.6 to steps of 0.03; only the inputs are rounded."""
    x, head, targets, valid = inputs(scale=0.05)
    x, head = (jnp.asarray(a, jnp.bfloat16) for a in (x, head))
    value, dx, _ = ours("tensor=4", x, head, targets, valid, 4, True)
    expected, expected_dx, _ = whole(x, head, targets, valid)
    assert dx.dtype == jnp.bfloat16
    assert value == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(np.asarray(dx, np.float32), expected_dx, atol=0.02)
