"""What a Hugging Face folder, or a lone tokenizer.json, says of its tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpjax.chat import ChatTemplate
from tpjax.checks import ConfigError, require, shown
from tpjax.hf.files import inside, read_json

if TYPE_CHECKING:
    import tokenizers

_END_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "<|im_end|>", "</s>", "<eos>")
_SAVED = (
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
    "generation_config.json", "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Vocabulary:
    """Tokens and what some of them mean.

    Attributes:
        library: the tokenizer, which adds no tokens of its own.
        end_of_text: goes between documents; None where there is none.
        begin_of_text: goes before every text; None where the model has no such habit.
        stop_tokens: those that end an answer.
        template: of conversations, or None.
        files: name → what to copy, or the text to write, to have the same tokenizer elsewhere.
    """

    library: tokenizers.Tokenizer
    end_of_text: int | None
    begin_of_text: int | None
    stop_tokens: frozenset[int]
    template: ChatTemplate | None
    files: dict[str, Path | str]


def read_library(path: Path) -> tokenizers.Tokenizer:
    """A tokenizer.json, which is never to cut off or fill up a text.

    Raises:
        ConfigError: it is none.
    """
    from tokenizers import Tokenizer

    try:
        library = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exceptions
        raise ConfigError(f"tokenizer {path} cannot be read: {shown(error)}") from error
    library.no_truncation()
    library.no_padding()
    return library


def bare(library: tokenizers.Tokenizer) -> int | None:
    """Stops the library from adding tokens to a text, and from trimming offsets.

    Returns:
        The token that it put before every text, or None.
    """
    if library.post_processor is None:
        return None
    said = json.loads(library.post_processor.__getstate__())
    library.post_processor = None  # pyright: ignore[reportAttributeAccessIssue]
    for step in said.get("processors", [said]):
        first = (step.get("single") or [{}])[0]
        if "SpecialToken" in first:
            return library.token_to_id(first["SpecialToken"]["id"])
    return None


def file_vocabulary(path: Path) -> Vocabulary:
    """A tokenizer.json by itself: its end-of-text token is known by its name only."""
    library = read_library(path)
    begin = bare(library)
    found = (library.token_to_id(name) for name in _END_OF_TEXT)
    end = next((token for token in found if token is not None), None)
    return Vocabulary(
        library=library,
        end_of_text=end,
        begin_of_text=begin,
        stop_tokens=frozenset(() if end is None else (end,)),
        template=None,
        files={"tokenizer.json": path},
    )


def folder_vocabulary(folder: Path) -> Vocabulary:
    """The tokenizer of a Hugging Face folder. Only JSON and the chat template are read.

    Raises:
        ConfigError: a file is unreadable, a link out of the folder, or at odds with another.
    """
    by_file = file_vocabulary(inside(folder, "tokenizer.json"))
    library, begin = by_file.library, by_file.begin_of_text
    settings = read_json(folder, "tokenizer_config.json")
    names = _names(read_json(folder, "special_tokens_map.json")) | _names(settings)
    stops = [
        _checked(token, library, folder / name)
        for name in ("config.json", "generation_config.json")
        for token in _ids(read_json(folder, name).get("eos_token_id"))
    ]
    if "eos_token" in names:
        stops.append(_named(names["eos_token"], library, folder))
    adds = settings.get("add_bos_token")
    if isinstance(adds, bool):  # else as tokenizer.json has it
        begin = (
            _named(names["bos_token"], library, folder) if adds and "bos_token" in names else None
        )
    return Vocabulary(
        library=library,
        end_of_text=stops[0] if stops else by_file.end_of_text,
        begin_of_text=begin,
        stop_tokens=frozenset(stops) or by_file.stop_tokens,
        template=_template(folder, settings, names),
        files={name: path for name in _SAVED if (path := inside(folder, name)).is_file()},
    )


def _names(settings: dict[str, Any]) -> dict[str, str]:
    """Special tokens by name; a token is a string, or an object with its text as "content"."""
    found = {}
    for name, token in settings.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _ids(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def _checked(token: Any, library: tokenizers.Tokenizer, path: Path) -> int:
    known = type(token) is int and 0 <= token < 2**32 and library.id_to_token(token) is not None
    require(
        known,
        f"{path}: eos_token_id {shown(token)} is no token of tokenizer.json; correct it there.",
    )
    return token


def _named(text: str, library: tokenizers.Tokenizer, folder: Path) -> int:
    # Half a character, which JSON can bring, is in no vocabulary.
    token = None if any("\ud800" <= c <= "\udfff" for c in text) else library.token_to_id(text)
    if token is None:
        raise ConfigError(
            f"{folder / 'tokenizer_config.json'} names the token {shown(text)}, which "
            "tokenizer.json does not have; correct it there."
        )
    return token


def _template(folder: Path, settings: dict[str, Any], names: dict[str, str]) -> ChatTemplate | None:
    """The template in a file of its own, else the one among the tokenizer's settings."""
    path, source = inside(folder, "chat_template.jinja"), settings.get("chat_template")
    if path.exists():
        try:
            source = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {shown(error)}.") from error
    elif isinstance(source, list):
        named = (one for one in source if isinstance(one, dict) and one.get("name") == "default")
        source = next(named, {}).get("template")
    return ChatTemplate(source, names, str(folder)) if isinstance(source, str) else None
