"""Text ↔ token ids, conversations too: by bytes, or as a real model does it."""

from __future__ import annotations

import codecs
import json
import re
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from tpjax.checks import require, shown
from tpjax.config import ConfigError, TrainConfig
from tpjax.gguf_tokenizer import gguf_vocabulary
from tpjax.vocabulary import Vocabulary, file_vocabulary, folder_vocabulary


class Tokenizer(ABC):
    """Text to token ids and back.

    Attributes:
        vocab_size: one more than the greatest id.
        end_of_text: put between documents; None where there is none.
        begin_of_text: put before every text; None where the model has no such habit.
        stop_tokens: those that end an answer.
        drops_space: whether a text loses a space that it begins with when decoded.
    """

    vocab_size: int
    end_of_text: int | None
    begin_of_text: int | None = None
    stop_tokens: frozenset[int]
    drops_space: bool = False

    @abstractmethod
    def encode(self, text: str) -> np.ndarray:
        """Token ids; none are added. Special tokens written in the text are recognised, as
        Hugging Face's libraries do: chats are made of them, and a corpus may have them."""

    @abstractmethod
    def piece(self, token: int, special: bool = False) -> bytes:
        """The UTF-8 that a token stands for, maybe a part of a character; nothing for an id
        without a token, and for a special token unless `special`."""

    def decode(self, tokens: Iterable[int], special: bool = False) -> str:
        """The text, to the byte; what is not UTF-8 becomes U+FFFD.

        Args:
            special: write special tokens out.
        """
        stream = TextStream(self, special)
        return "".join(map(stream.push, tokens)) + stream.rest()

    def chat_prompt(self, messages: Any) -> str:
        """A conversation as text that ends where the assistant is to answer. It has all special
        tokens it needs: encode it as it is, with no `begin_of_text`.

        Args:
            messages: {"role": …, "content": …}, one or more.

        Raises:
            ConfigError: the messages are none, or not to the template's liking; or there
                is no template.
        """
        raise ConfigError(f"the {self} has no chat template; use a model made for chats.")

    def chat_tokens(self, messages: Any) -> tuple[np.ndarray, np.ndarray]:
        """A whole conversation as token ids, and whether each is of an answer.

        An answer is what the assistant says and the token that ends its turn; neither the
        header before it nor what follows (such as a newline).

        Raises:
            ConfigError: as `chat_prompt`; or the answers cannot be told apart.
        """
        raise ConfigError(f"the {self} has no chat template; use a model made for chats.")

    def save(self, folder: Path) -> list[Path]:
        """Writes what makes the same tokenizer for Hugging Face's libraries.

        Returns:
            The files written.
        """
        return []


class TextStream:
    """Tokens to text as they come: `decode` of all of them, in pieces of whole characters.

    Args:
        special: write special tokens out.
        begun: they go on with a text, and a space that they begin with belongs to it.
    """

    def __init__(self, tokenizer: Tokenizer, special: bool = False, *, begun: bool = False):
        self._tokenizer, self._special = tokenizer, special
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = begun or not tokenizer.drops_space

    def push(self, token: int) -> str:
        """The text that one more token completes, if any."""
        piece = self._tokenizer.piece(int(token), self._special)
        if piece and not self._begun:
            piece, self._begun = piece.removeprefix(b" "), True
        return self._utf8.decode(piece)

    def rest(self) -> str:
        """What is left at the end: a character of which a part is missing, as U+FFFD."""
        return self._utf8.decode(b"", final=True)


class ByteTokenizer(Tokenizer):
    """UTF-8 bytes, and 256 for the end of a text. No text is a special token."""

    vocab_size = 257
    end_of_text = 256
    stop_tokens = frozenset({256})

    def __str__(self) -> str:
        return "byte tokenizer"

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(_whole(text), np.uint8)

    def piece(self, token: int, special: bool = False) -> bytes:
        return bytes([token]) if token < 256 else b""


class FileTokenizer(Tokenizer):
    """The tokenizer of a Hugging Face folder, a tokenizer.json or a GGUF file.

    Text comes back to the byte from byte-level BPE, unless the model normalises it (Qwen
    composes accents) or lacks a byte's token (SmolLM2 has none for some control characters).
    """

    def __init__(self, path: Path):
        self._name = f"tokenizer {path}"
        self._vocabulary = vocabulary = _vocabulary(path)
        self._library = library = vocabulary.library
        self.vocab_size = max(library.get_vocab().values(), default=-1) + 1  # ids may have gaps
        self.end_of_text, self.begin_of_text = vocabulary.end_of_text, vocabulary.begin_of_text
        self.stop_tokens = vocabulary.stop_tokens
        self._added = library.get_added_tokens_decoder()
        special = {token for token, added in self._added.items() if added.special}
        self._special = sorted(special | self.stop_tokens)
        decoder = library.decoder
        said = None if decoder is None else json.loads(decoder.__getstate__())
        self._byte_level = said is not None and said["type"] == "ByteLevel"
        self._bytes_of, self.drops_space = _reader(said, self._name)

    def __str__(self) -> str:
        return self._name

    def encode(self, text: str) -> np.ndarray:
        return np.array(self._encoding(text).ids, np.uint32)

    def _encoding(self, text: str) -> Any:
        try:
            return self._library.encode(_whole(text).decode(), add_special_tokens=False)
        except Exception as error:  # the library raises bare Exceptions
            raise ConfigError(f"{self} cannot encode a text: {shown(error)}.") from error

    def piece(self, token: int, special: bool = False) -> bytes:
        text, added = self._library.id_to_token(token), self._added.get(token)
        if text is None or (added is not None and added.special and not special):
            return b""
        if added is not None and self._byte_level:
            return added.content.encode()  # written as it is, not byte by byte
        return self._bytes_of(text)

    def chat_prompt(self, messages: Any) -> str:
        template = self._vocabulary.template
        if template is None:
            return super().chat_prompt(messages)
        return template.render(messages, answer_next=True)

    def chat_tokens(self, messages: Any) -> tuple[np.ndarray, np.ndarray]:
        template = self._vocabulary.template
        if template is None:
            return super().chat_tokens(messages)
        text, answers = template.answers(messages)
        encoding = self._encoding(text)
        tokens = np.array(encoding.ids, np.uint32)
        starts = np.array([start for start, _ in encoding.offsets], int)
        special, stops = (np.isin(tokens, ids) for ids in (self._special, [*self.stop_tokens]))
        mask = np.zeros(len(tokens), bool)
        for answer in answers:
            last, closes = answer.turn_end, special
            if last is None:  # what the next turn begins with may be special too
                last, closes = len(text), stops
            closing = np.flatnonzero(closes & (starts >= answer.content_end) & (starts < last))
            require(
                len(closing) > 0 or answer.turn_end is not None,
                f"chat template of {self}: it leaves out something of an earlier answer, which no "
                "token that stops an answer ends, so that it cannot be told apart.",
            )
            if len(closing):
                last = starts[closing[0]] + 1
            mask |= (starts >= answer.start) & (starts < last)
        return tokens, mask

    def save(self, folder: Path) -> list[Path]:
        written = []
        for name, content in self._vocabulary.files.items():
            written.append(folder / name)
            if isinstance(content, str):
                written[-1].write_text(content, encoding="utf-8")
            else:
                shutil.copyfile(content, written[-1])
        return written


def load_tokenizer(config: TrainConfig) -> Tokenizer:
    """The tokenizer of a resolved run.

    Raises:
        ConfigError: it cannot be read, or has more tokens than the model.
    """
    name = config.data.tokenizer
    tokenizer = ByteTokenizer() if name == "bytes" else FileTokenizer(Path(name))
    if tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"tokenizer {name} has {tokenizer.vocab_size} tokens, but {config.model.name} only "
            f"{config.model.vocab_size}; use a model with a larger vocabulary."
        )
    return tokenizer


def _vocabulary(path: Path) -> Vocabulary:
    require(path.exists(), f"tokenizer {path} does not exist; name bytes, a file or a folder.")
    if path.is_file():
        return gguf_vocabulary(path) if path.suffix == ".gguf" else file_vocabulary(path)
    if (path / "tokenizer.json").exists():
        return folder_vocabulary(path)
    found = sorted(path.glob("*.gguf"))
    require(
        len(found) == 1,
        f"tokenizer {path} holds no tokenizer.json and {len(found) or 'no'} GGUF files; name the "
        "file, or make the one with AutoTokenizer.from_pretrained and save_pretrained.",
    )
    return gguf_vocabulary(found[0])


def _whole(text: str) -> bytes:
    """UTF-8, with ? for half a character, which JSON can bring."""
    return text.encode("utf-8", errors="replace")


def _reader(decoder: dict | None, name: str) -> tuple[Callable[[str], bytes], bool]:
    """How the text of a token in the vocabulary becomes UTF-8, and whether a text drops the
    space it begins with, from what tokenizer.json says of its decoder.

    Raises:
        ConfigError: a kind of decoder that no decoder-only model of ours has.
    """
    if decoder is None:  # whole words
        return lambda text: b" " + text.encode(), True
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    replaced: list[tuple[str, str]] = []
    by_byte = drops_space = False
    for step in steps:
        kind = step["type"]
        if kind == "ByteLevel" and len(steps) == 1:
            return _from_byte_level, False
        if kind == "Metaspace":
            replaced.append((step["replacement"], " "))
            drops_space = step.get("prepend_scheme", "always") != "never"
        elif kind == "Replace" and "String" in step["pattern"]:
            replaced.append((step["pattern"]["String"], step["content"]))
        elif kind == "ByteFallback":
            by_byte = True
        elif kind == "Strip" and (step["content"], step["start"], step["stop"]) == (" ", 1, 0):
            drops_space = True
        else:
            require(kind == "Fuse", f"{name}: its decoder {kind} is of no language model we know.")

    def read(text: str) -> bytes:
        if by_byte and re.fullmatch("<0x[0-9A-F]{2}>", text):
            return bytes([int(text[3:5], 16)])
        for old, new in replaced:
            text = text.replace(old, new)
        return text.encode()

    return read, drops_space


def _byte_level() -> dict[str, int]:
    """GPT-2's printable character for every byte: itself, or one from 256 on."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(256 + n): b for n, b in enumerate(others)}


_BYTES = _byte_level()


def _from_byte_level(text: str) -> bytes:
    try:
        return bytes(_BYTES[letter] for letter in text)
    except KeyError:  # such as the room for more tokens that some vocabularies have: [PAD 7]
        return text.encode()
