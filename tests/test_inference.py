"""Models asked, measured and handed on: of a run's folder and of the folder exported from it."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import reference
from conftest import TINY, TINY_GPT2, initial_state, mesh_of, params_of, tiny_config, tiny_run
from safetensors.numpy import load_file

from experiments import evaluate as evaluate_program
from experiments import export as export_program
from experiments import generate as generate_program
from tpjax.answer import Answers, prompt_tokens
from tpjax.checkpoint import choose
from tpjax.checks import ConfigError
from tpjax.config import MemoryConfig, MeshConfig
from tpjax.evaluate import evaluate
from tpjax.export import export
from tpjax.hf.model import read_model
from tpjax.inference import Loaded, ModelSource, load
from tpjax.loop import train
from tpjax.presets import preset
from tpjax.resume import settings_of
from tpjax.sampling import Sampling
from tpjax.tokenizer import ByteTokenizer

GREEDY = Sampling(temperature=0)


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A short run of a tiny model on bytes."""
    folder = tmp_path_factory.mktemp("run")
    return train(tiny_run(folder, steps=150)).out


@pytest.fixture(scope="module")
def exported(run_folder, tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "model"
    export(run_folder, folder)
    return folder


def test_settings_of_a_run_come_back(run_folder):
    checkpoint = choose(run_folder / "checkpoints", "must")
    assert checkpoint is not None
    config = settings_of(checkpoint)
    assert config.mesh == MeshConfig(data=2, tensor=2)
    assert config.model == dataclasses.replace(TINY, vocab_size=257, name="tiny-bytes")
    unknown = dataclasses.replace(checkpoint.about, config={"modle": 1})
    with pytest.raises(ConfigError, match=r"does not know: .*modle"):
        settings_of(dataclasses.replace(checkpoint, about=unknown))


def test_an_export_has_the_bits_of_the_checkpoint_without_padding(run_folder, exported):
    params, found = params_of(run_folder), load_file(exported / "model.safetensors")
    np.testing.assert_array_equal(found["model.embed_tokens.weight"], params["embedding"][:257])
    q = params["blocks.attention.q"][1]  # [D, N, H]
    np.testing.assert_array_equal(
        found["model.layers.1.self_attn.q_proj.weight"], q.reshape(32, 64).T
    )
    assert len(found) == 1 + 1 + 2 * 9
    assert read_model(str(exported)).rope == TINY.rope


def test_a_run_and_its_export_give_the_same_answers_on_any_mesh(run_folder, exported):
    texts = []
    for source in (
        ModelSource(out=str(run_folder)),
        ModelSource(out=str(run_folder), devices=4, mesh=MeshConfig(fsdp=2, tensor=2)),
        ModelSource(model=str(exported), tokenizer="bytes", devices=2),
    ):
        loaded = load(source, rows=2, seq_len=1)
        prompts = [prompt_tokens(loaded.tokenizer, text, chat=False) for text in ("the ", "fox")]
        answers = Answers(loaded, prompts, max_tokens=12, cache="fp32", sampling=GREEDY)
        pieces = np.array(list(answers.stream(0)))
        texts.append(["".join(pieces[:, row]) for row in range(2)])
    assert texts[0] == texts[1] == texts[2]
    assert texts[0][0] != texts[0][1]


def test_an_answer_ends_where_the_model_stops_and_never_later(run_folder):
    loaded = load(ModelSource(out=str(run_folder)), rows=1, seq_len=1)
    prompt = [prompt_tokens(loaded.tokenizer, "the quick", chat=False)]

    def text(of: Loaded, max_tokens: int) -> str:
        answers = Answers(of, prompt, max_tokens=max_tokens, cache="fp32", sampling=GREEDY)
        return "".join(pieces[0] for pieces in answers.stream(0))

    whole = text(loaded, 12)
    assert len(whole) == 12
    assert text(loaded, 5) == whole[:5]
    stops = ByteTokenizer()
    stops.stop_tokens = frozenset({ord(whole[4])})
    ended = text(dataclasses.replace(loaded, tokenizer=stops), 12)
    assert ended == whole[: whole.index(whole[4])]


def test_perplexity_is_that_of_the_definition(run_folder, tmp_path):
    (tmp_path / "text.txt").write_text("the quick fox — jumps over")
    found = evaluate(ModelSource(out=str(run_folder)), (str(tmp_path / "text.txt"),), 2, 8)
    params: dict = {}
    for path, value in params_of(run_folder).items():
        *parents, last = path.split(".")
        inner = params
        for parent in parents:
            inner = inner.setdefault(parent, {})
        inner[last] = value.astype(np.float64)
    raw = "the quick fox — jumps over".encode()
    tokens = np.array([*raw, 256])
    total = 0.0
    model = dataclasses.replace(TINY, vocab_size=257)
    for first in range(0, len(tokens) - 1, 8):  # each piece begins anew
        piece = tokens[first : first + 9][None]
        valid = np.ones((1, piece.shape[1] - 1), bool)
        mean = reference.loss(params, piece[:, :-1], piece[:, 1:], valid, model)
        total += mean * (piece.shape[1] - 1)
    count = len(tokens) - 1
    assert found.tokens == count
    assert found.loss == pytest.approx(total / count, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(total / count), rel=1e-5)
    assert found.bytes == len(raw) - 1  # the first is not predicted, the end is no byte
    assert found.bits_per_byte == pytest.approx(total / math.log(2) / (len(raw) - 1), rel=1e-5)


@pytest.mark.parametrize("params", ["bf16", "int8"])
def test_formats_of_a_run_are_exported_as_bf16(tmp_path, params):
    settings = tiny_run(tmp_path, steps=2, memory=MemoryConfig(params=params))
    out = train(settings).out
    assert out is not None
    notes = export(out, tmp_path / "model")
    assert "bf16" in notes[0]
    found = load_file(tmp_path / "model" / "model.safetensors")
    assert {x.dtype.name for x in found.values()} == {"bfloat16"}
    values = params_of(out)
    if params == "bf16":
        np.testing.assert_array_equal(found["model.embed_tokens.weight"], values["embedding"][:257])


def test_a_model_folder_is_trained_further_and_resumed(tmp_path, exported):
    settings = tiny_run(tmp_path, steps=4)
    model = read_model(str(exported))
    data = dataclasses.replace(settings.data, tokenizer="bytes")
    recovery = dataclasses.replace(settings.recovery, stop_after=2)
    first = dataclasses.replace(settings, model=model, data=data, recovery=recovery)
    dry = train(dataclasses.replace(first, dry_run=True))
    assert dry.notes == (f"weights of {exported}",)
    fresh = dataclasses.replace(settings, out=str(tmp_path / "fresh"), steps=4)
    stopped, untrained = train(first), train(fresh)
    assert stopped.stopped == "--stop-after=2"
    lines = [out.joinpath("metrics.jsonl").read_text() for out in (stopped.out, untrained.out)]
    assert lines[0].split('"loss": ')[1] != lines[1].split('"loss": ')[1]
    # It goes on from the checkpoint, wherever the folder is by now; a model of random weights
    # would be another run.
    moved = exported.with_name("moved")
    exported.rename(moved)
    on = dataclasses.replace(first, model=read_model(str(moved)), recovery=settings.recovery)
    assert train(on).steps == 4
    moved.rename(exported)
    anew = dataclasses.replace(on, model=dataclasses.replace(model, folder=""), steps=4)
    with pytest.raises(ConfigError, match="begun with other settings: model"):
        train(anew)


@pytest.mark.parametrize(
    ("program", "flags", "said"),
    [
        (generate_program, "--prompt a", "name a model folder with --model, or a run's folder"),
        (generate_program, "--out nowhere", "give a --prompt"),
        (generate_program, "--out nowhere --prompt a", "no checkpoint in nowhere/checkpoints"),
        (generate_program, "--model nano --prompt a", "model nano has no weights"),
        (generate_program, "--out RUN --prompt a --max-tokens 40", "exceed the context of 32"),
        (generate_program, "--out RUN --prompt a --context 99 --max-tokens 4", "exceeds the 32"),
        (generate_program, "--out RUN --prompt a --chat", "has no chat template"),
        (generate_program, "--out RUN --prompt a --top-p 1.5", "top_p=1.5 must be above 0"),
        (generate_program, "--out RUN --prompt a --mesh tensor=3 --devices 3", "may be 1, 2, 4, 8"),
        (evaluate_program, "--out RUN --corpus nowhere", "corpus nowhere does not exist"),
        (evaluate_program, "--out RUN --model nano", "name a model folder with --model, or"),
        (export_program, "--to x", "name a run's folder with --out"),
        (export_program, "--out RUN --to RUN", "is there already"),
        (export_program, "--out RUN --to x --dtype int8", "dtype"),
    ],
)
def test_wrong_input_ends_in_one_line(program, flags, said, run_folder, capsys, monkeypatch):
    words = flags.replace("RUN", str(run_folder)).split()
    monkeypatch.setattr("sys.argv", ["program", *words])
    with pytest.raises(SystemExit) as stop:
        program.main()
    assert stop.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert printed.count("\n") == 1
    assert said in printed


def test_programs_print_what_they_found(run_folder, tmp_path, capsys, monkeypatch):
    (tmp_path / "text.txt").write_text("the quick brown fox")

    def printed(program, flags: str) -> str:
        monkeypatch.setattr("sys.argv", ["program", *flags.split()])
        program.main()
        return capsys.readouterr().out

    source = f"--out {run_folder}"
    one = printed(generate_program, f"{source} --prompt the --max-tokens 5 --temperature 0")
    two = printed(generate_program, f"{source} --prompt the fox --max-tokens 5 --temperature 0")
    assert f"'the':\n{one.rstrip()}" in two
    assert "'fox':" in two
    assert "perplexity" in printed(
        evaluate_program, f"{source} --corpus {tmp_path}/text.txt --seq-len 8"
    )
    said = printed(export_program, f"{source} --to {tmp_path}/exported")
    assert "fp32" in said
    assert "the model reads bytes" in said


def test_gpt2_answers_too(tmp_path):
    config = tiny_config(model=dataclasses.replace(TINY_GPT2, vocab_size=257))
    loaded = Loaded(
        config=config,
        mesh=mesh_of(config),
        tokenizer=ByteTokenizer(),
        params=initial_state(config, mesh_of(config)).params,
        notes=[],
    )
    prompt = [prompt_tokens(loaded.tokenizer, "ab", chat=False)]
    answers = Answers(loaded, prompt, max_tokens=4, cache="int8", sampling=Sampling())
    assert len(list(answers.stream(0))) == 5


def test_no_row_is_filled_up_where_all_devices_can_be_on_tensor(run_folder):
    loaded = load(ModelSource(out=str(run_folder), devices=8), rows=1, seq_len=1)
    assert (loaded.config.mesh, loaded.config.data.batch_size) == (MeshConfig(tensor=8), 1)


def test_a_folder_named_from_here_is_found_from_elsewhere(exported, monkeypatch):
    monkeypatch.chdir(exported.parent)
    assert preset(exported.name).folder == str(exported)
