"""Parameters as a folder that transformers loads.

The files are made at their full size first, and each shard is written to its place in them as
it comes off its device: beside the shards no whole tensor is ever there.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from jax.sharding import Mesh

from tpjax.architecture import ModelConfig
from tpjax.checks import ConfigError, require
from tpjax.hf.config import family_of
from tpjax.hf.families import Family, write_config
from tpjax.hf.files import read_json
from tpjax.hf.model import CONFIG, gguf_file, read_model
from tpjax.hf.names import table
from tpjax.hf.pieces import Parameter
from tpjax.hf.tensors import INDEX, SINGLE, Index
from tpjax.precision import DTYPES

MAX_FILE_BYTES = 4 * 2**30
_KINDS = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}  # in safetensors
_HEADER_ROUND = 8  # bytes to which a header is filled up


def save(
    model: ModelConfig,
    mesh: Mesh,
    parameters: Iterable[tuple[str, Any]],
    folder: Path,
    dtype: str,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    tokens: Mapping[str, Any] = MappingProxyType({}),
    beside: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Writes config.json and the weights into a new folder, which gets its name when all of it
    is there.

    Args:
        parameters: path in the state and array, one after the other, so that not all of them
            have to be there at once.
        dtype: fp32, bf16 or fp16; rounded to the nearest value of it.
        max_file_bytes: of a file with more than one tensor; more than one file get an index.
        tokens: what config.json is to say of special tokens, where it does not come with the
            model and say it already.
        beside: writes other files into the folder, which it gets, before that has its name.

    Raises:
        ConfigError: the folder is there already or cannot be written, the disk has no room, or
            transformers has no such model.
    """
    settings, family = _settings(model, dtype)
    settings = {**tokens, **settings}
    files = _Files(model, family, dtype, max_file_bytes)
    require(not folder.exists(), f"{folder} is there already; name a new folder.")
    part = None
    try:
        folder.absolute().parent.mkdir(parents=True, exist_ok=True)
        part = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.absolute().parent))
        part.chmod(0o755)
        free = shutil.disk_usage(part).free
        require(
            free > files.total_bytes,
            f"{folder} needs {files.total_bytes:,} bytes, and the disk has {free:,}; make room or "
            "name a folder elsewhere.",
        )
        files.create(part)
        for path, value in parameters:
            stored = table(family)[path]
            parameter = Parameter(path, stored, value, model, mesh)
            tensors = [partial(files.write, name) for name in stored.tensors(model.num_layers)]
            parameter.write(value, DTYPES[dtype], tensors)
            del value, parameter  # before the next is made
        files.close()
        (part / CONFIG).write_text(json.dumps(settings, indent=2) + "\n")
        beside(part)
        part.rename(folder.absolute())
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}.") from error
    finally:
        if part is not None:
            shutil.rmtree(part, ignore_errors=True)


def _settings(model: ModelConfig, dtype: str) -> tuple[dict[str, Any], Family]:
    """The config.json that the model came with, or one made for it; and its family."""
    source = Path(model.folder)
    if _describes(source, model):
        settings, family = read_json(source, CONFIG), family_of(source)
    else:
        settings = write_config(model)
        family = settings["model_type"]
    key = "dtype" if "dtype" in settings else "torch_dtype"  # newer and older transformers
    settings |= {"tie_word_embeddings": model.tie_embeddings, key: DTYPES[dtype].name}
    return settings, family


def _describes(source: Path, model: ModelConfig) -> bool:
    """Whether the folder that a model came from is there and still says the same of it."""
    if not model.folder or not source.exists() or gguf_file(source) is not None:
        return False
    try:
        found = read_model(model.folder)
    except ConfigError:
        return False
    ours = {"name": model.name, "tie_embeddings": model.tie_embeddings, "lora": model.lora}
    return replace(found, **ours) == model


def _tensors(model: ModelConfig, family: Family) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each tensor, layer by layer."""
    has = {
        "head": not model.tie_embeddings,
        # GPT-2 has all of these; one without them has zeros there.
        **{f"{name}_bias": family == "gpt2" or model.qkv_bias for name in "qkv"},
        "o_bias": family == "gpt2" or model.o_bias,
        **dict.fromkeys(("gate_bias", "up_bias", "down_bias"), family == "gpt2" or model.mlp_bias),
        **dict.fromkeys(("q_gain", "k_gain"), model.qk_norm),
    }
    places = {p: s for p, s in table(family).items() if has.get(p.rpartition(".")[2], True)}
    for layer in (None, *range(model.num_layers)):
        for path, stored in places.items():
            if path.startswith("blocks.") == (layer is not None) and stored.part == 0:
                yield stored.name.format(layer), stored.shape(model)


class _Files:
    """The safetensors files of a model: header and numbers of each tensor one after the other,
    as https://huggingface.co/docs/safetensors describes."""

    def __init__(self, model: ModelConfig, family: Family, dtype: str, max_file_bytes: int):
        self._dtype, self._kind = DTYPES[dtype], _KINDS[dtype]
        self._shapes = dict(_tensors(model, family))
        self.total_bytes, self._groups = 0, [[]]
        filled = 0
        for name in self._shapes:
            size = self._bytes(name)
            if self._groups[-1] and filled + size > max_file_bytes:
                self._groups.append([])
                filled = 0
            self._groups[-1].append(name)
            filled += size
            self.total_bytes += size
        self._maps: dict[str, np.ndarray] = {}

    def _bytes(self, name: str) -> int:
        return int(np.prod(self._shapes[name])) * self._dtype.itemsize

    def create(self, folder: Path) -> None:
        """Makes the files, full of zeros."""
        count, where = len(self._groups), {}
        for number, names in enumerate(self._groups, 1):
            file = SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
            self._create(folder / file, names)
            where |= dict.fromkeys(names, file)
        if count > 1:
            index = {"metadata": {"total_size": self.total_bytes}, "weight_map": where}
            (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")

    def _create(self, path: Path, names: list[str]) -> None:
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in names:
            start, end = end, end + self._bytes(name)
            shape = list(self._shapes[name])
            header[name] = {"dtype": self._kind, "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % _HEADER_ROUND)
        first = 8 + len(text)
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            os.posix_fallocate(file.fileno(), first, max(end, 1))
            file.truncate(first + end)
        whole = np.memmap(path, np.uint8, mode="r+", offset=first, shape=max(end, 1))
        for name in names:  # one map for all of them: each takes a file descriptor
            part = whole[slice(*header[name]["data_offsets"])]
            self._maps[name] = part.view(self._dtype).reshape(self._shapes[name])

    def write(self, name: str, index: Index, values: np.ndarray) -> None:
        """A slice of a tensor to its place.

        Raises:
            ConfigError: a weight is too large for the format.
        """
        require(
            self._dtype != DTYPES["fp16"] or bool(np.isfinite(values).all()),
            f"{name} has weights that fp16 cannot hold; use bf16 or fp32.",
        )
        self._maps[name][index] = values

    def close(self) -> None:
        """Lets go of the files; what is not on the disk yet the system writes."""
        self._maps.clear()
