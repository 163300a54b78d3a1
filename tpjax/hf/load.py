"""A model folder's weights as the parameters of a run, checked before anything is read.

No host or device ever holds more of the model than its shards, beside one layer's part of one
parameter, or one part of a table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tpjax.checks import require, shown
from tpjax.config import TrainConfig
from tpjax.hf.model import open_model, read_model
from tpjax.hf.names import Stored, table
from tpjax.hf.pieces import Parameter
from tpjax.hf.tensors import Tensor
from tpjax.quant import is_quantised
from tpjax.state import abstract_state, leaf_name

# Buffers that some versions of transformers have saved beside the weights.
_NO_WEIGHTS = re.compile(r"\.rotary_emb\.inv_freq$|\.attn\.(masked_)?bias$")
# A model that was saved without its head lacks the first part of its names.
_BARE = re.compile(r"^(?:(embed_tokens|layers|norm)|(wte|wpe|h|ln_f))\.")
_EXACT_IN = {"fp32": ("F16", "BF16", "F32"), "bf16": ("BF16",)}
_PIECE = 2**22  # numbers compared at once


class Weights:
    """What of a folder goes where.

    Attributes:
        notes: what is to be said of it, a line each.

    Raises:
        ConfigError: a tensor is missing, left over or of another shape, or whether there is an
            output head of its own is not what the configuration says.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh):
        self._config, self._mesh, self._model = config, mesh, config.model
        self._source, family = open_model(config.model.folder)
        self._ties = read_model(config.model.folder).tie_embeddings
        state = abstract_state(config, mesh)
        base = state.frozen or state.params  # adapters are in no such folder
        units, self._structure = jax.tree.flatten_with_path(base, is_leaf=is_quantised)
        self._units = {leaf_name(keys): like for keys, like in units}
        known = table(family)
        self._places = {path: known[path] for path in self._units}
        self._names = {_full_name(name): name for name in self._source.tensors}
        twice = set(self._source.tensors) - set(self._names.values())
        require(
            not twice,
            f"{self._source.path} has tensor {shown(min(twice, default=''))} twice, with and "
            "without the first part of its name.",
        )
        self._check_head(known["head"], known["embedding"])
        self._check_tensors()
        self.notes = self._losses()

    def params(self) -> dict:
        """The parameters, on the devices."""
        return jax.tree.unflatten(self._structure, [value for _, value in self.units()])

    def units(self) -> Iterator[tuple[str, Any]]:
        """Path and array of each parameter, one after the other."""
        for path, like in self._units.items():
            yield path, self._unit(path, like)

    def _unit(self, path: str, like: Any) -> Any:
        stored = self._places[path]
        tensors = [partial(self._source.read, self._names[name]) for name in self._tensors(path)]
        return Parameter(path, stored, like, self._model, self._mesh).assemble(tensors)

    def _tensors(self, path: str) -> list[str]:
        return self._places[path].tensors(self._model.num_layers)

    def _tensor(self, name: str) -> Tensor:
        return self._source.tensors[self._names[name]]

    def _check_head(self, head: Stored, embedding: Stored) -> None:
        """Each way in which the settings and the tensors can disagree about the head."""
        there, tied, where = head.name in self._names, self._model.tie_embeddings, self._source.path
        if there and tied:
            require(
                self._same(head.name, embedding.name),
                f"{where} has a {head.name} other than its embedding, although one matrix is to "
                "be both; --no-tie-embeddings takes the two as they are.",
            )
        if not there and not tied:
            require(
                self._ties,
                f"{where} has no {head.name}, although its config does not tie the head to the "
                "embedding; --tie-embeddings does.",
            )
            self._places["head"] = embedding  # untied by this run: it starts with a copy

    def _same(self, *names: str) -> bool:
        """Whether two tensors are equal; read in pieces."""
        if not all(name in self._names for name in names):
            return False
        one, other = (self._tensor(name) for name in names)
        if one != other or len(one.shape) != 2:
            return False
        (V, D), rows = one.shape, max(_PIECE // one.shape[1], 1)
        for first in range(0, V, rows):
            piece = (slice(first, min(first + rows, V)), slice(0, D))
            some, others = (self._source.read(self._names[name], piece) for name in names)
            if not np.array_equal(some, others):
                return False
        return True

    def _check_tensors(self) -> None:
        """Every tensor is there in its shape, and none is left over."""
        where, left = self._source.path, set(self._names)
        for path, stored in self._places.items():
            wanted = stored.shape(self._model)
            for name in self._tensors(path):
                require(
                    name in self._names,
                    f"{where} has no tensor {name}, which the model of its config has; "
                    "fetch it again.",
                )
                shape = self._tensor(name).shape
                require(
                    shape == wanted,
                    f"{where}: tensor {name} has shape {list(shape)}, and its config makes it "
                    f"{list(wanted)}.",
                )
                left.discard(name)
        if self._model.tie_embeddings:
            left.discard("lm_head.weight")  # equal to the embedding
        more = sorted(name for name in left if not _NO_WEIGHTS.search(name))
        others = f" and {len(more) - 1} more" if len(more) > 1 else ""
        require(
            not more,
            f"{where} has tensor {shown(''.join(more[:1]))}{others}, which the model of its "
            "config lacks.",
        )

    def _losses(self) -> list[str]:
        """What weights lose on their way, if they do."""
        params = self._config.memory.params
        kinds = {self._tensor(name).kind for path in self._places for name in self._tensors(path)}
        lossy = sorted(kinds - set(_EXACT_IN.get(params, ())))
        if not lossy or params == "fp32":  # what is quantised in a file has float32 values
            return []
        return [f"weights of {self._source.path} are {', '.join(lossy)}, here rounded to {params}"]


def _full_name(name: str) -> str:
    bare = _BARE.match(name)
    if bare is None:
        return name
    return ("model." if bare.group(1) else "transformer.") + name
