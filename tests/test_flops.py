"""Operations of a step, counted by hand."""

from __future__ import annotations

import dataclasses

import pytest
from conftest import tiny_config

from tpjax.config import DataConfig, MemoryConfig, TrainConfig
from tpjax.flops import model_flops, step_flops
from tpjax.presets import preset

TOKENS, T = 2 * 64, 64
# nano: 4 layers of D 128, 8 heads of 16, 4 key/value heads, F 384; 257 tied embeddings.
PROJECTIONS = 4 * (128 * 16 * (8 + 2 * 4) + 8 * 16 * 128 + 3 * 128 * 384)
SCORES = 4 * 8 * 16 * 2 * T / 2  # scores and values, T/2 keys each


def nano(**memory) -> TrainConfig:
    data = DataConfig(batch_size=2, seq_len=T)
    return TrainConfig(model=preset("nano"), data=data, memory=MemoryConfig(**memory))


def test_model_flops_by_hand():
    """Two operations for each weight and token forward, four backward."""
    assert model_flops(nano()) == pytest.approx(TOKENS * 6 * (257 * 128 + PROJECTIONS + SCORES))


@pytest.mark.parametrize(
    ("remat", "again"),
    [
        ("none", 0),
        ("dots", SCORES),
        ("attention", PROJECTIONS),
        ("full", PROJECTIONS + SCORES),
    ],
)
def test_what_a_policy_repeats_is_added(remat, again):
    config = nano(remat=remat)
    assert step_flops(config) - model_flops(config) == pytest.approx(TOKENS * 2 * again)


@pytest.mark.parametrize("window", [1, 5, 31, 32, 40])
def test_a_window_is_counted_by_what_each_query_sees(window):
    config = tiny_config()
    T = config.data.seq_len
    seen = sum(min(position + 1, window) for position in range(T)) / T
    windowed = dataclasses.replace(
        config, model=dataclasses.replace(config.model, sliding_window=window)
    )
    model, tokens = config.model, config.data.batch_size * T
    attention = 3 * 4 * tokens * model.num_layers * model.num_heads * model.head_dim
    # The diagonal counts half of a key: attention to T/2 keys, not (T + 1)/2.
    assert model_flops(windowed) - model_flops(config) == pytest.approx(
        attention * (seen - (T + 1) / 2), abs=0.51 * attention
    )
