"""Corpora, tokens and batches: nothing lost, nothing twice, everything repeatable."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from conftest import mesh_of, tiny_config

from tpjax.config import ConfigError, DataConfig, TrainConfig
from tpjax.corpus import MAX_VALIDATION_TOKENS, load_corpus
from tpjax.data import EvalBatches, TrainBatches, place
from tpjax.presets import preset_run
from tpjax.tokenizer import ByteTokenizer


def config_for(*corpus: object, **data) -> TrainConfig:
    settings = {"corpus": tuple(map(str, corpus)), "batch_size": 2, "seq_len": 8, **data}
    return dataclasses.replace(preset_run("nano"), data=DataConfig(**settings))


def text_of(config: TrainConfig) -> list[str]:
    """The documents that the tokens decode to."""
    corpus = load_corpus(config, ByteTokenizer())
    tokens = np.concatenate([corpus.train, corpus.validation])
    pieces = np.split(tokens, np.flatnonzero(tokens == 256) + 1)
    return [ByteTokenizer().decode(piece.tolist()) for piece in pieces if len(piece)]


def test_every_format_gives_its_documents(tmp_path):
    (tmp_path / "a.txt").write_text("ein Text ohne Ende — ü")
    (tmp_path / "b.jsonl").write_text(
        '{"text": "one"}\n\n{"text": "two", "other": 1}\n{"text": ""}'
    )
    table = pyarrow.table({"text": ["three", None, "four"], "id": [1, 2, 3]})
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "d.py").write_text("x = 1\n")
    (tmp_path / "ignored.bin").write_bytes(b"\xff")
    expected = {"ein Text ohne Ende — ü", "one", "two", "three", "four", "x = 1\n"}
    assert set(text_of(config_for(tmp_path))) == expected
    order = text_of(config_for(tmp_path))
    assert order == text_of(config_for(tmp_path))
    named = [tmp_path / "b.jsonl", tmp_path / "a.txt"]
    assert text_of(config_for(*named)) == ["one", "two", "ein Text ohne Ende — ü"]


def test_links_out_of_the_folder_are_not_followed(tmp_path):
    (tmp_path / "secret.txt").write_text("secret " * 20)
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "open.txt").write_text("open " * 20)
    (folder / "link.txt").symlink_to(tmp_path / "secret.txt")
    assert text_of(config_for(folder)) == ["open " * 20]


def test_the_standard_library_is_a_corpus():
    corpus = load_corpus(config_for("stdlib"), ByteTokenizer())
    assert len(corpus.train) > 1_000_000
    assert len(corpus.validation) == MAX_VALIDATION_TOKENS
    assert corpus.train.dtype == np.uint16


def test_the_last_tenth_is_held_out(tmp_path):
    (tmp_path / "a.txt").write_text("".join(chr(97 + i % 26) for i in range(999)))
    corpus = load_corpus(config_for(tmp_path / "a.txt"), ByteTokenizer())
    assert (len(corpus.train), len(corpus.validation)) == (900, 100)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", b"", "has 0 tokens; seq_len=8 needs 20 or more"),
        ("short.txt", b"abc", "has 4 tokens; seq_len=8 needs 20 or more"),
        ("latin.txt", "caf\xe9 ".encode("latin-1") * 9, "is not UTF-8 text"),
        ("bad.jsonl", b'{"text": "a"}\n{"txt": 1}\n', "line 2 is not a JSON object with a"),
        ("number.jsonl", b"3\n", "line 1 is not a JSON object with a"),
        ("fake.parquet", b"not parquet", "is not a Parquet file"),
        ("image.png", b"\x89PNG", "is none of .txt, .py, .md, .jsonl, .parquet"),
        ("", b"", "holds no .txt, .py, .md, .jsonl, .parquet file"),
        ("missing.txt", None, "does not exist"),
    ],
)
def test_unusable_corpora_end_in_one_line(tmp_path, name, content, message):
    path = tmp_path / name
    if name and content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as error:
        load_corpus(config_for(path), ByteTokenizer())
    assert message in str(error.value)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_parquet_without_text_is_named(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"body": ["a"]}), tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match='has no "text" and no "messages" column'):
        load_corpus(config_for(tmp_path / "a.parquet"), ByteTokenizer())


def batches(length=1000, batch_size=4, seq_len=10, seed=3):
    return TrainBatches(np.arange(length, dtype=np.uint16), batch_size, seq_len, seed)


def test_a_batch_depends_on_its_number_alone():
    forward = [batches().rows(number)[0] for number in range(60)]
    backward = [batches().rows(number)[0] for number in reversed(range(60))]
    for a, b in zip(forward, reversed(backward), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(forward[0], batches(seed=4).rows(0)[0])


def test_an_epoch_visits_every_window_once_in_an_order_of_its_own():
    windows = 1000 // 10 - 2 + 1  # 98 + 1: one is given up for the offset
    rows = np.concatenate([batches(batch_size=1).rows(n)[0] for n in range(2 * (windows - 1))])
    first, second = np.split(rows[:, 0].astype(int), 2)
    for starts in (first, second):
        assert len(set(starts)) == len(starts)
        assert len(set(starts % 10)) == 1  # one offset, windows side by side
    assert (first % 10)[0] != (second % 10)[0] or not np.array_equal(first, second)
    tokens, targets, valid = batches().rows(0)
    np.testing.assert_array_equal(tokens + 1, targets)
    assert valid.all()


def test_the_shortest_corpus_still_trains():
    tokens, targets, _ = batches(length=11, batch_size=2).rows(5)
    np.testing.assert_array_equal(tokens, np.arange(10)[None].repeat(2, 0))
    np.testing.assert_array_equal(targets, tokens + 1)


@pytest.mark.parametrize("length", [2, 40, 41, 42, 97, 121])
def test_evaluation_covers_every_token_once(length):
    held_out = EvalBatches(np.arange(length), batch_size=4, seq_len=10)
    seen = []
    for number in range(len(held_out)):
        tokens, targets, valid = held_out.rows(number)
        assert tokens.shape == targets.shape == valid.shape == (4, 10)
        np.testing.assert_array_equal(tokens[valid] + 1, targets[valid])
        seen += targets[valid].tolist()
    assert seen == list(range(1, length))


def test_batches_are_placed_as_the_step_wants_them():
    config = tiny_config("data=2,fsdp=2,tensor=2")
    rows = TrainBatches(np.arange(500) % 97, 8, 32, 0).rows(0)
    batch = place(rows, mesh_of(config))
    np.testing.assert_array_equal(batch.tokens_BT, rows[0])
    assert {shard.data.shape for shard in batch.tokens_BT.addressable_shards} == {(2, 32)}


class Chats(ByteTokenizer):
    """Of a conversation the answers count, and the byte after each."""

    def chat_tokens(self, messages):
        tokens, answers = [], []
        for message in messages:
            if not isinstance(message, dict):
                raise ConfigError("message 1 is none.")
            piece = (message["content"] + "\n").encode()
            tokens += piece
            answers += [message["role"] == "assistant"] * len(piece)
        return np.array(tokens, np.uint32), np.array(answers)


def write_chats(path, count: int) -> None:
    chat = [{"role": "user", "content": "{n}?"}, {"role": "assistant", "content": "I,{n}."}]
    lines = [json.dumps({"messages": chat}).replace("{n}", str(n)) for n in range(100, 100 + count)]
    path.write_text("\n".join(lines))


def test_of_conversations_the_answers_count_and_of_texts_all(tmp_path):
    write_chats(tmp_path / "chat.jsonl", 40)
    (tmp_path / "text.txt").write_text("abc")
    files = [tmp_path / "text.txt", tmp_path / "chat.jsonl"]
    corpus = load_corpus(config_for(*files), Chats())
    assert corpus.train_counts is not None
    assert corpus.validation_counts is not None
    counted = Chats().decode(corpus.train[corpus.train_counts])
    assert counted.startswith("abcI,100.\nI,101.\nI,102.\n")
    others = Chats().decode(corpus.train[~corpus.train_counts]).split()
    assert others[:3] == ["100?", "101?", "102?"]
    train = TrainBatches(corpus.train, 2, 8, seed=0, counts=corpus.train_counts)
    windows = np.lib.stride_tricks.sliding_window_view(corpus.train, 9)
    for number in range(30):
        tokens, targets, valid = train.rows(number)
        for row in range(2):
            window = np.append(tokens[row, 0], targets[row])
            (start,) = np.flatnonzero((windows == window).all(1))  # numbered, so each is one
            np.testing.assert_array_equal(valid[row], corpus.train_counts[start + 1 : start + 9])
    held = EvalBatches(corpus.validation, 2, 8, corpus.validation_counts)
    seen = np.concatenate([held.rows(i)[2].ravel() for i in range(len(held))])
    assert seen.sum() == corpus.validation_counts[1:].sum() > 0
    predicted = [held.rows(i)[1][held.rows(i)[2]] for i in range(len(held))]
    assert "?" not in Chats().decode(np.concatenate(predicted))


def test_conversations_are_told_apart_by_what_counts(tmp_path):
    write_chats(tmp_path / "chat.jsonl", 40)
    corpus = load_corpus(config_for(tmp_path / "chat.jsonl"), Chats())
    other = dataclasses.replace(corpus, train_counts=~corpus.train_counts)
    assert corpus.fingerprint != other.fingerprint


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": "hi"}', "line 1 is not a JSON object with a"),
        ('{"messages": 1}', "line 1 is not a JSON object with a"),
        ('{"messages": ["hi"]}', r"c\.jsonl line 1: message 1 is none"),
    ],
)
def test_a_line_that_is_no_conversation_is_named(tmp_path, line, message):
    (tmp_path / "c.jsonl").write_text(line)
    with pytest.raises(ConfigError, match=message):
        load_corpus(config_for(tmp_path / "c.jsonl", seq_len=99), Chats())


def test_a_tokenizer_without_a_template_refuses_conversations(tmp_path):
    write_chats(tmp_path / "chat.jsonl", 4)
    with pytest.raises(ConfigError, match=r"chat\.jsonl line 1: .*no chat template"):
        load_corpus(config_for(tmp_path / "chat.jsonl"), ByteTokenizer())


def test_conversations_without_an_answer_are_refused(tmp_path):
    line = json.dumps({"messages": [{"role": "user", "content": "Is anybody there?"}]})
    (tmp_path / "chat.jsonl").write_text("\n".join([line] * 40))
    with pytest.raises(ConfigError, match="has no answers to learn from"):
        load_corpus(config_for(tmp_path / "chat.jsonl"), Chats())
