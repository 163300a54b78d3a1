"""Adapters (LoRA, arXiv:2106.09685): put into the weights beside which they were trained, or
written by themselves as PEFT reads them.

Letters: A adapter rank, L layers; otherwise as everywhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, reshard
from jax.sharding import PartitionSpec as P

from tpjax import quant
from tpjax.architecture import ModelConfig
from tpjax.checks import ConfigError, require
from tpjax.hf.names import letters_of, table
from tpjax.quant import Quantised

_PREFIX = "base_model.model."  # of PEFT's names


def merged(
    model: ModelConfig, mesh: Mesh, adapters: Mapping[str, Any], base: Iterable[tuple[str, Any]]
) -> Iterator[tuple[str, Array | Quantised]]:
    """`base`, path by path, with W + A B · alpha / rank in float32 where there is an adapter."""
    for path, value in base:
        name = path.rpartition(".")[2]
        if name not in model.adapted:
            yield path, value
            continue
        a, b = (adapters[adapter_path(path, part)] for part in "ab")
        inner, outer = (letters_of(f"{name}_{part}").replace("A", "") for part in "ab")
        equation = f"L{inner}A,LA{outer}->L{inner}{outer}"
        scale = model.lora.scale

        @jax.jit
        def add(value: Any, a: Array, b: Array, equation=equation, scale=scale) -> Array:
            a, b = reshard(a, P()), reshard(b, P())
            spec = jax.typeof(jax.tree.leaves(value)[0]).sharding.spec
            delta = jnp.einsum(equation, a, b, precision="highest", out_sharding=spec) * scale
            return quant.value(value, jnp.float32) + delta

        with jax.set_mesh(mesh):
            yield path, add(value, a, b)


def adapter_path(path: str, part: str) -> str:
    """blocks.attention.q, a → blocks.attention.adapters.weights.q_a."""
    parent, _, name = path.rpartition(".")
    return f"{parent}.adapters.weights.{name}_{part}"


def save_adapters(model: ModelConfig, adapters: Mapping[str, Any], folder: Path) -> None:
    """Writes adapter_model.safetensors and adapter_config.json into a new folder.

    Raises:
        ConfigError: the folder is there, or the model's projections are put together in its
            own files (GPT-2's q, k and v), so that PEFT has no such adapters.
    """
    from safetensors.numpy import save_file

    require(
        model.rope is not None,
        f"{model.name} keeps q, k and v in one tensor, for which PEFT has no adapters of their "
        "own; export it merged.",
    )
    tensors, modules, rank = {}, set(), model.lora.lora_rank
    for path, stored in table("llama").items():
        name = path.rpartition(".")[2]
        if name not in model.adapted:
            continue
        modules.add(stored.name.rsplit(".", 2)[1])
        # [in, A] and [A, out], each turned around as torch has it.
        for part, peft, shape in (("a", "lora_A", (-1, rank)), ("b", "lora_B", (rank, -1))):
            stack = np.asarray(adapters[adapter_path(path, part)], np.float32)
            for layer, weight in enumerate(stack):
                tensor = stored.name.format(layer).replace(".weight", f".{peft}.weight")
                tensors[_PREFIX + tensor] = np.ascontiguousarray(weight.reshape(shape).T)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.folder,
        "r": rank,
        "lora_alpha": model.lora.lora_alpha,
        "target_modules": sorted(modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    try:
        folder.mkdir(parents=True)
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}.") from error
