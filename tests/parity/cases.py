"""The models whose goldens are kept: tiny, and together every setting that changes the result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
# Eight frequencies, so that each kind of RoPE keeps some, blends some and stretches some.
ROPE_SIZES = {
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "tie_word_embeddings": True,
}
GPT2_SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 32,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One model: `settings` are arguments of the configuration class of `model_type`."""

    name: str
    model_type: str
    settings: dict[str, Any]
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """What the weights are saved in; the golden comes from them widened to float32."""
    shard_size: str = "1GB"
    """The largest file of weights; more than one come with an index."""
    old_key: Literal["type", "rope_type"] = "rope_type"
    """What the RoPE's kind is called in the older form of the configuration."""


def _case(name: str, settings: dict[str, Any] | None = None, **rest: Any) -> Case:
    """The family is the first word of the name."""
    family = name.partition("-")[0]
    sizes = GPT2_SIZES if family == "gpt2" else SIZES
    return Case(name=name, model_type=family, settings=sizes | (settings or {}), **rest)


def _rope(name: str, max_positions: int, old_key: str = "rope_type", **rope: Any) -> Case:
    settings = {"max_position_embeddings": max_positions, "rope_parameters": rope}
    return _case(name, ROPE_SIZES | settings, old_key=old_key)


TIED = {"tie_word_embeddings": True}
WIDE = {"head_dim": 8}  # not hidden_size / num_attention_heads
WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0}
YARN_32 = YARN | {"original_max_position_embeddings": 32}
BETAS = {"beta_fast": 1.5, "beta_slow": 0.2}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0}
LINEAR = {"rope_type": "linear", "factor": 4.0}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}

# Sequences have 24 tokens: beyond the trained length of the cases called long.
CASES = (
    _case("llama", WIDE),
    _case("llama-tied", TIED),
    _case("llama-bias", {"attention_bias": True, "mlp_bias": True}),
    _case("llama-attention-bias", WIDE | {"attention_bias": True}),
    _case("llama-mha", {"num_key_value_heads": 4}),
    _case("llama-mqa", {"num_key_value_heads": 1}),
    _case("llama-eps", {"rms_norm_eps": 0.1}),
    _case("llama-theta", WIDE | TIED | {"rope_parameters": {"rope_theta": 100.0}}),
    _case("llama-sharded", WIDE, shard_size="12KB"),
    _case("llama-bfloat16", WIDE, dtype="bfloat16"),
    _case("llama-float16", TIED, dtype="float16", shard_size="8KB"),
    _case(
        "llama-smollm2",
        TIED
        | {
            "hidden_size": 36,
            "intermediate_size": 24,
            "num_hidden_layers": 1,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_theta": 100_000.0},
        },
    ),
    _rope(
        "llama-llama3", 1024, **LLAMA3, high_freq_factor=4.0, original_max_position_embeddings=128
    ),
    _rope(
        "llama-llama3-long",
        128,
        **LLAMA3,
        high_freq_factor=2.0,
        original_max_position_embeddings=16,
    ),
    _rope("llama-linear", 64, "type", **LINEAR),
    _rope("llama-linear-theta", 24, **LINEAR | {"factor": 1.5, "rope_theta": 100.0}),
    _rope("llama-dynamic", 32, "type", **DYNAMIC),
    _rope("llama-dynamic-long", 16, **DYNAMIC),
    _rope("llama-yarn", 128, **YARN_32),
    _rope("llama-yarn-long", 64, "type", **YARN, original_max_position_embeddings=16),
    _rope("llama-yarn-attention-factor", 128, **YARN_32, attention_factor=1.3),
    _rope("llama-yarn-mscale", 128, **YARN_32, mscale=0.8, mscale_all_dim=0.4),
    _rope("llama-yarn-betas", 128, **YARN_32, **BETAS),
    _rope("llama-yarn-untruncated", 128, **YARN_32, **BETAS, truncate=False),
    _case("mistral", {"sliding_window": None}),
    _case("mistral-window", {"sliding_window": 8}),
    _case("mistral-head-dim", WIDE | {"sliding_window": 4096}),
    _case("qwen2"),
    _case("qwen2-tied", TIED),
    _case("qwen2-window", WINDOW),
    _case(
        "qwen2-yarn",
        {
            "max_position_embeddings": 64,
            "rope_parameters": YARN | {"original_max_position_embeddings": 16},
        },
        old_key="type",
    ),
    _case("qwen3", WIDE),
    _case("qwen3-tied", WIDE | TIED),
    _case("qwen3-bias", WIDE | {"attention_bias": True}),
    _case("qwen3-window", WIDE | TIED | WINDOW),
    _case("gpt2"),
    _case("gpt2-untied", {"tie_word_embeddings": False}),
    _case("gpt2-inner", {"n_inner": 24, "layer_norm_epsilon": 0.1}),
)
