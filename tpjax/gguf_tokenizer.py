"""The tokenizer inside a GGUF file: its lists of tokens and merges, and how text is split."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpjax.chat import ChatTemplate
from tpjax.checks import ConfigError, require, shown
from tpjax.hf.gguf import open_gguf
from tpjax.vocabulary import Vocabulary, bare

if TYPE_CHECKING:
    import tokenizers

_CONTROL, _USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT2 = ("gpt-2", "gpt2", "default")
_LLAMA3 = ("llama-bpe", "llama3", "llama-v3")
_SPLITS = {  # a regular expression for the words, or None for GPT-2's
    **dict.fromkeys(_GPT2),
    "smollm": None,
    **dict.fromkeys(_LLAMA3, _WORDS.replace("DIGITS", r"\p{N}{1,3}")),
    "qwen2": _WORDS.replace("DIGITS", r"\p{N}"),
}
_ELSE = "give a tokenizer.json, or a folder that has one, with --tokenizer"


def gguf_vocabulary(path: Path) -> Vocabulary:
    """The tokenizer of a GGUF file, if it is byte-level BPE.

    Raises:
        ConfigError: the file is unreadable, its tokenizer of another kind, or `gguf` not
            installed.
    """
    fields = _fields(path)
    kind = fields.get("model")
    require(
        kind == "gpt2",
        f"{path} holds a tokenizer of the kind {shown(kind)}, not byte-level BPE (gpt2); {_ELSE}.",
    )
    try:
        library = _library(path, fields)
        names = {
            f"{name}_token": fields["tokens"][fields[f"{key}_token_id"]]
            for name, key in {
                "bos": "bos",
                "eos": "eos",
                "unk": "unknown",
                "pad": "padding",
            }.items()
            if f"{key}_token_id" in fields
        }
        stops = [fields[key] for key in ("eos_token_id", "eot_token_id") if key in fields]
        if not all(type(stop) is int and 0 <= stop < len(fields["tokens"]) for stop in stops):
            raise ValueError("a token that ends a text is none of its tokens")
        if fields.get("add_bos_token", fields["pre"] in _LLAMA3):
            _begin_with(library, names["bos_token"])
    except ConfigError:
        raise
    except Exception as error:  # lists that do not go together fail in many ways
        raise ConfigError(f"{path}: its tokenizer is damaged: {shown(error)}.") from error
    source = fields.get("chat_template")
    settings = names | {"tokenizer_class": "PreTrainedTokenizerFast"}
    if isinstance(source, str):
        settings["chat_template"] = source
    files: dict[str, Path | str] = {
        "tokenizer.json": library.to_str(pretty=True),
        "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False) + "\n",
    }
    return Vocabulary(
        library=library,
        end_of_text=stops[0] if stops else None,
        begin_of_text=bare(library),
        stop_tokens=frozenset(stops),
        template=ChatTemplate(source, names, str(path)) if isinstance(source, str) else None,
        files=files,
    )


def _fields(path: Path) -> dict[str, Any]:
    """What the file says under `tokenizer.ggml.`, and its chat template."""
    fields = open_gguf(path).fields
    try:
        return {
            name.rpartition(".")[2]: field.contents()
            for name, field in fields.items()
            if name.startswith("tokenizer.ggml.") or name == "tokenizer.chat_template"
        }
    except Exception as error:  # a damaged file fails in many ways
        raise ConfigError(f"{path} cannot be read as GGUF: {shown(error)}.") from error


def _library(path: Path, fields: dict[str, Any]) -> tokenizers.Tokenizer:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
    from tokenizers import pre_tokenizers as splits

    pre = str(fields.get("pre"))
    require(
        pre in _SPLITS,
        f"{path} splits text the way of {shown(pre)}, and tpjax only knows "
        f"{', '.join(_SPLITS)}; {_ELSE}.",
    )
    tokens, merges = fields["tokens"], [tuple(merge.split(" ")) for merge in fields["merges"]]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    library = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre in _LLAMA3))
    bytes_of = splits.ByteLevel(add_prefix_space=False, use_regex=_SPLITS[pre] is None)
    if pre in _GPT2:
        library.pre_tokenizer = bytes_of
    elif pre == "smollm":
        library.pre_tokenizer = splits.Sequence([splits.Digits(individual_digits=True), bytes_of])
    else:
        words = splits.Split(Regex(_SPLITS[pre]), "isolated")
        library.pre_tokenizer = splits.Sequence([words, bytes_of])
    if pre == "qwen2":
        library.normalizer = normalizers.NFC()
    library.decoder = decoders.ByteLevel()
    marked = [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(tokens, fields["token_type"], strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    library.add_tokens(marked)
    return library


def _begin_with(library: tokenizers.Tokenizer, text: str) -> None:
    from tokenizers.processors import TemplateProcessing

    library.post_processor = TemplateProcessing(
        single=[text, "$A"],
        pair=[text, "$A", "$B"],
        special_tokens=[(text, library.token_to_id(text))],
    )
