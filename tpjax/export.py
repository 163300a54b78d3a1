"""A run's newest checkpoint as a folder that transformers loads."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from tpjax import lora
from tpjax.checkpoint import choose
from tpjax.checks import ConfigError, require
from tpjax.config import MeshConfig
from tpjax.folder import CHECKPOINTS
from tpjax.hf.load import Weights
from tpjax.hf.save import save
from tpjax.inference import NO_BASE
from tpjax.mesh import make_mesh, start_devices
from tpjax.restore import Restoration
from tpjax.resume import settings_of
from tpjax.tokenizer import load_tokenizer


def export(
    out: Path,
    to: Path,
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto",
    *,
    adapters: bool = False,
) -> list[str]:
    """Writes config, weights and tokenizer; returns what is to be said of it, a line each.

    One device reads one parameter of all layers after the other.

    Args:
        out: a run's folder.
        to: a new folder.
        dtype: of the weights; auto is as the run keeps them, and bf16 for int8 and nf4.
        adapters: write those by themselves, in float32, as PEFT reads them.

    Raises:
        ConfigError: there is no whole checkpoint, or the folder cannot be written.
    """
    checkpoint = choose(out / CHECKPOINTS, "must")
    assert checkpoint is not None  # there must be one
    config = dataclasses.replace(settings_of(checkpoint), mesh=MeshConfig(), devices=1)
    kept = config.memory.params
    dtype = ("bf16" if kept in ("int8", "nf4") else kept) if dtype == "auto" else dtype
    mesh = make_mesh(MeshConfig(), config.model, start_devices(1)[:1])
    notes = [*checkpoint.skipped, f"{checkpoint.path} → {to}, {dtype}"]
    try:
        tokenizer = load_tokenizer(config)
    except ConfigError as error:
        tokenizer = None
        notes.append(f"without a tokenizer: {error}")
    if config.data.tokenizer == "bytes":
        notes.append("without a tokenizer: the model reads bytes, and 256 ends a text")

    stops = [] if tokenizer is None else sorted(tokenizer.stop_tokens)
    tokens = {
        "bos_token_id": None if tokenizer is None else tokenizer.begin_of_text,
        "eos_token_id": stops[0] if len(stops) == 1 else stops or None,
    }

    def beside(folder: Path) -> None:
        if tokenizer is not None:
            tokenizer.save(folder)

    require(not to.exists(), f"{to} is there already; name a new folder.")
    parameters = Restoration(checkpoint, config, mesh).parameters()
    if adapters:
        require(bool(config.model.adapted), f"{checkpoint.path} has no adapters.")
        lora.save_adapters(config.model, dict(parameters), to)
        return [*checkpoint.skipped, f"adapters of {checkpoint.path} → {to}"]
    if config.model.adapted:
        require(bool(config.model.folder), NO_BASE.format(checkpoint.path))
        notes.append(f"adapters merged into {config.model.folder} in {kept}, as they were trained")
        base = Weights(config, mesh).units()
        parameters = lora.merged(config.model, mesh, dict(parameters), base)
    save(config.model, mesh, parameters, to, dtype, tokens=tokens, beside=beside)
    return notes
