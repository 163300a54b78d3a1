"""Decoding with a cache against the whole forward pass, and sampling from a sharded vocabulary."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY, TINY_GPT2, TINY_QWEN, initial_state, mesh_of, tiny_config
from flax import nnx

from tpjax import cache as kv
from tpjax.config import ConfigError, RopeConfig, TrainConfig
from tpjax.generate import Decoding, Generator, decode, lower_prefill, lower_step, sample
from tpjax.sampling import Sampling, next_token
from tpjax.sharding import activation_spec, weight_spec
from tpjax.state import graph

GREEDY = Sampling(temperature=0)
DYNAMIC = dataclasses.replace(
    TINY, rope=RopeConfig(kind="dynamic", factor=4.0, original_max_seq_len=16)
)


def generation_config(mesh: str, model=TINY, **memory) -> TrainConfig:
    return tiny_config(mesh, model=model, sequence_parallel=False, **memory)


def lively(config: TrainConfig) -> dict:
    """Initial parameters, large enough for attention to matter and for logits to differ."""
    params = initial_state(config, mesh_of(config)).params
    return jax.tree.map(lambda x: x * 8 if x.ndim > 2 else x, params)


def outputs(config: TrainConfig, params: dict, tokens: np.ndarray) -> np.ndarray:
    """x_BTD of the whole forward pass."""
    with jax.set_mesh(mesh_of(config)):
        placed = jax.device_put(tokens, activation_spec("BT"))
        run = jax.jit(lambda params, tokens: nnx.merge(graph(config), params)(tokens))
        return np.asarray(run(params, placed))


def decoded(
    config: TrainConfig, params: dict, tokens: np.ndarray, lengths: np.ndarray, kind: kv.Kind
) -> np.ndarray:
    """x_BTD of the positions after each prompt, one at a time; zero before."""
    mesh, (B, T) = mesh_of(config), tokens.shape
    decoding = Decoding(
        context=T, prompt_len=int(lengths.max()), batch_size=B, cache=kind, sampling=GREEDY
    )
    generator = Generator(config, mesh, params, decoding)
    generator._read([row[:length] for row, length in zip(tokens, lengths, strict=True)])
    found = np.zeros((B, T, config.model.embed_dim), np.float32)
    with jax.set_mesh(mesh):
        one = jax.jit(lambda *args: decode(generator._config, decoding, *args))
        cache, position = generator._cache, lengths - 1
        while (position < T).any():
            position = np.minimum(position, T - 1)  # a row that is done reads its last again
            rows = [generator._put(x, jax.P(("data", "fsdp"))) for x in
                    (tokens[np.arange(B), position], position.astype(np.int32))]  # fmt: skip
            cache, x_BD = one(params, cache, *rows)
            found[np.arange(B), position] = np.asarray(x_BD)
            position = position + 1
    return found


@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        (TINY, "tensor=1"),
        (TINY, "data=2,tensor=2"),
        (TINY, "tensor=8"),
        (TINY_GPT2, "fsdp=2,tensor=2"),
        (TINY_QWEN, "tensor=4"),
        (TINY_QWEN, "data=2,fsdp=2,tensor=2"),
        (DYNAMIC, "tensor=2"),
    ],
    ids=lambda x: getattr(x, "name", x),
)
@pytest.mark.parametrize("equal", [True, False], ids=["equal lengths", "unequal"])
def test_cached_decoding_equals_the_whole_forward_pass(model, mesh, equal):
    config = generation_config(mesh, model)
    params, rng = lively(config), np.random.default_rng(0)
    tokens = rng.integers(0, model.vocab_size, (8, 32), np.int32)
    lengths = np.full(8, 9, np.int32) if equal else np.array([1, 3, 9, 17, 2, 5, 8, 31], np.int32)
    wanted = outputs(config, params, tokens)
    found = decoded(config, params, tokens, lengths, "fp32")
    for row, length in enumerate(lengths):
        after = slice(length - 1, 32)
        np.testing.assert_allclose(found[row, after], wanted[row, after], atol=2e-4)
    assert np.abs(np.diff(wanted, axis=1)).max() > 1


def test_a_cache_in_int8_is_near_and_half_as_large():
    config = generation_config("data=2,tensor=2")
    params, rng = lively(config), np.random.default_rng(0)
    tokens = rng.integers(0, 97, (8, 32), np.int32)
    wanted = outputs(config, params, tokens)[:, 8:]
    found = decoded(config, params, tokens, np.full(8, 9, np.int32), "int8")[:, 8:]
    error = np.abs(found - wanted).mean() / np.abs(wanted).mean()
    assert 1e-4 < error < 0.03

    def size(kind: kv.Kind) -> int:
        model = dataclasses.replace(TINY, head_dim=128)
        cache = kv.abstract_cache(model, mesh_of(config), 8, 32, kind)
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))

    assert size("int8") / size("bf16") == (128 + 4) / 256


def test_a_window_needs_no_more_slots_than_it_has_positions():
    mesh = mesh_of(tiny_config("tensor=4"))
    assert kv.abstract_cache(TINY_QWEN, mesh, 8, 32, "bf16").slots == 5
    assert kv.abstract_cache(TINY, mesh, 8, 32, "bf16").slots == 32


def test_the_cache_is_updated_in_place_and_compiled_once():
    config = generation_config("data=2,tensor=2")
    mesh, prompts = mesh_of(config), [np.arange(1, n) for n in (5, 9, 3)]
    decoding = Decoding.of(prompts, 24, mesh, "bf16", GREEDY)
    assert (decoding.batch_size, decoding.prompt_len) == (4, 24)
    cache = kv.abstract_cache(config.model, mesh, 4, 24, "bf16")
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)) // 4
    for lower in (lower_prefill, lower_step):
        sizes = lower(config, mesh, decoding).compile().memory_analysis()
        assert sizes.alias_size_in_bytes >= held
    generator = Generator(config, mesh, lively(config), decoding)
    before = generator._cache
    tokens = list(generator.stream(prompts, 0))
    assert len(tokens) == 24 - 8
    assert before.k.is_deleted()


@pytest.mark.parametrize("mesh", ["tensor=1", "data=4,tensor=2", "fsdp=2,tensor=4"])
def test_greedy_is_the_arg_max_of_the_whole_forward_pass(mesh):
    config = generation_config(mesh)
    params, prompts = lively(config), [np.array([5, 6, 7]), np.array([1]), np.arange(20)]
    decoding = Decoding.of(prompts, 32, mesh_of(config), "fp32", GREEDY)
    stream = Generator(config, mesh_of(config), params, decoding).stream(prompts, 0)
    tokens = np.stack(list(stream), 1)
    assert tokens.shape == (3, 12)
    head = np.asarray(params["embedding"])[: TINY.vocab_size]
    whole = np.zeros((8, 32), np.int32)
    for row, prompt in enumerate(prompts):
        whole[row, : len(prompt)] = prompt
        whole[row, len(prompt) : len(prompt) + 12] = tokens[row]
    logits = outputs(config, params, whole) @ head.T
    for row, prompt in enumerate(prompts):
        there = slice(len(prompt) - 1, len(prompt) + 11)
        np.testing.assert_array_equal(logits[row, there].argmax(-1), tokens[row])


def test_a_context_beyond_the_positions_is_refused():
    config = generation_config("tensor=1")
    decoding = Decoding.of([np.array([1])], 33, mesh_of(config), "fp32", GREEDY)
    with pytest.raises(ConfigError, match="context=33 exceeds the 32 positions of tiny"):
        Generator(config, mesh_of(config), {}, decoding)


def draw(mesh_text: str, x: np.ndarray, head: np.ndarray, keys: int, **how) -> np.ndarray:
    with jax.set_mesh(mesh_of(tiny_config(mesh_text))):
        x = jax.device_put(x, jax.P(("data", "fsdp"), None))
        head = jax.device_put(head, weight_spec("VD"))
        one = jax.jit(lambda key: next_token(x, head, key, TINY.vocab_size, Sampling(**how)))
        return np.stack([np.asarray(one(jax.random.key(i))) for i in range(keys)])


@pytest.mark.parametrize(
    ("how", "kept"),
    [
        ({}, lambda p: np.ones(len(p), bool)),
        ({"temperature": 1.5}, lambda p: np.ones(len(p), bool)),
        ({"top_k": 7}, lambda p: np.arange(len(p)) < 7),
        ({"top_p": 0.6}, lambda p: np.cumsum(p) - p < 0.6),
        ({"top_k": 9, "top_p": 0.5}, lambda p: np.cumsum(p) - p < 0.5 * p[:9].sum()),
        ({"temperature": 0.0}, lambda p: np.arange(len(p)) < 1),
    ],
    ids=lambda x: str(x) if isinstance(x, dict) else "",
)
def test_sampling_is_the_same_on_every_mesh_and_follows_the_probabilities(how, kept):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 4)).astype(np.float32)
    x[:] = x[0]
    head = rng.standard_normal((TINY.padded_vocab_size, 4)).astype(np.float32)
    head[TINY.vocab_size :] = 100 * x[0]  # padding would win every time
    tokens = draw("tensor=1", x, head, 300, **how)
    np.testing.assert_array_equal(tokens[:20], draw("fsdp=2,tensor=4", x, head, 20, **how))
    assert tokens.max() < TINY.vocab_size
    logits = (head[: TINY.vocab_size] @ x[0]).astype(np.float64)
    p = np.asarray(jax.nn.softmax(jnp.asarray(logits / (how.get("temperature", 0.8) or 1))))
    order = np.argsort(-p)
    allowed = np.zeros(len(p), bool)
    allowed[order] = kept(p[order])
    expected = np.where(allowed, p, 0) / p[allowed].sum()
    counts = np.bincount(tokens.ravel(), minlength=TINY.vocab_size) / tokens.size
    assert np.abs(counts - expected).max() < 0.03
    assert not counts[~allowed].any()


def test_a_sample_continues_the_prompt():
    config = tiny_config("data=2,tensor=2")
    mesh = mesh_of(config)
    params = initial_state(config, mesh).params
    tokens = sample(config, mesh, params, np.array([5, 6, 7]), 12, seed=1)
    assert len(tokens) == 12
    assert all(0 <= token < TINY.vocab_size for token in tokens)
    assert tokens == sample(config, mesh, params, np.array([5, 6, 7]), 12, seed=1)
    assert tokens != sample(config, mesh, params, np.array([5, 6, 7]), 12, seed=2)
