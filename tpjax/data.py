"""Tokens → batches that can be made again from their number alone.

Letters: B batch, T sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from tpjax.config import ConfigError
from tpjax.sharding import activation_spec
from tpjax.state import Batch


@dataclass(frozen=True)
class TrainBatches:
    """Batch number → rows. Every epoch visits all windows in a new order and starts
    them at a new offset, both a function of the seed and the epoch.

    Attributes:
        shift: sequences read before batch 0 would start: not 0 where a run goes on with
            batches of another size.
        counts: a bool for each token, whether it is to be predicted; None where all are.
    """

    tokens: np.ndarray
    batch_size: int
    seq_len: int
    seed: int
    shift: int = 0
    counts: np.ndarray | None = None

    def rows(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """tokens_BT, targets_BT, valid_BT of batch `number` (0, 1, …)."""
        T = self.seq_len
        windows = max((len(self.tokens) - 1) // T - 1, 1)
        starts = []
        first = self.shift + number * self.batch_size
        for row in range(first, first + self.batch_size):
            epoch, place = divmod(row, windows)
            offset, order = _epoch(self.seed, epoch, windows, T, len(self.tokens))
            starts.append(offset + int(order[place]) * T)
        places = np.array(starts)[:, None] + np.arange(T + 1)
        window = self.tokens[places].astype(np.int32)
        valid = np.ones((self.batch_size, T), bool)
        if self.counts is not None:
            valid = self.counts[places[:, 1:]]
        return window[:, :-1], window[:, 1:], valid


@lru_cache(maxsize=2)  # a batch touches at most two epochs, unless the corpus is tiny
def _epoch(seed: int, epoch: int, windows: int, T: int, length: int) -> tuple[int, np.ndarray]:
    rng = np.random.default_rng([seed, epoch])
    offset = int(rng.integers(min(T, length - windows * T)))
    return offset, rng.permutation(windows)


@dataclass(frozen=True)
class EvalBatches:
    """All held-out tokens once, in order; what is missing of the last batch, and what does not
    count, is not valid."""

    tokens: np.ndarray
    batch_size: int
    seq_len: int
    counts: np.ndarray | None = None

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // (self.seq_len * self.batch_size))

    def rows(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """tokens_BT, targets_BT, valid_BT of batch `number`, below `len`."""
        size = self.batch_size * self.seq_len
        piece = self.tokens[number * size : (number + 1) * size + 1].astype(np.int32)
        count = len(piece) - 1
        tokens, targets, valid = np.zeros(size, np.int32), np.zeros(size, np.int32), np.arange(size)
        tokens[:count], targets[:count] = piece[:-1], piece[1:]
        valid = valid < count
        if self.counts is not None:
            valid[:count] &= self.counts[number * size + 1 : number * size + 1 + count]
        shape = (self.batch_size, self.seq_len)
        return tokens.reshape(shape), targets.reshape(shape), valid.reshape(shape)


def check_rows(rows: tuple[np.ndarray, np.ndarray, np.ndarray], vocab_size: int, what: str) -> None:
    """Looks at token ids on the host: an embedding on a device would take any number.

    Args:
        rows: tokens_BT, targets_BT, valid_BT.
        what: what they are called in an error.

    Raises:
        ConfigError: one is outside the vocabulary.
    """
    for tokens in rows[:2]:
        wrong = (tokens < 0) | (tokens >= vocab_size)
        if wrong.any():
            row, place = map(int, np.argwhere(wrong)[0])
            raise ConfigError(
                f"{what}: token id {tokens[row, place]} at position {place} of sequence {row} is "
                f"outside the vocabulary of {vocab_size}; the tokenizer does not go with the model."
            )


def place(rows: tuple[np.ndarray, np.ndarray, np.ndarray], mesh: Mesh) -> Batch:
    """The rows on the mesh; a process hands over only what its devices hold."""
    sharding = NamedSharding(mesh, activation_spec("BT"))

    def put(array: np.ndarray) -> jax.Array:
        return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    return Batch(*map(put, rows))
