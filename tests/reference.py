"""The model and its loss in plain NumPy, float64, whole arrays, no tpjax code.

Written from the papers' formulas, to be compared with.
"""

from __future__ import annotations

import numpy as np


def _norm(x, gain, shift, kind, eps):
    if kind == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * gain
    return x if shift is None else x + shift


def _rotate(x, theta, factor):
    """x [B, T, heads, H]: each pair (i, i + H/2) as a complex number times e^{i·angle}."""
    T, half = x.shape[1], x.shape[-1] // 2
    angle = np.arange(T)[:, None] / factor * theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angle)[:, None, :]
    return np.concatenate([turned.real, turned.imag], -1)


def _attention(x, w, model):
    B, T, _ = x.shape
    N, K, H = model.num_heads, model.num_kv_heads, model.head_dim

    def heads(name):
        out = np.tensordot(x, w[name], 1)
        return out + w[f"{name}_bias"] if f"{name}_bias" in w else out

    q, k, v = heads("q"), heads("k"), heads("v")
    if model.qk_norm:
        q = _norm(q, w["q_gain"], None, "rmsnorm", model.norm_eps)
        k = _norm(k, w["k_gain"], None, "rmsnorm", model.norm_eps)
    if model.rope is not None:
        factor = model.rope.factor if model.rope.kind == "linear" else 1.0
        q, k = (_rotate(a, model.rope.theta, factor) for a in (q, k))
    y = np.zeros((B, T, N, H))
    for b in range(B):
        for n in range(N):
            kv = n // (N // K)
            for t in range(T):
                first = 0 if model.sliding_window is None else max(0, t + 1 - model.sliding_window)
                scores = k[b, first : t + 1, kv] @ q[b, t, n] / np.sqrt(H)
                p = np.exp(scores - scores.max())
                y[b, t, n] = p / p.sum() @ v[b, first : t + 1, kv]
    out = np.tensordot(y, w["o"], 2)
    return out + w["o_bias"] if "o_bias" in w else out


def _mlp(x, w, model):
    up = x @ w["up"] + w.get("up_bias", 0)
    if model.mlp == "gelu":
        h = 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3)))
    else:
        gate = x @ w["gate"] + w.get("gate_bias", 0)
        h = gate / (1 + np.exp(-gate)) * up
    return h @ w["down"] + w.get("down_bias", 0)


def hidden(params: dict, tokens, model):
    """tokens [B, T] → the normed output of the last block [B, T, D]."""

    def norm(x, w):
        return _norm(x, w["gain"], w.get("shift"), model.norm, model.norm_eps)

    x = params["embedding"][tokens]
    if model.rope is None:
        x = x + params["positions"][: tokens.shape[1]]
    for layer in range(model.num_layers):
        block = {
            part: {k: v[layer] for k, v in weights.items()}
            for part, weights in params["blocks"].items()
        }
        x = x + _attention(norm(x, block["attention_norm"]), block["attention"], model)
        x = x + _mlp(norm(x, block["mlp_norm"]), block["mlp"], model)
    return norm(x, params["norm"])


def loss(params: dict, tokens, targets, valid, model) -> float:
    """Mean of −log p(target) over the valid positions."""
    head = params.get("head", params["embedding"])[: model.vocab_size]
    logits = hidden(params, tokens, model) @ head.T
    top = logits.max(-1, keepdims=True)
    lse = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    picked = np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return float((lse - picked)[valid].sum() / valid.sum())
