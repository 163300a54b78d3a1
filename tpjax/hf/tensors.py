"""The tensors of a model folder, read slice by slice from the mapped files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tpjax.checks import ConfigError, require, shown
from tpjax.hf.files import inside, read_json

Index = tuple[slice, ...]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class Tensor:
    """What a file says of a tensor: its shape, and its kind of numbers (F32, BF16, Q8_0, …)."""

    shape: tuple[int, ...]
    kind: str


class Source(Protocol):
    """Tensors by their Hugging Face names.

    Attributes:
        path: what to call it in an error.
        tensors: all there are.
    """

    path: Path
    tensors: dict[str, Tensor]

    def read(self, name: str, index: Index) -> np.ndarray:
        """A slice of a tensor with steps of 1, as numbers of its own kind or as float32."""
        ...


class Safetensors:
    """The `.safetensors` of a folder: one file, or the shards of an index.

    Raises:
        ConfigError: there are none, a shard or a tensor of the index is missing, a file is not
            whole or has numbers that are no weights.
    """

    def __init__(self, folder: Path):
        self.path = folder
        self.tensors: dict[str, Tensor] = {}
        self._files: dict[str, Any] = {}  # by tensor
        single, index = inside(folder, SINGLE), inside(folder, INDEX)
        if single.exists():
            self._open(single)
        elif index.exists():
            self._open_shards(index)
        else:
            others = any(folder.glob("*.bin")) or any(folder.glob("*.pt*"))
            raise ConfigError(
                f"{folder} has neither {SINGLE} nor {INDEX}"
                + ("; save its weights as safetensors, pickles are not read." if others else
                   "; to train from random weights name its config.json as --model.")
            )  # fmt: skip

    def read(self, name: str, index: Index) -> np.ndarray:
        return self._files[name].get_slice(name)[index]

    def _open_shards(self, index: Path) -> None:
        where = read_json(self.path, index.name).get("weight_map")
        require(
            isinstance(where, dict) and all(isinstance(name, str) for name in where.values()),
            f"{index} has no weight_map from tensors to files.",
        )
        assert isinstance(where, dict)
        for name in sorted(set(where.values())):
            path = inside(self.path, name)
            require(path.exists(), f"{path}, which {index.name} names, is missing.")
            self._open(path)
        for tensor, name in where.items():
            found = tensor in self.tensors and self._files[tensor].name == name
            require(found, f"{index} has tensor {shown(tensor)} in {name}, where it is not.")
        for tensor in self.tensors.keys() - where.keys():
            raise ConfigError(f"{index} does not name tensor {shown(tensor)} of its files.")

    def _open(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            file = _File(path.name, safe_open(path, framework="numpy"))
            found = {name: file.get_slice(name) for name in file.open.keys()}  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ConfigError(
                f"{path} is not a whole safetensors file ({shown(str(error))}); fetch it again."
            ) from error
        for name, tensor in found.items():
            require(name not in self.tensors, f"{path}: tensor {shown(name)} is in two files.")
            kind = tensor.get_dtype()
            require(
                kind in _FLOATS,
                f"{path}: tensor {shown(name)} has numbers of kind {kind}; weights may be "
                f"{', '.join(_FLOATS)}.",
            )
            self.tensors[name] = Tensor(tuple(tensor.get_shape()), kind)
            self._files[name] = file


@dataclass(frozen=True)
class _File:
    name: str
    open: Any

    def get_slice(self, name: str) -> Any:
        return self.open.get_slice(name)
