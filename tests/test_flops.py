"""Operations of a step, counted by hand and in the program."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from functools import lru_cache

import jax
import pytest
from conftest import TINY, TINY_GPT2, TINY_QWEN, mesh_of, tiny_config
from jax.extend.core import jaxprs_in_params
from jax.interpreters import partial_eval

from tpjax.config import KEPT, DataConfig, LoraConfig, MemoryConfig, ModelConfig, TrainConfig
from tpjax.flops import model_flops, repeated_flops, step_flops
from tpjax.presets import preset
from tpjax.state import abstract_batch, abstract_state
from tpjax.step import loss_and_gradients

ADAPTED = dataclasses.replace(TINY, name="adapted", lora=LoraConfig(lora_rank=3))
TOKENS, T = 2 * 64, 64
# nano: 4 layers of D 128, 8 heads of 16, 4 key/value heads, F 384; 257 tied embeddings.
PROJECTIONS = 4 * (128 * 16 * (8 + 2 * 4) + 8 * 16 * 128 + 3 * 128 * 384)
DOWN = 4 * 128 * 384  # which nothing needs a second time
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
        ("attention", PROJECTIONS - DOWN),
        ("full", PROJECTIONS - DOWN + SCORES),
        ("nested", 2 * (PROJECTIONS + SCORES) - DOWN),
    ],
)
def test_what_a_policy_repeats_is_added(remat, again):
    config = nano(remat=remat)
    assert step_flops(config) - model_flops(config) == pytest.approx(TOKENS * 2 * again)


def test_frozen_weights_have_two_passes_and_adapters_three():
    """By the dots of the program; attention, counted otherwise there, is in both thrice."""
    for targets in ("all", "q,down"):
        lora = LoraConfig(lora_rank=3, lora_targets=targets)
        model = dataclasses.replace(TINY, num_layers=4, lora=lora, vocab_size=128)
        config = tiny_config(model=model)
        frozen = model_flops(config) - attention_flops(config)
        assert dots_of_step(model, "none")["projections"] == frozen


def attention_flops(config: TrainConfig) -> float:
    model, tokens = config.model, config.data.batch_size * config.data.seq_len
    return 3 * 2 * tokens * model.num_layers * model.num_heads * model.head_dim * 2 * 16


def all_policies() -> list[str]:
    names = [",".join(some) for n in (1, 2, 3) for some in itertools.combinations(KEPT, n)]
    return ["none", "dots", "full", "nested", *names]


def dots(jaxpr, times: int = 1) -> Counter:
    """Operations of a program's dots: of activations with weights, and of batches of matrices."""
    found = Counter()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), (batch, _) = equation.params["dimension_numbers"]
            inner = math.prod(equation.invars[0].aval.shape[d] for d in contracted)
            flops = 2 * times * inner * equation.outvars[0].aval.size
            found["attention" if batch else "projections"] += flops
        for inner in jaxprs_in_params(equation.params):
            found += dots(inner, times * equation.params.get("length", 1))
    return found


@lru_cache
def dots_of_step(model: ModelConfig, remat: str) -> Counter:
    """Of loss and gradient, without what nobody reads."""
    config = tiny_config(model=dataclasses.replace(model, num_layers=4), remat=remat)
    mesh = mesh_of(config)
    state, batch = abstract_state(config, mesh), abstract_batch(config, mesh, 8)
    with jax.set_mesh(mesh):
        traced = jax.make_jaxpr(
            lambda s, b: loss_and_gradients(config, s.params, b, frozen=s.frozen)
        )(state, batch)
    jaxpr, _ = partial_eval.dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
    return dots(jaxpr)


@pytest.mark.parametrize("remat", all_policies())
@pytest.mark.parametrize(
    "model",
    [TINY, TINY_GPT2, dataclasses.replace(TINY_QWEN, sliding_window=None), ADAPTED],
    ids=lambda model: model.name,
)
def test_what_a_policy_repeats_is_in_the_program(model, remat):
    config = tiny_config(model=dataclasses.replace(model, num_layers=4), remat=remat)
    again = dots_of_step(model, remat) - dots_of_step(model, "none")
    # Blocks of query rows make all scores; those that no query sees are not counted.
    assert again["projections"] + again["attention"] / 2 == repeated_flops(config)
    assert again or remat == "none"


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
