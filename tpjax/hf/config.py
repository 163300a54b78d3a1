"""Hugging Face's config.json → ModelConfig.

Every setting that changes what a model computes is either taken over or refused by name. Both
forms of RoPE settings are read: `rope_theta` with `rope_scaling`, and `rope_parameters`.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from tpjax.architecture import ModelConfig, RopeConfig
from tpjax.checks import ConfigError, require, shown
from tpjax.hf.families import FAMILIES, Family
from tpjax.hf.files import read_json

# What these change is not computed here, so that they must be as they are without them.
_NEUTRAL: dict[str, tuple] = {
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
    "add_cross_attention": (None, False),
    "scale_attn_weights": (None, True),
    "scale_attn_by_inverse_layer_idx": (None, False),
    "is_encoder_decoder": (None, False),
}
_ROPE_KEYS = {
    "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings",
    "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow", "attention_factor",
    "mscale", "mscale_all_dim", "truncate", "partial_rotary_factor", "finetuned",
}  # fmt: skip


def read_config(path: Path, name: str, folder: str) -> ModelConfig:
    """The model that a config.json describes.

    Args:
        name: what to call it.
        folder: where its weights are; empty for none.

    Raises:
        ConfigError: it is not there, of another family, or asks for what tpjax does not compute.
    """
    fields = _Fields(path, read_json(path.parent, path.name))
    family = fields.family()
    for key, neutral in _NEUTRAL.items():
        value = fields.data.get(key)
        require(
            value in neutral,
            f"{path}: {key}={shown(str(value))} is not supported; it may only be left out.",
        )
    read = _gpt2 if family == "gpt2" else _llama
    return ModelConfig(name=name, folder=folder, **read(fields, family))


def family_of(folder: Path) -> Family:
    """The family of the model in a folder with a config.json."""
    return _Fields(folder / "config.json", read_json(folder, "config.json")).family()


class _Fields:
    """A config.json, field by field."""

    def __init__(self, path: Path, data: dict[str, Any]):
        self.path, self.data = path, data

    def family(self) -> Family:
        found = self.data.get("model_type")
        for family in FAMILIES:
            if found == family:
                return family
        raise ConfigError(
            f"{self.path}: model_type {shown(str(found))} is not supported; "
            f"it may be {', '.join(FAMILIES)}."
        )

    def number(self, key: str, default: float | None = None) -> Any:
        """A positive number; an integer where it is written as one."""
        value = self.data.get(key)
        value = default if value is None else value
        require(
            isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e30,
            f"{self.path}: {key}={shown(str(value))} must be a number above 0.",
        )  # fmt: skip
        return value

    def whole(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        require(int(value) == value, f"{self.path}: {key}={value} must be a whole number.")
        return int(value)

    def truth(self, key: str, default: bool) -> bool:
        value = self.data.get(key)
        value = default if value is None else value
        require(
            isinstance(value, bool),
            f"{self.path}: {key}={shown(str(value))} must be true or false.",
        )
        return value

    def one_of(self, key: str, allowed: tuple[str, ...], default: str) -> None:
        value = self.data.get(key, default)
        require(
            value in allowed,
            f"{self.path}: {key}={shown(str(value))} is not supported; "
            f"it may be {' or '.join(allowed)}.",
        )


def _gpt2(fields: _Fields, family: Family) -> dict[str, Any]:
    D, N = fields.whole("n_embd"), fields.whole("n_head")
    require(D % N == 0, f"{fields.path}: n_embd={D} is not a multiple of n_head={N}.")
    fields.one_of("activation_function", ("gelu_new", "gelu_pytorch_tanh"), "gelu_new")
    return {
        "vocab_size": fields.whole("vocab_size"),
        "num_layers": fields.whole("n_layer"),
        "embed_dim": D,
        "num_heads": N,
        "num_kv_heads": N,
        "head_dim": D // N,
        "mlp_dim": fields.whole("n_inner", 4 * D),
        "max_seq_len": fields.whole("n_positions"),
        "norm": "layernorm",
        "norm_eps": fields.number("layer_norm_epsilon", 1e-5),
        "rope": None,
        "mlp": "gelu",
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "norm_bias": True,
        "tie_embeddings": fields.truth("tie_word_embeddings", True),
    }


def _llama(fields: _Fields, family: Family) -> dict[str, Any]:
    """Llama and what differs from it in a few settings."""
    D, N = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    fields.one_of("hidden_act", ("silu", "swish"), "silu")
    H = fields.whole("head_dim", 128 if family == "qwen3" else max(D // N, 1))
    attention_bias = fields.truth("attention_bias", False) and family in ("llama", "qwen3")
    return {
        "vocab_size": fields.whole("vocab_size"),
        "num_layers": fields.whole("num_hidden_layers"),
        "embed_dim": D,
        "num_heads": N,
        "num_kv_heads": fields.whole("num_key_value_heads", N if family == "llama" else None),
        "head_dim": H,
        "mlp_dim": fields.whole("intermediate_size"),
        "max_seq_len": fields.whole("max_position_embeddings"),
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "rope": _rope(fields),
        "qkv_bias": attention_bias or family == "qwen2",
        "o_bias": attention_bias,
        "mlp_bias": family == "llama" and fields.truth("mlp_bias", False),
        "qk_norm": family == "qwen3",
        "tie_embeddings": fields.truth("tie_word_embeddings", False),
        "sliding_window": _window(fields, family),
    }


def _window(fields: _Fields, family: Family) -> int | None:
    """The window of all layers; layers that differ are refused."""
    data, L = fields.data, fields.whole("num_hidden_layers")
    if family == "mistral":
        absent = "sliding_window" not in data
        null = not absent and data["sliding_window"] is None
        return None if null else fields.whole("sliding_window", 4096)  # of all its layers
    if family in ("qwen2", "qwen3") and fields.truth("use_sliding_window", False):
        absent, null = "sliding_window" not in data, data.get("sliding_window") is None
        window = None if null and not absent else fields.whole("sliding_window", 4096)
        first = data.get("max_window_layers", 28)
        require(
            type(first) is int and first >= 0,
            f"{fields.path}: max_window_layers={shown(first)} must be a number of layers.",
        )
    else:
        window, first = None, L
    kinds = data.get("layer_types")
    if kinds is None:
        slides = [window is not None and layer >= first for layer in (0, L - 1)]
        kinds = ["sliding_attention" if one else "full_attention" for one in slides]
    else:
        require(
            isinstance(kinds, list) and len(kinds) == L,
            f"{fields.path}: layer_types is not a list of one for each of its {L} layers.",
        )
    require(
        set(map(str, kinds)) in ({"full_attention"}, {"sliding_attention"}),
        f"{fields.path}: layers of different attention (some with a sliding window, some "
        "without) are not supported.",
    )
    return window if "sliding_attention" in kinds else None


def _rope(fields: _Fields) -> RopeConfig:
    """Either form of the settings; one that is not known is refused, not left out."""
    path, data = fields.path, fields.data
    # transformers 5 does so: the older form, where it is there, is all that counts.
    found = data.get("rope_scaling") or data.get("rope_parameters") or {}
    require(isinstance(found, dict), f"{path}: its RoPE settings are not an object.")
    unknown = sorted(found.keys() - _ROPE_KEYS)
    require(not unknown, f"{path}: RoPE setting {shown(', '.join(unknown))} is not supported.")
    rope = _Fields(path, {"rope_theta": data.get("rope_theta"), **found})
    kind = found.get("rope_type", found.get("type", "default"))
    kinds = ("default", "linear", "dynamic", "llama3", "yarn")
    require(
        kind in kinds,
        f"{path}: RoPE of type {shown(str(kind))} is not supported; it may be {', '.join(kinds)}.",
    )
    require(
        rope.number("partial_rotary_factor", 1) == 1,
        f"{path}: partial_rotary_factor other than 1 is not supported.",
    )
    theta = float(rope.number("rope_theta", 10_000))
    if kind == "default":
        return RopeConfig(theta=theta)
    trained = fields.whole("max_position_embeddings")
    longest = trained
    if kind in ("llama3", "yarn"):  # one beside the RoPE settings goes before, as in transformers
        trained = rope.whole("original_max_position_embeddings", trained)
        trained = fields.whole("original_max_position_embeddings", trained)
    implied = longest / trained if kind == "yarn" else None
    settings: dict[str, Any] = {"factor": float(rope.number("factor", implied))}
    if kind != "linear":
        settings["original_max_seq_len"] = trained
    if kind == "llama3":
        for key in ("low_freq_factor", "high_freq_factor"):
            settings[key] = float(rope.number(key))
    if kind == "yarn":
        settings["beta_fast"] = float(rope.number("beta_fast", 32))
        settings["beta_slow"] = float(rope.number("beta_slow", 1))
        settings["truncate"] = rope.truth("truncate", True)
        settings["attention_factor"] = _yarn_attention(rope, settings["factor"])
    return RopeConfig(theta=theta, kind=kind, **settings)


def _yarn_attention(rope: _Fields, factor: float) -> float | None:
    """As given, or from DeepSeek's two scales; None: as the paper has it."""
    if rope.data.get("attention_factor") is not None:
        return float(rope.number("attention_factor"))
    scales = [rope.data.get(key) for key in ("mscale", "mscale_all_dim")]
    if not all(scales):
        return None

    def grown(key: str) -> float:
        return 0.1 * rope.number(key) * math.log(factor) + 1 if factor > 1 else 1.0

    return grown("mscale") / grown("mscale_all_dim")
