"""Everything a run can be told, with the checks of each value.

Frozen dataclasses; the standard library only. A wrong value raises
`ConfigError` with one line that names the value and the remedy. What depends on
the machine ("auto", 0, None) is filled in by `resolve`, which also checks how
the values go together.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

from tpjax.architecture import LoraConfig, ModelConfig, RopeConfig
from tpjax.checks import ConfigError, check_fields, check_names, nearest, require

__all__ = [
    "ConfigError",
    "DataConfig",
    "LoraConfig",
    "MemoryConfig",
    "MeshConfig",
    "ModelConfig",
    "OptimConfig",
    "PoolConfig",
    "RecoveryConfig",
    "RopeConfig",
    "TrainConfig",
    "nearest",
    "require",
]


@dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """How many devices each axis has: `data` (batch), `fsdp` (batch and weights,
    gathered layer by layer), `tensor` (heads, feed-forward, vocabulary)."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        check_fields(self, positive="data fsdp tensor")

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


KEPT = ("attention", "qkv", "mlp_in")
"""What `remat` can name to be kept of each layer; see `remat.py`."""
OFFLOADED = ("residuals", "moments")
"""What `offload` can name."""


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What decides the bytes a step needs."""

    remat: str = "dots"
    """What the forward pass keeps for the backward pass: none (keeps everything), dots (every
    projection's output), full (each layer's input only), nested (the input of every group of
    layers only), or names out of attention, qkv and mlp_in, such as attention,qkv (these, and
    each layer's input)."""
    params: Literal["fp32", "bf16", "int8", "nf4"] = "fp32"
    """Stored parameters; bf16 and int8 (in blocks, with a scale each; vectors stay fp32) are
    updated with stochastic rounding, without a master copy. nf4, 4 bits in blocks (the
    vocabulary's tables are in int8), is for weights that adapters leave as they are."""
    compute: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Matmuls and activations; auto is bf16 on a GPU and fp32 on a CPU. fp16 scales the loss, and
    leaves out a step whose gradient overflows."""
    moments: Literal["fp32", "bf16", "int8", "factored"] = "fp32"
    """Stored Adam moments; their arithmetic is float32 whatever the storage. factored keeps the
    first in int8, and of the second the means of its rows and columns only, as Adafactor."""
    update: Literal["whole", "layerwise"] = "whole"
    """Update all parameters after the backward pass, or each layer's as soon as its gradient is
    there, so that never more than one layer's gradient is kept (needs --remat full or nested)."""
    split: Literal["auto"] | int = "auto"
    """Parts of the batch that go through a layer one after the other where the update is
    layerwise; auto: as many as leave a part 2048 tokens per device."""
    offload: str = "none"
    """What waits in the host's memory until it is used: none, residuals (what the forward pass
    keeps of each layer), moments (the optimiser's), or residuals,moments."""
    loss_chunks: int = 0
    """Pieces of the sequence whose logits exist one at a time; 0: enough for 64 MiB each."""
    sequence_parallel: bool = True
    """Shard the residual stream's sequence over the tensor axis."""
    attention: Literal["auto", "cudnn", "xla", "materialised"] = "auto"
    """cuDNN flash attention (GPU, bf16 or fp16), blocks of query rows anywhere, or all scores at
    once, to compare with."""
    embedding: Literal["sharded", "replicated"] = "sharded"
    """The vocabulary's tables in shards over the tensor axis, or whole on each of its devices,
    to compare with."""
    init: Literal["lazy", "eager"] = "lazy"
    """Make parameters in their shards, or all on one device first, to compare with."""
    donate: bool = True
    """Reuse the old state's buffers for the new state."""
    tie_embeddings: bool | None = None
    """One matrix for embedding and output head; by default as the model has it."""

    def __post_init__(self) -> None:
        check_fields(self, non_negative="loss_chunks")
        check_names("remat", self.remat, ("none", "dots", "full", "nested"), KEPT)
        check_names("offload", self.offload, ("none",), OFFLOADED)
        require(
            self.split == "auto" or (isinstance(self.split, int) and self.split > 0),
            f"split={self.split} must be auto or greater than 0.",
        )

    @property
    def kept(self) -> frozenset[str]:
        """The names that `remat` has put together; none for the other policies."""
        return frozenset(self.remat.split(",")) & set(KEPT)

    @property
    def offloads_residuals(self) -> bool:
        return "residuals" in self.offload.split(",")

    @property
    def offloads_moments(self) -> bool:
        return "moments" in self.offload.split(",")


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
        check_fields(self, positive="lr", non_negative="min_lr warmup weight_decay clip")
        require(self.min_lr <= self.lr, f"min_lr={self.min_lr} must not exceed lr={self.lr}.")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            require(0 <= value < 1, f"{name}={value} must be at least 0 and below 1.")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which text, and how much of it a step sees."""

    corpus: tuple[str, ...] = ("stdlib",)
    """`stdlib` (this Python's own source text), or files and folders of text, jsonl, parquet."""
    tokenizer: str = "auto"
    """`bytes`, a Hugging Face folder or its tokenizer.json, or a GGUF file or the folder of one.
    auto: the tokenizer of the model's own folder, or bytes where it has none."""
    batch_size: int = 8
    """Sequences per optimiser step, over all devices."""
    seq_len: int = 2048
    """Tokens per sequence."""
    accumulate: int = 1
    """Parts into which a step splits the batch, one after the other."""

    def __post_init__(self) -> None:
        check_fields(self, positive="batch_size seq_len accumulate")
        require(len(self.corpus) > 0, "corpus names no file; give stdlib, a file or a folder.")

    @property
    def part_size(self) -> int:
        """Sequences that are swept at once: a part of the batch, and a batch of evaluation."""
        return self.batch_size // self.accumulate


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """How XLA takes memory from a GPU; set before JAX starts. None: as JAX has it."""

    pool_fraction: float | None = None
    """Share of the GPU's memory for the pool, above 0 and at most 1."""
    preallocate: bool | None = None
    """Take the whole pool at the start."""
    allocator: Literal["auto", "bfc", "cuda_async", "platform"] = "auto"
    """bfc: XLA's pool; cuda_async: the driver's; platform: none, every buffer by itself."""

    def __post_init__(self) -> None:
        check_fields(self)
        require(
            self.pool_fraction is None or 0 < self.pool_fraction <= 1,
            f"pool_fraction={self.pool_fraction} must be above 0 and at most 1.",
        )
        sized = self.pool_fraction is not None
        require(
            self.allocator != "platform" or not (sized or self.preallocate),
            "allocator=platform has no pool, so neither a --pool-fraction nor --preallocate; leave "
            "them out, or use --allocator=bfc.",
        )
        require(
            self.allocator != "cuda_async" or not sized or self.preallocate is not False,
            "allocator=cuda_async has no limit, and takes a pool_fraction only to preallocate it; "
            "leave out --no-preallocate or --pool-fraction, or use --allocator=bfc.",
        )

    @property
    def flags(self) -> list[str]:
        """The flags that ask for something other than JAX's own ways."""
        flags = []
        if self.pool_fraction is not None:
            flags.append(f"--pool-fraction={self.pool_fraction:g}")
        if self.preallocate is not None:
            flags.append("--preallocate" if self.preallocate else "--no-preallocate")
        if self.allocator != "auto":
            flags.append(f"--allocator={self.allocator}")
        return flags


@dataclass(frozen=True, kw_only=True)
class RecoveryConfig:
    """What a run saves, and what it does when something goes wrong."""

    checkpoint_every: int | None = None
    """Steps between checkpoints, beside the one at the end and the one of a run that is stopped;
    by default a tenth of all steps, at most 1000; 0: no others."""
    keep: int = 2
    """Newest checkpoints kept, beside the one with the lowest validation loss."""
    checkpoint_copy: bool = True
    """Copy the state into the host's memory and write it while training goes on; without, it is
    written piece by piece while training waits."""
    on_save_error: Literal["continue", "stop"] = "continue"
    """When a checkpoint cannot be written: go on and try again at the next one, or end the run."""
    resume: Literal["auto", "never", "must"] = "auto"
    """Go on from the newest whole checkpoint in --out: if there is one, never, or refuse to start
    without."""
    stop_after: int = 0
    """End after so many steps of this start, saved and ready to go on; 0: after all of --steps."""
    max_bad_steps: int = 3
    """Steps in a row whose loss or gradient is not finite, and which are left out, before the run
    ends."""

    def __post_init__(self) -> None:
        check_fields(
            self, positive="keep max_bad_steps", non_negative="checkpoint_every stop_after"
        )


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
    pool: PoolConfig = field(default_factory=PoolConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    data: DataConfig = field(default_factory=DataConfig)
    recovery: RecoveryConfig = field(default_factory=RecoveryConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    steps: int = 1000
    """Optimiser steps."""
    seed: int = 0
    """Decides the initial weights, the order of the data and the stochastic rounding."""
    eval_every: int = 0
    """Steps between evaluations on held-out text; 0: only after the last step."""
    out: str = ""
    """Folder for config.json, metrics.jsonl, memory.json, TensorBoard events and checkpoints/; by
    default a new one under runs/."""
    deterministic: bool = False
    """Use only such GPU kernels as give the same bits every time (a CPU's do)."""
    force: bool = False
    """Start a run that cannot fit into memory or on the disk, or resume one with other settings
    than it was begun with, all the same."""
    dry_run: bool = False
    """Check everything, compile, report, and stop before the first step."""

    def __post_init__(self) -> None:
        check_fields(self, positive="devices steps", non_negative="seed eval_every")
        require(self.seed < 2**32, f"seed={self.seed} must be below 2**32.")
