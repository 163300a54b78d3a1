"""GGUF files: their settings as a ModelConfig, their tensors under Hugging Face's names.

Read through the `gguf` package, slice by slice; what is quantised comes as float32.
"""

from __future__ import annotations

import math
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from tpjax.architecture import ModelConfig, RopeConfig
from tpjax.checks import ConfigError, require, shown
from tpjax.hf.tensors import Index, Tensor

ARCHITECTURES = ("llama", "qwen2", "qwen3")

_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NAME = re.compile(r"(?:blk\.(\d+)\.)?(\w+)\.(weight|bias)")
_PERMUTED = re.compile(r"self_attn\.([qk])_proj\.")
_ROPE_FACTORS = "rope_freqs.weight"


@lru_cache(maxsize=2)  # settings, tensors and tokenizer are asked for one after the other
def open_gguf(path: Path) -> Any:
    """A `gguf.GGUFReader`.

    Raises:
        ConfigError: the package is not installed, or the file is not whole.
    """
    try:
        import gguf
    except ImportError as error:
        raise ConfigError(f'{path} needs the package gguf: pip install "tpjax[gguf]".') from error

    class Reader(gguf.GGUFReader):
        """Believes no count that the file is too short for: it would go on for ever."""

        def _get(self, offset: int, dtype: Any, count: int = 1, *args, **kwargs) -> np.ndarray:
            found = super()._get(offset, dtype, count, *args, **kwargs)
            if len(found) != int(count):
                raise ValueError("it is cut short")
            return found

    try:
        return Reader(path)
    except Exception as error:  # whatever an untrusted file makes the package raise
        raise ConfigError(
            f"{path} is not a whole GGUF file ({shown(str(error))}); fetch it again."
        ) from error


class _Settings:
    """The metadata of a file."""

    def __init__(self, path: Path):
        self._path, self._reader = path, open_gguf(path)
        self.architecture = self.get("general.architecture", str)
        require(
            self.architecture in ARCHITECTURES,
            f"{path}: architecture {shown(self.architecture)} is not supported; "
            f"it may be {', '.join(ARCHITECTURES)}.",
        )

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        value = default if field is None else field.contents()
        known = isinstance(value, kind | int if kind is float else kind)
        known = known and not isinstance(value, bool) and (kind is str or 0 <= value < 1e30)
        require(known, f"{self._path}: its setting {key}={shown(value)} is no {kind.__name__}.")
        return value

    def of(self, key: str, kind: type, default: Any = None) -> Any:
        return self.get(f"{self.architecture}.{key}", kind, default)

    def refuse(self, *keys: str) -> None:
        """Settings that change what is computed, and are not supported."""
        for key in keys:
            there = self._reader.get_field(f"{self.architecture}.{key}") is not None
            require(not there, f"{self._path}: its setting {key} is not supported.")


def read_config(path: Path) -> ModelConfig:
    """The model that a file describes.

    Raises:
        ConfigError: it is of another architecture, or of another kind of RoPE.
    """
    file = GgufFile(path)
    settings, names = _Settings(path), file.tensors.keys()
    table = file.tensors.get("model.embed_tokens.weight")
    require(
        table is not None and len(table.shape) == 2,
        f"{path} has no tensor token_embd.weight of two dimensions.",
    )
    assert table is not None
    N, D = settings.of("attention.head_count", int), settings.of("embedding_length", int)
    require(N > 0, f"{path}: its setting attention.head_count is 0.")
    settings.refuse(
        "attention.scale", "logit_scale", "rope.scale_linear", "rope.scaling.alpha",
        "rope.scaling.attn_factor", "rope.scaling.yarn_ext_factor",
        "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_log_multiplier",
        "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    )  # fmt: skip
    H = settings.of("attention.key_length", int, D // N)
    window = settings.of("attention.sliding_window", int, 0)

    def there(name: str) -> bool:
        return f"model.layers.0.{name}" in names

    return ModelConfig(
        name=path.stem,
        folder=str(path),
        vocab_size=table.shape[0],
        num_layers=settings.of("block_count", int),
        embed_dim=D,
        num_heads=N,
        num_kv_heads=settings.of("attention.head_count_kv", int, N),
        head_dim=H,
        mlp_dim=settings.of("feed_forward_length", int),
        max_seq_len=settings.of("context_length", int),
        norm_eps=_short(settings.of("attention.layer_norm_rms_epsilon", float)),
        rope=_rope(path, settings, H, file.rope_factors),
        qkv_bias=there("self_attn.q_proj.bias"),
        o_bias=there("self_attn.o_proj.bias"),
        mlp_bias=there("mlp.up_proj.bias"),
        qk_norm=there("self_attn.q_norm.weight"),
        tie_embeddings="lm_head.weight" not in names,
        sliding_window=window or None,
    )


def _short(value: float) -> float:
    """The decimal that a float32 was written for."""
    return float(str(np.float32(value)))


def _rope(path: Path, settings: _Settings, H: int, factors: np.ndarray | None) -> RopeConfig:
    width = settings.of("rope.dimension_count", int, H)
    require(width == H, f"{path}: rotary positions on {width} of {H} are not supported.")
    theta = _short(settings.of("rope.freq_base", float, 10_000.0))
    if factors is not None:
        return _llama3_rope(path, theta, factors, H)
    kind = settings.of("rope.scaling.type", str, "none")
    if kind in ("none", ""):
        settings.refuse("rope.scaling.factor")
        return RopeConfig(theta=theta)
    require(kind in ("linear", "yarn"), f"{path}: RoPE of type {shown(kind)} is not supported.")
    factor = _short(settings.of("rope.scaling.factor", float))
    if kind == "linear":
        return RopeConfig(theta=theta, kind="linear", factor=factor)
    trained = settings.of("rope.scaling.original_context_length", int)
    return RopeConfig(theta=theta, kind="yarn", factor=factor, original_max_seq_len=trained)


def _llama3_rope(path: Path, theta: float, factors: np.ndarray, H: int) -> RopeConfig:
    """Llama 3.1 and later: a file has by how much each frequency is slowed, not the settings
    that say so. They are those that all of these models have, or the file is refused."""
    rope = RopeConfig(
        theta=theta,
        kind="llama3",
        factor=_short(factors.max(initial=1)),
        original_max_seq_len=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    frequency = theta ** (-np.arange(0, H, 2) / H)
    turns = rope.original_max_seq_len * frequency / (2 * math.pi)
    keep = np.clip((turns - 1) / (rope.high_freq_factor - 1), 0, 1)
    wanted = 1 / (keep + (1 - keep) / rope.factor)
    require(
        factors.shape == wanted.shape and bool(np.allclose(factors, wanted, rtol=1e-4)),
        f"{path}: the frequencies in its {_ROPE_FACTORS} are not those of Llama 3.1 or later.",
    )
    return rope


class GgufFile:
    """The tensors of a file, by Hugging Face's names.

    Raises:
        ConfigError: a tensor has a name that is not known, or numbers that the package
            cannot make out.
    """

    def __init__(self, path: Path):
        self.path = path
        self.tensors: dict[str, Tensor] = {}
        self.rope_factors: np.ndarray | None = None
        self._stored: dict[str, Any] = {}
        settings = _Settings(path)
        self._heads: dict[str, int] = {}
        if settings.architecture == "llama":
            N = settings.of("attention.head_count", int)
            self._heads = {"q": N, "k": settings.of("attention.head_count_kv", int, N)}
        for tensor in open_gguf(path).tensors:
            if tensor.name == _ROPE_FACTORS:
                self.rope_factors = np.asarray(tensor.data, np.float64)
                continue
            name = _full_name(path, tensor.name)
            self._stored[name] = tensor
            shape = tuple(int(n) for n in reversed(tensor.shape))
            self.tensors[name] = Tensor(shape, tensor.tensor_type.name)

    def read(self, name: str, index: Index) -> np.ndarray:
        """As of `Source`; float32."""
        import gguf

        tensor = self._stored[name]
        rows, *columns = index
        try:
            found = gguf.dequantize(tensor.data[rows], tensor.tensor_type)
        except NotImplementedError as error:
            raise ConfigError(
                f"{self.path}: tensor {tensor.name} is {tensor.tensor_type.name}, which the gguf "
                "package cannot read; use a file in Q8_0, F16 or BF16."
            ) from error
        which = _PERMUTED.search(name)
        if which is not None and self._heads:
            found = _unpermuted(found, self.tensors[name].shape[0] // self._heads[which.group(1)])
        return np.ascontiguousarray(found[:, columns[0]]) if columns else found


def _full_name(path: Path, name: str) -> str:
    parts = _NAME.fullmatch(name)
    require(
        parts is not None and parts.group(2) in _NAMES,
        f"{path} has tensor {shown(name)}, which tpjax does not know.",
    )
    assert parts is not None
    layer, part, kind = parts.groups()
    return f"{'' if layer is None else f'model.layers.{layer}.'}{_NAMES[part]}.{kind}"


def _unpermuted(rows: np.ndarray, H: int) -> np.ndarray:
    """Whole heads of q or k: a file of the llama architecture has the two halves of each head's
    rows, which turn as pairs, in turn."""
    halves = rows.reshape(-1, H // 2, 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)
