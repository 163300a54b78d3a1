"""The shape of a decoder: what does not depend on how or where it is trained.

Letters used for sizes everywhere in tpjax:
    B batch (sequences)   T sequence length (tokens)   D model width
    N query heads         K key/value heads            H head width
    F feed-forward width  V vocabulary (padded)        L layers
    A adapter rank
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field
from typing import Literal

from tpjax.checks import check_fields, check_names, require, shown

MAX_SIZE, MAX_LAYERS = 2**27, 10_000  # what files say of a model is to be believed up to here
TABLE_PART_BYTES = 128 * 2**20  # over all devices: a tensor axis of 4 has a quarter of it each


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding and how it is stretched to longer contexts.

    `kind` is Hugging Face's `rope_type`: `linear` divides positions by `factor`;
    `dynamic` raises theta once a sequence exceeds `original_max_seq_len`;
    `llama3` slows only the low frequencies; `yarn` blends both and scales the
    attention (arXiv:2309.00071), `truncate` rounding the range that it blends over to whole
    pairs.
    """

    theta: float = 10_000.0
    kind: Literal["default", "linear", "dynamic", "llama3", "yarn"] = "default"
    factor: float = 1.0
    original_max_seq_len: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        check_fields(self, positive="theta factor attention_factor beta_fast beta_slow")
        require(
            self.kind != "default" or self.factor == 1,
            f"rope factor={self.factor} needs a kind that stretches; kind=default does not.",
        )
        if self.kind in ("dynamic", "llama3", "yarn"):
            require(
                self.original_max_seq_len > 0,
                f"rope kind={self.kind} needs original_max_seq_len, the length trained on.",
            )
        require(
            self.kind != "yarn" or self.theta > 1,
            f"rope theta={self.theta} must be above 1 for kind=yarn.",
        )
        require(
            self.kind != "llama3" or self.low_freq_factor < self.high_freq_factor,
            f"rope low_freq_factor={self.low_freq_factor} must be below "
            f"high_freq_factor={self.high_freq_factor}.",
        )


ADAPTED = ("q", "k", "v", "o", "gate", "up", "down")
"""The projections that can have an adapter."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Adapters beside frozen weights (LoRA, arXiv:2106.09685): y = x W + x A B · alpha / rank."""

    lora_rank: int = 0
    """Width of the adapters that are trained instead of the weights; 0: the weights are."""
    lora_alpha: float = 16.0
    """What adapters add is multiplied by alpha / rank."""
    lora_targets: str = "all"
    """Projections that get one: all, or names out of q, k, v, o, gate, up and down."""

    def __post_init__(self) -> None:
        check_fields(self, positive="lora_alpha", non_negative="lora_rank")
        check_names("lora_targets", self.lora_targets, ("all",), ADAPTED)

    @property
    def targets(self) -> frozenset[str]:
        if not self.lora_rank:
            return frozenset()
        names = ADAPTED if self.lora_targets == "all" else self.lora_targets.split(",")
        return frozenset(names)

    @property
    def scale(self) -> float:
        return self.lora_alpha / self.lora_rank


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of one decoder: Llama 3.x, Qwen2/2.5/3, Mistral, SmolLM2 or GPT-2.

    `rope=None` means learned positions. The biases are those of q, k and v, of the
    attention's output, of the feed-forward projections, and the shift of LayerNorm.
    """

    name: str = "custom"
    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    max_seq_len: int
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-5
    rope: RopeConfig | None = field(default_factory=RopeConfig)
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = True
    sliding_window: int | None = None
    lora: LoraConfig = field(default_factory=LoraConfig)
    folder: str = ""
    """The Hugging Face folder or GGUF file that its weights and tokenizer are from; empty where
    they start at random."""

    def __post_init__(self) -> None:
        check_fields(
            self,
            positive="vocab_size num_layers embed_dim num_heads num_kv_heads head_dim mlp_dim "
            "max_seq_len norm_eps sliding_window",
        )
        for name in ("vocab_size", "embed_dim", "num_heads", "head_dim", "mlp_dim", "max_seq_len"):
            size = getattr(self, name)
            require(size <= MAX_SIZE, f"{name}={shown(size)} must be at most {MAX_SIZE}.")
        require(
            self.num_layers <= MAX_LAYERS,
            f"num_layers={shown(self.num_layers)} must be at most {MAX_LAYERS}.",
        )
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}.",
        )
        require(
            self.rope is None or self.head_dim % 2 == 0,
            f"head_dim={self.head_dim} must be even for rotary positions.",
        )
        require(
            self.rope is None or self.rope.kind != "dynamic" or self.head_dim > 2,
            "head_dim=2 is too small for rope kind=dynamic.",
        )
        require(
            self.norm == "layernorm" or not self.norm_bias,
            "norm_bias is the shift of norm=layernorm; rmsnorm has none.",
        )

    @property
    def padded_vocab_size(self) -> int:
        """V: the vocabulary rounded up so that every allowed tensor axis divides it, and each
        of its parts.

        A tensor axis always divides N, so a multiple of N (and of 64, a matmul
        tile) serves every mesh alike: weights and checkpoints have one shape.
        """
        return self._table[0]

    @property
    def table_parts(self) -> int:
        """Parts in which a vocabulary's table is made and updated, dealt out by rows, the same
        on every mesh: as many as keep the float32 values of one below `TABLE_PART_BYTES`, or
        up to twice as many, to be equal."""
        return self._table[1]

    @property
    def _table(self) -> tuple[int, int]:
        """Rows and parts."""
        multiple = math.lcm(self.num_heads, 64)
        for V in itertools.count(-(-self.vocab_size // multiple) * multiple, multiple):
            fewest = min(-(-V * self.embed_dim * 4 // TABLE_PART_BYTES), V // self.num_heads)
            for parts in range(fewest, 2 * fewest + 1):
                if V // self.num_heads % parts == 0:
                    return V, parts
        raise AssertionError("some multiple has a divisor of any size")

    @property
    def adapted(self) -> frozenset[str]:
        """The projections that have an adapter, of those that there are."""
        return self.lora.targets - (frozenset() if self.mlp == "swiglu" else {"gate"})

    @property
    def sizes(self) -> dict[str, int]:
        """Letter → size, for the letters a model has by itself; T is its longest sequence."""
        return {
            "V": self.padded_vocab_size,
            "D": self.embed_dim,
            "N": self.num_heads,
            "K": self.num_kv_heads,
            "H": self.head_dim,
            "F": self.mlp_dim,
            "L": self.num_layers,
            "A": self.lora.lora_rank,
            "T": self.max_seq_len,
        }

    @property
    def num_parameters(self) -> int:
        """The published count: padding rows are not parameters."""
        D, N, K, H, F = (self.sizes[letter] for letter in "DNKHF")
        norm = D * (2 if self.norm_bias else 1)
        attention = D * H * (N + 2 * K) + N * H * D
        attention += H * (N + 2 * K) * self.qkv_bias + D * self.o_bias + 2 * H * self.qk_norm
        mlp = D * F * (3 if self.mlp == "swiglu" else 2)
        mlp += (D + F * (2 if self.mlp == "swiglu" else 1)) * self.mlp_bias
        tables = self.vocab_size * D * (1 if self.tie_embeddings else 2)
        tables += self.max_seq_len * D * (self.rope is None)
        return tables + self.num_layers * (attention + mlp + 2 * norm) + norm
