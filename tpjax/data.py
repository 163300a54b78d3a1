"""Text → tokens → batches that can be made again from their number alone.

Documents are put end to end with an end-of-text token after each (packing) and
cut into windows of T tokens. Letters: B batch, T sequence.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from tpjax.config import ConfigError, DataConfig, TrainConfig
from tpjax.sharding import activation_spec
from tpjax.state import Batch
from tpjax.tokenizer import Tokenizer

SUFFIXES = (".txt", ".py", ".md", ".jsonl", ".parquet")
VALIDATION_SHARE = 10  # the last tenth of the text is held out …
MAX_VALIDATION_TOKENS = 131_072  # … or this much of it, so that evaluation stays quick
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib"})


@dataclass(frozen=True)
class Corpus:
    """Token ids to train on and, from the end of the text, to validate on."""

    train: np.ndarray
    validation: np.ndarray

    @property
    def fingerprint(self) -> str:
        """Tells whether two corpora are the same tokens."""
        crc = 0
        for tokens in (self.train, self.validation):
            crc = zlib.crc32(np.ascontiguousarray(tokens).data, crc)
        return f"{len(self.train)} + {len(self.validation)} tokens, CRC-32 {crc:08x}"


def load_corpus(config: TrainConfig, tokenizer: Tokenizer) -> Corpus:
    """All documents of the corpus as tokens, split.

    Raises:
        ConfigError: a file is missing, unreadable or not UTF-8, or there is too
            little text for one sequence.
    """
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    end = [] if tokenizer.end_of_text is None else [tokenizer.end_of_text]
    pieces = []
    for document in _documents(config.data):
        pieces += [tokenizer.encode(document).astype(dtype), np.array(end, dtype)]
    tokens = np.concatenate(pieces) if pieces else np.zeros(0, dtype)
    held_out = min(len(tokens) // VALIDATION_SHARE, MAX_VALIDATION_TOKENS)
    corpus = Corpus(tokens[: len(tokens) - held_out], tokens[len(tokens) - held_out :])
    needed = config.data.seq_len + 1
    if len(corpus.train) < needed or len(corpus.validation) < 2:
        raise ConfigError(
            f"corpus {' '.join(config.data.corpus)} has {len(tokens)} tokens; seq_len="
            f"{config.data.seq_len} needs {max(needed * 10 // 9 + 1, 20)} or more: add text or "
            "shorten --seq-len."
        )
    return corpus


def _documents(data: DataConfig) -> Iterator[str]:
    for name in data.corpus:
        path = Path(sysconfig.get_path("stdlib") if name == "stdlib" else name)
        if not path.exists():
            raise ConfigError(f"corpus {name} does not exist.")
        if path.is_file():
            yield from _read(path)
            continue
        stdlib = name == "stdlib"
        files = (
            _files(path, (".py",), _NOT_LIBRARY) if stdlib else _files(path, SUFFIXES, frozenset())
        )
        if not files:
            raise ConfigError(f"corpus {name} holds no {', '.join(SUFFIXES)} file.")
        for file in files:
            yield from _read(file)


def _files(folder: Path, suffixes: tuple[str, ...], skip: frozenset[str]) -> list[Path]:
    """The folder's text files, in an order that mixes its parts and never changes."""
    inside, files = folder.resolve(), []
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if name not in skip]
        paths = (Path(parent, name) for name in names)
        files += [path for path in paths if path.suffix in suffixes and path.is_file()]
    files = [path for path in files if path.resolve().is_relative_to(inside)]
    return sorted(
        files, key=lambda p: hashlib.sha256(p.relative_to(folder).as_posix().encode()).digest()
    )


def _read(path: Path) -> Iterator[str]:
    """The documents of one file."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"corpus {path} is none of {', '.join(SUFFIXES)}.")
    try:
        if path.suffix == ".parquet":
            yield from _read_parquet(path)
        elif path.suffix == ".jsonl":
            with path.open(encoding="utf-8") as lines:
                texts = (_json_text(path, i, x) for i, x in enumerate(lines, 1) if x.strip())
                yield from filter(None, texts)
        elif text := path.read_text(encoding="utf-8"):
            yield text
    except UnicodeDecodeError as error:
        raise ConfigError(f"corpus {path} is not UTF-8 text; convert it first.") from error
    except OSError as error:
        raise ConfigError(f"corpus {path} cannot be read: {error.strerror or error}.") from error


def _json_text(path: Path, number: int, line: str) -> str:
    try:
        text = json.loads(line)["text"]
    except (ValueError, KeyError, TypeError):
        text = None
    if not isinstance(text, str):
        raise ConfigError(f'corpus {path} line {number} is not a JSON object with a "text" string.')
    return text


def _read_parquet(path: Path) -> Iterator[str]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        if "text" not in file.schema_arrow.names:
            raise ConfigError(f'corpus {path} has no "text" column.')
        for rows in file.iter_batches(columns=["text"]):
            yield from (str(text) for text in rows.column(0).to_pylist() if text)
    except pyarrow.ArrowException as error:
        raise ConfigError(f"corpus {path} is not a Parquet file: {error}.") from error


@dataclass(frozen=True)
class TrainBatches:
    """Batch number → rows. Every epoch visits all windows in a new order and starts
    them at a new offset, both a function of the seed and the epoch.

    Attributes:
        shift: sequences read before batch 0 would start: not 0 where a run goes on with
            batches of another size.
    """

    tokens: np.ndarray
    batch_size: int
    seq_len: int
    seed: int
    shift: int = 0

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
        window = self.tokens[np.array(starts)[:, None] + np.arange(T + 1)].astype(np.int32)
        return window[:, :-1], window[:, 1:], np.ones((self.batch_size, T), bool)


@lru_cache(maxsize=2)  # a batch touches at most two epochs, unless the corpus is tiny
def _epoch(seed: int, epoch: int, windows: int, T: int, length: int) -> tuple[int, np.ndarray]:
    rng = np.random.default_rng([seed, epoch])
    offset = int(rng.integers(min(T, length - windows * T)))
    return offset, rng.permutation(windows)


@dataclass(frozen=True)
class EvalBatches:
    """All held-out tokens once, in order; what is missing of the last batch is not valid."""

    tokens: np.ndarray
    batch_size: int
    seq_len: int

    def __len__(self) -> int:
        return -(-(len(self.tokens) - 1) // (self.seq_len * self.batch_size))

    def rows(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """tokens_BT, targets_BT, valid_BT of batch `number`, below `len`."""
        size = self.batch_size * self.seq_len
        piece = self.tokens[number * size : (number + 1) * size + 1].astype(np.int32)
        count = len(piece) - 1
        tokens, targets, valid = np.zeros(size, np.int32), np.zeros(size, np.int32), np.arange(size)
        tokens[:count], targets[:count] = piece[:-1], piece[1:]
        shape = (self.batch_size, self.seq_len)
        return tokens.reshape(shape), targets.reshape(shape), (valid < count).reshape(shape)


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
