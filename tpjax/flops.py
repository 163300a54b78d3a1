"""Floating-point operations of a training step, counted from the model's shape.

Letters: B batch, T sequence, D model width, N query heads, K key/value heads,
H head width, F feed-forward width, V vocabulary, L layers.
"""

from __future__ import annotations

from tpjax.config import TrainConfig


def model_flops(config: TrainConfig) -> float:
    """Of the forward and the backward pass, nothing computed twice: what utilisation is
    measured by (arXiv:2204.02311, appendix B). A causal half of the attention's scores."""
    return 3 * _forward(config)


def step_flops(config: TrainConfig) -> float:
    """Of all that a step computes on all devices, with what its remat policy repeats."""
    repeated = {"none": 0.0, "dots": _attention(config)}
    everything = _layers(config) + _attention(config)
    repeated |= {"attention": _layers(config), "full": everything}
    return model_flops(config) + repeated[config.memory.remat]


def _forward(config: TrainConfig) -> float:
    D, V = config.model.embed_dim, config.model.vocab_size
    return _layers(config) + _attention(config) + 2 * _tokens(config) * D * V


def _tokens(config: TrainConfig) -> float:
    return float(config.data.batch_size * config.data.seq_len)


def _layers(config: TrainConfig) -> float:
    """Of all projections, forward: two operations per token and weight."""
    D, N, K, H, F, L = (config.model.sizes[letter] for letter in "DNKHFL")
    gated = 3 if config.model.mlp == "swiglu" else 2
    return 2 * _tokens(config) * L * (2 * D * H * (N + K) + gated * D * F)


def _attention(config: TrainConfig) -> float:
    """Of scores and their products with the values, forward, each query seeing half of T
    or its window."""
    N, H, L = (config.model.sizes[letter] for letter in "NHL")
    T, window = config.data.seq_len, config.model.sliding_window
    seen = T / 2 if window is None or window >= T else window * (1 - window / (2 * T))
    return 4 * _tokens(config) * L * N * H * seen
