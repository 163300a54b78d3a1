"""What `--model` names where it is no preset: a folder, its config.json alone, or a GGUF file."""

from __future__ import annotations

from pathlib import Path

from tpjax.architecture import ModelConfig
from tpjax.checks import require
from tpjax.hf import config, gguf
from tpjax.hf.families import Family
from tpjax.hf.files import inside
from tpjax.hf.tensors import Safetensors, Source

CONFIG = "config.json"


def read_model(name: str) -> ModelConfig:
    """The model at a path; its weights start at random where that is a config.json.

    Raises:
        ConfigError: it is no model that tpjax can compute.
    """
    path = Path(name)
    if path.name == CONFIG:
        return config.read_config(path, path.absolute().parent.name, "")
    file = gguf_file(path)
    if file is not None:
        return gguf.read_config(file)
    require(
        inside(path, CONFIG).exists(),
        f"model {path} has no {CONFIG} and is no GGUF file; name the folder that has one.",
    )
    return config.read_config(inside(path, CONFIG), path.absolute().name, name)


def open_model(folder: str) -> tuple[Source, Family]:
    """The tensors of `ModelConfig.folder`, and how they are named."""
    file = gguf_file(Path(folder))
    if file is not None:
        return gguf.GgufFile(file), "llama"
    return Safetensors(Path(folder)), config.family_of(Path(folder))


def gguf_file(path: Path) -> Path | None:
    """The GGUF file at a path, or the one in a folder without a config.json; or None."""
    if not path.is_dir():
        return path if path.suffix == ".gguf" else None
    if inside(path, CONFIG).exists():
        return None
    found = sorted(path.glob("*.gguf"))
    names = ", ".join(file.name for file in found)
    require(len(found) < 2, f"model {path} has several GGUF files ({names}); name one of them.")
    return inside(path, found[0].name) if found else None
