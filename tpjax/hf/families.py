"""Families of models in transformers, and a config.json for a model that has none."""

from __future__ import annotations

from typing import Any, Literal

from tpjax.architecture import ModelConfig, RopeConfig
from tpjax.checks import ConfigError, require

Family = Literal["llama", "mistral", "qwen2", "qwen3", "gpt2"]
FAMILIES: tuple[Family, ...] = ("llama", "mistral", "qwen2", "qwen3", "gpt2")


def write_config(model: ModelConfig) -> dict[str, Any]:
    """A config.json for a model that came from none.

    Raises:
        ConfigError: no family has all that the model has.
    """
    family = _family_for(model)
    common = {
        "model_type": family,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tie_embeddings,
    }
    if family == "gpt2":
        return common | {
            "architectures": ["GPT2LMHeadModel"],
            "n_embd": model.embed_dim,
            "n_layer": model.num_layers,
            "n_head": model.num_heads,
            "n_inner": model.mlp_dim,
            "n_positions": model.max_seq_len,
            "layer_norm_epsilon": model.norm_eps,
            "activation_function": "gelu_new",
        }
    title = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    settings = common | {
        "architectures": [f"{title}ForCausalLM"],
        "hidden_size": model.embed_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.mlp_dim,
        "max_position_embeddings": model.max_seq_len,
        "rms_norm_eps": model.norm_eps,
        "hidden_act": "silu",
    }
    if family in ("llama", "qwen3"):
        settings["attention_bias"] = model.qkv_bias
    if family == "llama":
        settings["mlp_bias"] = model.mlp_bias
    if family == "mistral" or model.sliding_window:
        settings["sliding_window"] = model.sliding_window
    if family in ("qwen2", "qwen3") and model.sliding_window:
        settings |= {"use_sliding_window": True, "max_window_layers": 0}
    assert model.rope is not None  # only GPT-2 has learned positions
    require(
        model.rope.kind != "dynamic" or model.rope.original_max_seq_len == model.max_seq_len,
        f"{model.name} has dynamic RoPE for another length than its own, which transformers has "
        "no setting for.",
    )
    return settings | _write_rope(model.rope)


def _family_for(model: ModelConfig) -> Family:
    """The family whose settings and tensors say all of a model."""
    learned = model.rope is None
    if (model.norm, model.mlp, learned) == ("layernorm", "gelu", True):
        fits = model.num_kv_heads == model.num_heads and not model.qk_norm
        fits = fits and model.num_heads * model.head_dim == model.embed_dim
        family = "gpt2" if fits and model.sliding_window is None else None
    elif (model.norm, model.mlp, learned) != ("rmsnorm", "swiglu", False):
        family = None
    elif model.qk_norm:
        family = None if model.mlp_bias or model.qkv_bias != model.o_bias else "qwen3"
    elif model.qkv_bias and not model.o_bias:
        family = None if model.mlp_bias else "qwen2"
    elif model.sliding_window is not None:
        family = None if model.qkv_bias or model.o_bias or model.mlp_bias else "mistral"
    else:
        family = "llama" if model.qkv_bias == model.o_bias else None
    if family is None:
        raise ConfigError(
            f"{model.name} is none of {', '.join(FAMILIES)}, which transformers could load."
        )
    return family


def _write_rope(rope: RopeConfig) -> dict[str, Any]:
    """In the older form, which older and newer transformers read; `dynamic` has the model's own
    length there."""
    if rope.kind == "default":
        return {"rope_theta": rope.theta}
    scaling: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_max_seq_len
    if rope.kind == "llama3":
        scaling["low_freq_factor"] = rope.low_freq_factor
        scaling["high_freq_factor"] = rope.high_freq_factor
    if rope.kind == "yarn":
        scaling |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow}
        scaling |= {"truncate": rope.truncate}
        if rope.attention_factor is not None:
            scaling["attention_factor"] = rope.attention_factor
    return {"rope_theta": rope.theta, "rope_scaling": scaling}
