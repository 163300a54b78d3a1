"""Text files → tokens, end to end, and which of them are to be learned.

Documents are put end to end, each between the tokens that begin and end a text (packing). A
conversation is put into words by the model's chat template; of it the answers are learned.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tpjax.config import ConfigError, DataConfig, TrainConfig, require
from tpjax.tokenizer import Tokenizer

SUFFIXES = (".txt", ".py", ".md", ".jsonl", ".parquet")
VALIDATION_SHARE = 10  # the last tenth of the text is held out …
MAX_VALIDATION_TOKENS = 131_072  # … or this much of it, so that evaluation stays quick
_NOT_LIBRARY = frozenset({"site-packages", "dist-packages", "test", "tests", "idlelib"})


@dataclass(frozen=True)
class Corpus:
    """Token ids to train on and, from the end of the text, to validate on.

    Attributes:
        train_counts, validation_counts: a bool for each token, whether it is to be predicted;
            None where all are.
    """

    train: np.ndarray
    validation: np.ndarray
    train_counts: np.ndarray | None = None
    validation_counts: np.ndarray | None = None

    @property
    def fingerprint(self) -> str:
        """Tells whether two corpora are the same tokens, of which the same count."""
        crc = 0
        for part in (self.train, self.validation, self.train_counts, self.validation_counts):
            crc = crc if part is None else zlib.crc32(np.ascontiguousarray(part).data, crc)
        return f"{len(self.train)} + {len(self.validation)} tokens, CRC-32 {crc:08x}"


@dataclass(frozen=True)
class Document:
    """A text, or the messages of a conversation, and where it is from."""

    where: str
    content: str | list


def load_corpus(config: TrainConfig, tokenizer: Tokenizer) -> Corpus:
    """All documents of the corpus as tokens, split. Of conversations only the answers count.

    Raises:
        ConfigError: a file is missing, unreadable or not UTF-8, a conversation is none that
            the tokenizer's chat template takes, or there is too little text for one sequence
            or none that counts.
    """
    tokens, counts = read_tokens(config.data, tokenizer)
    held_out = min(len(tokens) // VALIDATION_SHARE, MAX_VALIDATION_TOKENS)
    parts = slice(0, len(tokens) - held_out), slice(len(tokens) - held_out, None)
    corpus = Corpus(*(tokens[part] for part in parts))
    name, needed = " ".join(config.data.corpus), config.data.seq_len + 1
    if len(corpus.train) < needed or len(corpus.validation) < 2:
        raise ConfigError(
            f"corpus {name} has {len(tokens)} tokens; seq_len={config.data.seq_len} needs "
            f"{max(needed * 10 // 9 + 1, 20)} or more: add text or shorten --seq-len."
        )
    if counts is None:
        return corpus
    of_parts = [counts[part] for part in parts]
    require(
        all(part[1:].any() for part in of_parts),
        f"corpus {name} has no answers to learn from, or none in its last tenth, which is held "
        "out; add conversations.",
    )
    return Corpus(corpus.train, corpus.validation, *of_parts)


def read_tokens(data: DataConfig, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray | None]:
    """The whole corpus as tokens, and which count, or None where all do."""
    dtype = np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32
    around = [
        np.array([] if token is None else [token], dtype)
        for token in (tokenizer.begin_of_text, tokenizer.end_of_text)
    ]
    pieces, counts = [np.zeros(0, dtype)], [np.zeros(0, bool)]
    for document in _documents(data):
        if isinstance(document.content, str):
            tokens = np.concatenate(
                [around[0], tokenizer.encode(document.content).astype(dtype), around[1]]
            )
            answers = np.broadcast_to(True, len(tokens))  # one bool, whatever its length
        else:
            try:
                tokens, answers = tokenizer.chat_tokens(document.content)
            except ConfigError as error:
                raise ConfigError(f"corpus {document.where}: {error}") from error
        pieces.append(tokens.astype(dtype))
        counts.append(answers)
    of_all = all(some.all() for some in counts)
    return np.concatenate(pieces), None if of_all else np.concatenate(counts)


def _documents(data: DataConfig) -> Iterator[Document]:
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


def _read(path: Path) -> Iterator[Document]:
    """The documents of one file."""
    if path.suffix not in SUFFIXES:
        raise ConfigError(f"corpus {path} is none of {', '.join(SUFFIXES)}.")
    try:
        if path.suffix == ".parquet":
            yield from _read_parquet(path)
        elif path.suffix == ".jsonl":
            with path.open(encoding="utf-8") as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip() and (content := _json_content(path, number, line)):
                        yield Document(f"{path} line {number}", content)
        elif text := path.read_text(encoding="utf-8"):
            yield Document(str(path), text)
    except UnicodeDecodeError as error:
        raise ConfigError(f"corpus {path} is not UTF-8 text; convert it first.") from error
    except OSError as error:
        raise ConfigError(f"corpus {path} cannot be read: {error.strerror or error}.") from error


def _json_content(path: Path, number: int, line: str) -> str | list:
    """The text, or the messages, in a line."""
    try:
        found = json.loads(line)
        kind = str if found.get("messages") is None else list
        content = found["messages" if kind is list else "text"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        kind, content = str, None
    if not isinstance(content, kind):
        raise ConfigError(
            f'corpus {path} line {number} is not a JSON object with a "text" string or a list of '
            '"messages".'
        )
    return content


def _read_parquet(path: Path) -> Iterator[Document]:
    """Texts, or conversations, in a column of that name."""
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
        column = next((c for c in ("messages", "text") if c in file.schema_arrow.names), None)
        if column is None:
            raise ConfigError(f'corpus {path} has no "text" and no "messages" column.')
        number = 0
        for rows in file.iter_batches(columns=[column]):
            for content in rows.column(0).to_pylist():
                number += 1
                if content:
                    content = content if isinstance(content, list) else str(content)
                    yield Document(f"{path} row {number}", content)
    except pyarrow.ArrowException as error:
        raise ConfigError(f"corpus {path} is not a Parquet file: {error}.") from error
