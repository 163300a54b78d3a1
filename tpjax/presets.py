"""Named models, and the settings that the small ones train with.

Sizes are those of the models' published `config.json` files; `nano` is our own,
and `nanogpt-shakespeare` is the smallest of nanoGPT's README, on bytes.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from tpjax.checks import shown
from tpjax.config import (
    ConfigError,
    DataConfig,
    ModelConfig,
    OptimConfig,
    RopeConfig,
    TrainConfig,
    nearest,
)
from tpjax.hf.model import read_model

_LLAMA3_ROPE = RopeConfig(
    theta=500_000.0,
    kind="llama3",
    factor=8.0,
    original_max_seq_len=8192,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)


def _llama3(name: str, *, layers: int, D: int, N: int, H: int, F: int, **other) -> ModelConfig:
    return ModelConfig(
        name=name,
        vocab_size=128_256,
        num_layers=layers,
        embed_dim=D,
        num_heads=N,
        num_kv_heads=8,
        head_dim=H,
        mlp_dim=F,
        max_seq_len=131_072,
        **{"rope": _LLAMA3_ROPE, "tie_embeddings": False, **other},
    )


def _qwen3(name: str, *, layers: int, D: int, N: int, F: int, tied: bool) -> ModelConfig:
    return ModelConfig(
        name=name,
        vocab_size=151_936,
        num_layers=layers,
        embed_dim=D,
        num_heads=N,
        num_kv_heads=8,
        head_dim=128,
        mlp_dim=F,
        max_seq_len=40_960,
        norm_eps=1e-6,
        rope=RopeConfig(theta=1_000_000.0),
        qk_norm=True,
        tie_embeddings=tied,
    )


def _gpt2(name: str, *, vocab: int, layers: int, D: int, N: int, T: int, bias: bool) -> ModelConfig:
    return ModelConfig(
        name=name,
        vocab_size=vocab,
        num_layers=layers,
        embed_dim=D,
        num_heads=N,
        num_kv_heads=N,
        head_dim=D // N,
        mlp_dim=4 * D,
        max_seq_len=T,
        norm="layernorm",
        rope=None,
        mlp="gelu",
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        norm_bias=bias,
    )


_MODELS = {
    model.name: model
    for model in (
        ModelConfig(
            name="nano",
            vocab_size=257,
            num_layers=4,
            embed_dim=128,
            num_heads=8,
            num_kv_heads=4,
            head_dim=16,
            mlp_dim=384,
            max_seq_len=256,
        ),
        _gpt2("nanogpt-shakespeare", vocab=257, layers=4, D=128, N=4, T=64, bias=False),
        _gpt2("gpt2", vocab=50_257, layers=12, D=768, N=12, T=1024, bias=True),
        ModelConfig(
            name="smollm2-135m",
            vocab_size=49_152,
            num_layers=30,
            embed_dim=576,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            mlp_dim=1536,
            max_seq_len=8192,
            rope=RopeConfig(theta=100_000.0),
        ),
        _llama3(
            "llama3.2-1b",
            layers=16,
            D=2048,
            N=32,
            H=64,
            F=8192,
            rope=dataclasses.replace(_LLAMA3_ROPE, factor=32.0),
            tie_embeddings=True,
        ),
        _llama3("llama3.1-8b", layers=32, D=4096, N=32, H=128, F=14_336),
        _llama3("llama3.1-70b", layers=80, D=8192, N=64, H=128, F=28_672),
        _llama3("llama3.1-405b", layers=126, D=16_384, N=128, H=128, F=53_248),
        _qwen3("qwen3-0.6b", layers=28, D=1024, N=16, F=3072, tied=True),
        _qwen3("qwen3-8b", layers=36, D=4096, N=32, F=12_288, tied=False),
    )
}

_TRAINING = {
    "nano": {
        "optim": OptimConfig(lr=3e-3, min_lr=3e-4, beta2=0.99),
        "data": DataConfig(batch_size=8, seq_len=256),
        "steps": 400,
        "eval_every": 100,
    },
    "nanogpt-shakespeare": {
        "optim": OptimConfig(lr=4e-3, min_lr=1e-4, beta2=0.99),
        "data": DataConfig(batch_size=12, seq_len=64),
        "steps": 2000,
        "eval_every": 500,
    },
    "gpt2": {
        "optim": OptimConfig(lr=6e-4, min_lr=6e-5),
        "data": DataConfig(batch_size=8, seq_len=1024),
    },
}


def preset_names() -> list[str]:
    return list(_MODELS)


def preset(name: str) -> ModelConfig:
    """The model called `name`: a preset, or one in a Hugging Face folder or a GGUF file.

    Raises:
        ConfigError: there is no such preset or path (names the nearest ones), or what is there
            is no model for tpjax.
    """
    if name in _MODELS:
        return _MODELS[name]
    try:
        there = Path(name).exists()
    except OSError as error:
        raise ConfigError(f"model {shown(name)} cannot be read: {error.strerror}.") from error
    if there:
        return read_model(str(Path(name).absolute()))  # a run may go on from anywhere
    raise ConfigError(f"model {name!r} is not a preset or a path.{nearest(name, _MODELS)}")


def preset_run(name: str) -> TrainConfig:
    """The model with the settings it is trained with here."""
    return TrainConfig(model=preset(name), **_TRAINING.get(name, {}))
