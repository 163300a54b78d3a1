"""Blockwise and materialised attention against softmax(q kᵀ) v with the whole matrix of scores."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpjax import attention
from tpjax.attention import blockwise_attention, materialised_attention


def naive(q, k, v, window):
    T, N, H = q.shape[1:]
    k, v = (jnp.repeat(x, N // x.shape[2], axis=2) for x in (k, v))
    scores = jnp.einsum("BQNH,BTNH->BNQT", q, k) / jnp.sqrt(H)
    distance = jnp.arange(T)[:, None] - jnp.arange(T)
    seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    return jnp.einsum("BNQT,BTNH->BQNH", jax.nn.softmax(jnp.where(seen, scores, -1e30)), v)


@pytest.mark.parametrize("attend", [blockwise_attention, materialised_attention])
@pytest.mark.parametrize("window", [None, 1, 7])
@pytest.mark.parametrize("T", [24, 30, 1])
def test_equals_the_whole_matrix(monkeypatch, T, window, attend):
    monkeypatch.setattr(attention, "QUERY_BLOCK", 8)  # 24: three blocks; 30: five of six
    rng = np.random.default_rng(0)
    q, k, v, dy = (
        jnp.asarray(rng.standard_normal((2, T, heads, 16)), jnp.float32) for heads in (6, 2, 2, 6)
    )
    y, pull = jax.vjp(lambda *a: attend(*a, window), q, k, v)
    exact, exact_pull = jax.vjp(lambda *a: naive(*a, window), q, k, v)
    np.testing.assert_allclose(y, exact, atol=2e-6)
    for ours, theirs in zip(pull(dy), exact_pull(dy), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=5e-6)


def test_never_holds_all_scores():
    """Neither pass makes an array of T × T per head."""
    T = 4 * attention.QUERY_BLOCK
    x = jax.ShapeDtypeStruct((1, T, 2, 8), jnp.float32)
    both = jax.make_jaxpr(
        jax.grad(lambda q, k, v: blockwise_attention(q, k, v, None).sum(), (0, 1, 2))
    )
    shapes = _shapes(both(x, x, x).jaxpr)
    assert max(np.prod(shape) for shape in shapes) == 2 * T * attention.QUERY_BLOCK


def _shapes(jaxpr) -> list[tuple[int, ...]]:
    shapes = []
    for equation in jaxpr.eqns:
        shapes += [var.aval.shape for var in equation.outvars]
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                shapes += _shapes(getattr(inner, "jaxpr", inner))
    return shapes


def _is_jaxpr(x) -> bool:
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def test_materialised_scores_are_kept_whole():
    x = jax.ShapeDtypeStruct((2, 48, 4, 8), jnp.bfloat16)
    kept = jax.eval_shape(
        lambda *a: jax.vjp(partial(materialised_attention, window=None), *a)[1], x, x, x
    )
    sizes = [leaf.size for leaf in jax.tree.leaves(kept) if leaf.dtype == jnp.float32]
    assert max(sizes) == 2 * 4 * 48 * 48


@pytest.mark.parametrize("attend", [blockwise_attention, materialised_attention])
def test_scores_of_bf16_are_float32(attend):
    """Scores of about 100 are off by a quarter in bf16, and their exponentials with them."""
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(scale * rng.standard_normal((2, 24, 2, 16)), jnp.bfloat16)
        for scale in (6, 6, 1)
    )
    exact = naive(*(x.astype(jnp.float32) for x in (q, k, v)), None)
    np.testing.assert_allclose(attend(q, k, v, None).astype(jnp.float32), exact, atol=0.03)
