"""Floating-point operations of a training step, counted from the model's shape.

Letters: B batch, T sequence, D model width, N query heads, K key/value heads,
H head width, F feed-forward width, V vocabulary, L layers.
"""

from __future__ import annotations

import math
from collections import defaultdict

from tpjax.config import TrainConfig
from tpjax.layers import PARAMETERS
from tpjax.remat import repeated


def model_flops(config: TrainConfig) -> float:
    """Of the forward and the backward pass, nothing computed twice: what utilisation is
    measured by (arXiv:2204.02311, appendix B). A causal half of the attention's scores. Weights
    beside adapters are there for two passes out of three: they have no gradients."""
    parts = _parts(config)
    forward = sum(parts.values()) + _head(config)
    if not config.model.adapted:
        return 3 * forward
    return 2 * forward + parts["attention"] + sum(_adapters(config).values())


def repeated_flops(config: TrainConfig) -> float:
    """Of what the remat policy has the backward pass compute again, on all devices, and of the
    logits, which the layer-by-layer update makes again for the head's gradient."""
    times = repeated(config.memory)
    layers = sum(times[part] * flops for part, flops in _parts(config).items())
    if config.memory.remat not in ("none", "dots"):  # what goes into the second matrix, always
        narrow = _adapters(config, "a")
        layers += sum(narrow[part] for part in narrow if part == "down" or not times[part])
    return layers + (_head(config) if config.memory.update == "layerwise" else 0)


def step_flops(config: TrainConfig) -> float:
    """Of all that a step computes on all devices, with what its remat policy repeats."""
    return model_flops(config) + repeated_flops(config)


def _tokens(config: TrainConfig) -> float:
    return float(config.data.batch_size * config.data.seq_len)


def _head(config: TrainConfig) -> float:
    """Of the logits, forward."""
    return 2 * _tokens(config) * config.model.embed_dim * config.model.vocab_size


def _parts(config: TrainConfig) -> dict[str, float]:
    """Of the parts of all layers (as `remat.repeated` names them), forward: two operations per
    token and weight, and the attention's scores and their products with the values."""
    adapters = _adapters(config)
    return {part: flops + adapters[part] for part, flops in _of_weights(config).items()}


def _of_weights(config: TrainConfig) -> dict[str, float]:
    D, N, K, H, F, L = (config.model.sizes[letter] for letter in "DNKHFL")
    per_weight = 2 * _tokens(config) * L
    return {
        "qkv": per_weight * D * H * (N + 2 * K),
        "attention": 2 * per_weight * N * H * _seen(config),
        "o": per_weight * D * H * N,
        "up": per_weight * D * F * (2 if config.model.mlp == "swiglu" else 1),
        "down": per_weight * D * F,
    }


def _adapters(config: TrainConfig, sides: str = "ab") -> dict[str, float]:
    """Of the matrices A and B of adapters, forward, by the part they belong to."""
    sizes, found = config.model.sizes, defaultdict[str, float](float)
    for name in config.model.adapted:
        part = {"q": "qkv", "k": "qkv", "v": "qkv", "gate": "up"}.get(name, name)
        for side in sides:
            weights = math.prod(sizes[letter] for letter in PARAMETERS[f"{name}_{side}"].letters)
            found[part] += 2 * _tokens(config) * config.model.num_layers * weights
    return found


def _seen(config: TrainConfig) -> float:
    """Keys that a query sees, on average: half of T, or of its window what is there."""
    T, window = config.data.seq_len, config.model.sliding_window
    return T / 2 if window is None or window >= T else window * (1 - window / (2 * T))
