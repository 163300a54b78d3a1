"""Everything a run can be told, with the checks of each value.

Frozen dataclasses; the standard library only. A wrong value raises
`ConfigError` with one line that names the value and the remedy. What depends on
the machine ("auto", 0, None) is filled in by `resolve`, which also checks how
the values go together.

Letters used for sizes everywhere in tpjax:
    B batch (sequences)   T sequence length (tokens)   D model width
    N query heads         K key/value heads            H head width
    F feed-forward width  V vocabulary (padded)        L layers
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_type_hints


class ConfigError(Exception):
    """A wrong setting, in one line: what is wrong and what to do."""


def nearest(word: str, known: Iterable[str]) -> str:
    """`" Did you mean X?"` for the known words near `word`, else all of them."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(close)}?" if close else f" Known: {', '.join(known)}."


def require(condition: bool, message: str) -> None:
    """Raises `ConfigError(message)` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def _check_fields(config: Any, *, positive: str = "", non_negative: str = "") -> None:
    """Choices named by a `Literal`, and the signs of the fields listed."""
    for name, hint in get_type_hints(type(config)).items():
        value, choices = getattr(config, name), get_args(hint)
        if choices and all(isinstance(choice, str) for choice in choices):
            require(
                value in choices,
                f"{name}={value!r} is not a choice.{nearest(str(value), choices)}",
            )
    for name in positive.split():
        value = getattr(config, name)
        require(value is None or value > 0, f"{name}={value} must be greater than 0.")
    for name in non_negative.split():
        value = getattr(config, name)
        require(value is None or value >= 0, f"{name}={value} must not be negative.")


@dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding and how it is stretched to longer contexts.

    `kind` is Hugging Face's `rope_type`: `linear` divides positions by `factor`;
    `dynamic` raises theta once a sequence exceeds `original_max_seq_len`;
    `llama3` slows only the low frequencies; `yarn` blends both and scales the
    attention (arXiv:2309.00071).
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

    def __post_init__(self) -> None:
        _check_fields(self, positive="theta factor attention_factor beta_fast beta_slow")
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
            self.kind != "llama3" or self.low_freq_factor < self.high_freq_factor,
            f"rope low_freq_factor={self.low_freq_factor} must be below "
            f"high_freq_factor={self.high_freq_factor}.",
        )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The shape of one decoder: Llama 3.x, Qwen2/2.5/3, Mistral, SmolLM2 or GPT-2.

    `rope=None` means learned positions. `qkv_bias` gives q, k and v biases;
    `bias` gives one to every other projection, and to LayerNorm its shift.
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
    bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = True
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        _check_fields(
            self,
            positive="vocab_size num_layers embed_dim num_heads num_kv_heads head_dim mlp_dim "
            "max_seq_len norm_eps sliding_window",
        )
        require(
            self.num_heads % self.num_kv_heads == 0,
            f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}.",
        )
        require(
            self.rope is None or self.head_dim % 2 == 0,
            f"head_dim={self.head_dim} must be even for rotary positions.",
        )

    @property
    def padded_vocab_size(self) -> int:
        """V: the vocabulary rounded up so that every allowed tensor axis divides it.

        A tensor axis always divides N, so a multiple of N (and of 64, a matmul
        tile) serves every mesh alike: weights and checkpoints have one shape.
        """
        multiple = math.lcm(self.num_heads, 64)
        return -(-self.vocab_size // multiple) * multiple

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
            "T": self.max_seq_len,
        }

    @property
    def num_parameters(self) -> int:
        """The published count: padding rows are not parameters."""
        D, N, K, H, F = (self.sizes[letter] for letter in "DNKHF")
        norm = D * (2 if self.norm == "layernorm" and self.bias else 1)
        attention = D * H * (N + 2 * K) + N * H * D
        attention += H * (N + 2 * K) * self.qkv_bias + D * self.bias + 2 * H * self.qk_norm
        mlp = D * F * (3 if self.mlp == "swiglu" else 2)
        mlp += (D + F * (2 if self.mlp == "swiglu" else 1)) * self.bias
        tables = self.vocab_size * D * (1 if self.tie_embeddings else 2)
        tables += self.max_seq_len * D * (self.rope is None)
        return tables + self.num_layers * (attention + mlp + 2 * norm) + norm


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many devices each axis has: `data` (batch), `fsdp` (batch and weights,
    gathered layer by layer), `tensor` (heads, feed-forward, vocabulary)."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        _check_fields(self, positive="data fsdp tensor")

    @property
    def num_devices(self) -> int:
        return self.data * self.fsdp * self.tensor

    def __str__(self) -> str:
        axes = dataclasses.asdict(self).items()
        return ",".join(f"{axis}={size}" for axis, size in axes if size > 1) or "tensor=1"

    @staticmethod
    def parse(text: str) -> MeshConfig:
        """`"fsdp=2,tensor=4"` → MeshConfig."""
        sizes: dict[str, int] = {}
        axes = [f.name for f in dataclasses.fields(MeshConfig)]
        for part in text.split(","):
            axis, _, size = part.partition("=")
            require(axis in axes, f"mesh axis {axis!r} is unknown.{nearest(axis, axes)}")
            require(axis not in sizes, f"mesh axis {axis!r} is named twice.")
            require(size.isdecimal(), f"mesh {part!r} needs a whole number, such as {axis}=2.")
            sizes[axis] = int(size)
        return MeshConfig(**sizes)


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What decides the bytes a step needs."""

    remat: Literal["none", "attention", "dots", "full"] = "dots"
    """What the forward pass keeps for the backward pass: everything, the attention
    output only, every projection's output, or nothing but each layer's input."""
    params: Literal["fp32", "bf16"] = "fp32"
    """Stored parameters; bf16 is updated with stochastic rounding, without a master copy."""
    compute: Literal["auto", "fp32", "bf16"] = "auto"
    """Matmuls and activations; auto is bf16 on a GPU and fp32 on a CPU."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """Stored Adam moments; their arithmetic is float32 whatever the storage."""
    loss_chunks: int = 0
    """Pieces of the sequence whose logits exist one at a time; 0: enough for 64 MiB each."""
    sequence_parallel: bool = True
    """Shard the residual stream's sequence over the tensor axis."""
    attention: Literal["auto", "cudnn", "xla"] = "auto"
    """cuDNN flash attention (GPU, bf16), or blocks of query rows anywhere."""
    donate: bool = True
    """Reuse the old state's buffers for the new state."""
    tie_embeddings: bool | None = None
    """One matrix for embedding and output head; by default as the model has it."""

    def __post_init__(self) -> None:
        _check_fields(self, non_negative="loss_chunks")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW (arXiv:1711.05101) with linear warm-up and cosine decay."""

    lr: float = 3e-4
    """The highest learning rate, reached after the warm-up."""
    min_lr: float = 3e-5
    """The learning rate of the last step."""
    warmup: int | None = None
    """Steps of linear warm-up; by default a tenth of all steps."""
    beta1: float = 0.9
    """Decay of the first moment."""
    beta2: float = 0.95
    """Decay of the second moment."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices; norms and biases have none."""
    clip: float = 1.0
    """Greatest global norm of the gradient; 0 for no clipping."""

    def __post_init__(self) -> None:
        _check_fields(self, positive="lr", non_negative="min_lr warmup weight_decay clip")
        require(self.min_lr <= self.lr, f"min_lr={self.min_lr} must not exceed lr={self.lr}.")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"{name}={value} must be at least 0 and below 1.")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which text, and how much of it a step sees."""

    corpus: tuple[str, ...] = ("stdlib",)
    """`stdlib` (this Python's own source text), or files and folders of text, jsonl, parquet."""
    tokenizer: str = "bytes"
    """`bytes`, or the path of a Hugging Face tokenizer.json."""
    batch_size: int = 8
    """Sequences per optimiser step, over all devices."""
    seq_len: int = 2048
    """Tokens per sequence."""
    accumulate: int = 1
    """Parts into which a step splits the batch, one after the other."""

    def __post_init__(self) -> None:
        _check_fields(self, positive="batch_size seq_len accumulate")
        require(len(self.corpus) > 0, "corpus names no file; give stdlib, a file or a folder.")

    @property
    def part_size(self) -> int:
        """Sequences that are swept at once: a part of the batch, and a batch of evaluation."""
        return self.batch_size // self.accumulate


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run. `resolve.resolve` fills in what depends on the machine."""

    model: ModelConfig
    """A preset's name."""
    mesh: MeshConfig | None = None
    """Devices per axis, such as fsdp=2,tensor=4; by default all on tensor as far as the
    heads allow, the rest on data."""
    devices: int = 4
    """Simulated CPU devices where no GPU is there."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    steps: int = 1000
    """Optimiser steps."""
    seed: int = 0
    """Decides the initial weights, the order of the data and the stochastic rounding."""
    eval_every: int = 0
    """Steps between evaluations on held-out text; 0: only after the last step."""
    out: str = ""
    """Folder for config.json, metrics.jsonl, memory.json and TensorBoard events; by default
    a new one under runs/."""
    force: bool = False
    """Start a run that cannot fit into memory all the same."""
    dry_run: bool = False
    """Check everything, compile, report, and stop before the first step."""

    def __post_init__(self) -> None:
        _check_fields(self, positive="devices steps", non_negative="seed eval_every")
        require(self.seed < 2**32, f"seed={self.seed} must be below 2**32.")
