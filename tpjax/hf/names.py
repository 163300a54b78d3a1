"""Where a model folder has each parameter: the tensor's name, and its dimensions by letter.

Letters: D model width, N query heads, K key/value heads, H head width, F feed-forward width,
V vocabulary, T positions, L layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from tpjax.architecture import ModelConfig
from tpjax.hf.families import Family
from tpjax.layers import PARAMETERS


@dataclass(frozen=True)
class Stored:
    """A parameter in a folder.

    Attributes:
        name: of the tensor, with {} for the number of the layer.
        dims: the tensor's dimensions, each of one or more letters put together, such as
            ("NH", "D") for [N·H, D].
        part, parts: which of how many parameters that lie side by side along its last dimension.
    """

    name: str
    dims: tuple[str, ...]
    part: int = 0
    parts: int = 1

    def tensors(self, num_layers: int) -> list[str]:
        """The names of its tensors: one for each layer, or one."""
        layers = range(num_layers) if "{}" in self.name else (0,)
        return [self.name.format(layer) for layer in layers]

    def shape(self, model: ModelConfig) -> tuple[int, ...]:
        """Of the tensor in the file, which has no padding."""
        sizes = model.sizes | {"V": model.vocab_size}
        *first, last = (math.prod(sizes[letter] for letter in dim) for dim in self.dims)
        return (*first, last * self.parts)


def letters_of(path: str) -> str:
    """The letters of the parameter at a path such as blocks.attention.q."""
    return PARAMETERS[path.rpartition(".")[2]].letters


def table(family: Family) -> dict[str, Stored]:
    """Path of a parameter → where it is, for all parameters that the model may have."""
    return _GPT2 if family == "gpt2" else _LLAMA


def _llama_block(path: str, name: str, *dims: str) -> tuple[str, Stored]:
    return f"blocks.{path}", Stored(f"model.layers.{{}}.{name}", dims)


_LLAMA = {
    "embedding": Stored("model.embed_tokens.weight", ("V", "D")),
    "norm.gain": Stored("model.norm.weight", ("D",)),
    "head": Stored("lm_head.weight", ("V", "D")),
    **dict(
        (
            _llama_block("attention_norm.gain", "input_layernorm.weight", "D"),
            _llama_block("mlp_norm.gain", "post_attention_layernorm.weight", "D"),
            _llama_block("attention.q", "self_attn.q_proj.weight", "NH", "D"),
            _llama_block("attention.k", "self_attn.k_proj.weight", "KH", "D"),
            _llama_block("attention.v", "self_attn.v_proj.weight", "KH", "D"),
            _llama_block("attention.o", "self_attn.o_proj.weight", "D", "NH"),
            _llama_block("attention.q_bias", "self_attn.q_proj.bias", "NH"),
            _llama_block("attention.k_bias", "self_attn.k_proj.bias", "KH"),
            _llama_block("attention.v_bias", "self_attn.v_proj.bias", "KH"),
            _llama_block("attention.o_bias", "self_attn.o_proj.bias", "D"),
            _llama_block("attention.q_gain", "self_attn.q_norm.weight", "H"),
            _llama_block("attention.k_gain", "self_attn.k_norm.weight", "H"),
            _llama_block("mlp.gate", "mlp.gate_proj.weight", "F", "D"),
            _llama_block("mlp.up", "mlp.up_proj.weight", "F", "D"),
            _llama_block("mlp.down", "mlp.down_proj.weight", "D", "F"),
            _llama_block("mlp.gate_bias", "mlp.gate_proj.bias", "F"),
            _llama_block("mlp.up_bias", "mlp.up_proj.bias", "F"),
            _llama_block("mlp.down_bias", "mlp.down_proj.bias", "D"),
        )
    ),
}


def _gpt2_block(
    path: str, name: str, *dims: str, part: int = 0, parts: int = 1
) -> tuple[str, Stored]:
    return f"blocks.{path}", Stored(f"transformer.h.{{}}.{name}", dims, part, parts)


_GPT2 = {
    "embedding": Stored("transformer.wte.weight", ("V", "D")),
    "positions": Stored("transformer.wpe.weight", ("T", "D")),
    "norm.gain": Stored("transformer.ln_f.weight", ("D",)),
    "norm.shift": Stored("transformer.ln_f.bias", ("D",)),
    "head": Stored("lm_head.weight", ("V", "D")),
    **dict(
        (
            _gpt2_block("attention_norm.gain", "ln_1.weight", "D"),
            _gpt2_block("attention_norm.shift", "ln_1.bias", "D"),
            _gpt2_block("mlp_norm.gain", "ln_2.weight", "D"),
            _gpt2_block("mlp_norm.shift", "ln_2.bias", "D"),
            _gpt2_block("attention.q", "attn.c_attn.weight", "D", "NH", part=0, parts=3),
            _gpt2_block("attention.k", "attn.c_attn.weight", "D", "KH", part=1, parts=3),
            _gpt2_block("attention.v", "attn.c_attn.weight", "D", "KH", part=2, parts=3),
            _gpt2_block("attention.q_bias", "attn.c_attn.bias", "NH", part=0, parts=3),
            _gpt2_block("attention.k_bias", "attn.c_attn.bias", "KH", part=1, parts=3),
            _gpt2_block("attention.v_bias", "attn.c_attn.bias", "KH", part=2, parts=3),
            _gpt2_block("attention.o", "attn.c_proj.weight", "NH", "D"),
            _gpt2_block("attention.o_bias", "attn.c_proj.bias", "D"),
            _gpt2_block("mlp.up", "mlp.c_fc.weight", "D", "F"),
            _gpt2_block("mlp.up_bias", "mlp.c_fc.bias", "F"),
            _gpt2_block("mlp.down", "mlp.c_proj.weight", "F", "D"),
            _gpt2_block("mlp.down_bias", "mlp.c_proj.bias", "D"),
        )
    ),
}
