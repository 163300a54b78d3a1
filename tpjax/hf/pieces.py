"""One parameter from a file to its shards and back, a piece at a time.

Each device's slice of a piece is read from the file as it lies there; its dimensions are put in
order, and its numbers in the format of the run, on the device.

Letters: as everywhere; V the vocabulary with padding rows, S shards of V.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tpjax import quant
from tpjax.architecture import ModelConfig
from tpjax.hf.names import Stored, letters_of
from tpjax.hf.tensors import Index
from tpjax.layers import in_blocks
from tpjax.quant import Quantised

PIECE_BYTES = 16 * 2**20  # of a table's rows in float32

Read = Callable[[Index], np.ndarray]
Write = Callable[[Index, np.ndarray], None]
Span = tuple[int, int]  # from, to


class Parameter:
    """The parameter at a path of the state, and how a file has it.

    Args:
        like: its abstract array or `Quantised`, stacked over layers under blocks.
    """

    def __init__(self, path: str, stored: Stored, like: Any, model: ModelConfig, mesh: Mesh):
        self._stored, self._like, self._model, self._mesh = stored, like, model, mesh
        self._name, self._letters = path.rpartition(".")[2], letters_of(path)
        self._order = "".join(stored.dims)  # of the letters in the file
        self._stacked = path.startswith("blocks.")
        spec = jax.tree.leaves(like)[0].sharding.spec
        spec = (*spec, *[None] * (len(like.shape) - len(spec)))
        self._axes = dict(zip(self._letters, spec[self._stacked :], strict=True))
        self._sizes = dict(zip(self._letters, like.shape[self._stacked :], strict=True))

    def assemble(self, tensors: Sequence[Read]) -> Array | Quantised:
        """The parameter on the mesh.

        Args:
            tensors: one for each layer, or one; each reads a slice of its tensor.
        """
        if self._stacked:
            return self._fill(len(tensors), self._put_layer, lambda n: self._layer(tensors[n]))
        if self._letters[0] == "V":
            read = tensors[0]
            return self._fill(self._row_parts, self._put_rows, lambda n: self._rows(read, n))
        return self._run(self._store)(self._layer(tensors[0]))

    def write(self, value: Array | Quantised, dtype: Any, tensors: Sequence[Write]) -> None:
        """`assemble` the other way: each shard to its place in a file, without padding; those
        that are there several times once.

        Args:
            tensors: one for each layer, or one; each writes a slice of its tensor.
        """

        def load(value: Array | Quantised) -> Array:
            order = [self._letters.index(letter) for letter in self._order]
            return jnp.transpose(quant.value(value, dtype), order)

        def load_layer(stack: Array | Quantised, number: Array) -> Array:
            return load(jax.tree.map(partial(jax.lax.dynamic_index_in_dim, index=number, axis=0,
                                             keepdims=False), stack))  # fmt: skip

        with jax.set_mesh(self._mesh):
            load, load_layer = jax.jit(load), jax.jit(load_layer)
            for number, write in enumerate(tensors):
                whole = load_layer(value, np.int32(number)) if self._stacked else load(value)
                for shard in whole.addressable_shards:
                    if shard.replica_id == 0:
                        self._write(shard, whole.shape, write)

    def _write(self, shard: Any, shape: tuple[int, ...], write: Write) -> None:
        ends = (s.indices(n)[:2] for s, n in zip(shard.index, shape, strict=True))
        spans = dict(zip(self._order, ends, strict=True))
        if "V" in spans:
            first, last = spans["V"]
            spans["V"] = (first, max(min(last, self._model.vocab_size), first))
        count = spans[self._order[0]][1] - spans[self._order[0]][0]
        index = self._index(spans)
        values = np.asarray(shard.data)[:count]
        write(index, values.reshape([part.stop - part.start for part in index]))

    def _fill(self, count: int, put: Callable, piece: Callable[[int], Array]) -> Array | Quantised:
        """All pieces put into one array, in place."""
        whole, put = self._run(self._zeros)(), self._run(put, donate_argnums=0)
        for number in range(count):  # waits, so that one piece is there at a time
            whole = jax.block_until_ready(put(whole, piece(number), np.int32(number)))
        return whole

    def _run(self, function: Callable, **options) -> Callable:
        shardings = jax.tree.map(lambda leaf: leaf.sharding, self._like)
        compiled = jax.jit(function, out_shardings=shardings, **options)

        def run(*args):
            with jax.set_mesh(self._mesh):
                return compiled(*args)

        return run

    def _zeros(self) -> Array | Quantised:
        def zeros(leaf: Any) -> Array:
            return jnp.zeros(leaf.shape, leaf.dtype, out_sharding=leaf.sharding.spec)

        return jax.tree.map(zeros, self._like)

    def _store(self, value: Array) -> Array | Quantised:
        """A layer's part, or rows of a table, as the run keeps it."""
        value = jnp.transpose(value, [self._order.index(letter) for letter in self._letters])
        if isinstance(self._like, Quantised):
            value = value.astype(jnp.float32)
            return in_blocks(self._model, self._name, value, self._like.bits)
        return value.astype(self._like.dtype)

    def _put_layer(self, stack: Any, value: Array, number: Array) -> Any:
        def put(all: Array, one: Array) -> Array:
            return jax.lax.dynamic_update_index_in_dim(all, one, number, axis=0)

        return jax.tree.map(put, stack, self._store(value))

    def _put_rows(self, table: Any, rows_SRD: Array, number: Array) -> Any:
        """Rows of every shard of V, put where they belong."""
        S, R, D = rows_SRD.shape
        V_axes = self._axes["V"]

        def put(all: Array, new: Array) -> Array:
            columns, parts = jax.typeof(all).sharding.spec[1], all.shape[0] // (S * R)
            split, wide = P(V_axes, None, None, columns), (S, parts, R, all.shape[1])
            dealt = jax.lax.reshape(all, wide, out_sharding=split)
            new = jax.lax.reshape(new, (S, R, all.shape[1]), out_sharding=P(V_axes, None, columns))
            dealt = jax.lax.dynamic_update_index_in_dim(dealt, new, number, axis=1)
            return jax.lax.reshape(dealt, all.shape, out_sharding=P(V_axes, columns))

        rows = jax.lax.reshape(rows_SRD, (S * R, D), out_sharding=P(V_axes, self._axes["D"]))
        return jax.tree.map(put, table, self._store(rows))

    def _layer(self, tensor: Read) -> Array:
        """A whole tensor, laid out as the parameter is, its dimensions as in the file."""
        shape = tuple(self._sizes[letter] for letter in self._order)
        spec = P(*(self._axes[letter] for letter in self._order))

        def read(spans: Sequence[Span]) -> np.ndarray:
            return self._read(tensor, dict(zip(self._order, spans, strict=True)))

        return self._place(shape, spec, read)

    def _rows(self, tensor: Read, number: int) -> Array:
        """Part `number` of the rows of each shard, [S, R, D]; padding is zero."""
        V, D = self._sizes["V"], self._sizes["D"]
        S = self._shards("V")
        R = V // S // self._row_parts

        def read(spans: Sequence[Span]) -> np.ndarray:
            (shard, end), _, columns = spans
            return np.stack([rows(s * (V // S) + number * R, columns) for s in range(shard, end)])

        def rows(first: int, columns: Span) -> np.ndarray:
            count = max(min(first + R, self._model.vocab_size) - first, 0)
            start = min(first, self._model.vocab_size - 1)  # one row also where all is padding
            found = self._read(tensor, {"V": (start, start + max(count, 1)), "D": columns})
            padded = np.zeros((R, found.shape[1]), found.dtype)
            padded[:count] = found[:count]
            return padded

        return self._place((S, R, D), P(self._axes["V"], None, self._axes["D"]), read)

    @property
    def _row_parts(self) -> int:
        """The fewest equal parts of a shard's rows that are small enough in all shards."""
        rows, row_bytes = self._sizes["V"] // self._shards("V"), self._sizes["D"] * 4
        most = max(PIECE_BYTES // (row_bytes * self._shards("V")), 1)
        return next(n for n in range(1, rows + 1) if rows % n == 0 and rows // n <= most)

    def _shards(self, letter: str) -> int:
        axes = self._axes[letter]
        names = (axes,) if isinstance(axes, str) else axes or ()
        return math.prod(self._mesh.shape[name] for name in names)

    def _place(
        self, shape: tuple[int, ...], spec: P, read: Callable[[Sequence[Span]], np.ndarray]
    ) -> Array:
        """An array of which each device gets its slice; one is read once for all that share it."""
        there: dict[tuple[Span, ...], np.ndarray] = {}

        def local(index: Index | None) -> np.ndarray:
            assert index is not None  # every device has a part
            spans = tuple(s.indices(n)[:2] for s, n in zip(index, shape, strict=True))
            if spans not in there:
                there[spans] = read(spans)
            return there[spans]

        return jax.make_array_from_callback(shape, NamedSharding(self._mesh, spec), local)

    def _read(self, tensor: Read, spans: dict[str, Span]) -> np.ndarray:
        """What a file has between the spans of each letter, in the file's order."""
        found = tensor(self._index(spans))
        found = found.astype(np.float32) if found.dtype == np.float64 else found
        return found.reshape([spans[letter][1] - spans[letter][0] for letter in self._order])

    def _index(self, spans: dict[str, Span]) -> Index:
        """Where that is in the tensor; of letters put together only the first is in shards."""
        index, sizes = [], self._model.sizes
        for number, (first, *others) in enumerate(self._stored.dims):
            width = math.prod(sizes[letter] for letter in others)
            offset = 0
            if number == len(self._stored.dims) - 1:
                offset = self._stored.part * sizes[first] * width
            start, stop = spans[first]
            index.append(slice(offset + start * width, offset + stop * width))
        return tuple(index)
