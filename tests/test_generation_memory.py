"""What generation holds, as XLA compiles it for GPUs: parameters, the cache once, and little."""

from __future__ import annotations

import dataclasses
import math

import pytest
from conftest import TINY_QWEN

from experiments.plan import main
from tpjax.config import ConfigError, DataConfig, MemoryConfig, MeshConfig
from tpjax.memory.generation import report_generation
from tpjax.presets import preset_run

CONTEXT, B = 8192, 16


def run(name: str = "llama3.2-1b", mesh: str = "tensor=4"):
    return dataclasses.replace(
        preset_run(name),
        mesh=MeshConfig.parse(mesh),
        memory=MemoryConfig(params="bf16"),
        data=DataConfig(batch_size=B),
    )


@pytest.mark.parametrize("cache", ["bf16", "int8"])
def test_a_step_holds_parameters_and_cache_and_little_else(cache):
    model = run().model
    found = report_generation(run(), context=CONTEXT, cache=cache, gpu="h100")
    L, K, H = model.num_layers, model.num_kv_heads, model.head_dim
    positions = 2 * L * B * CONTEXT * K // 4
    assert found.cache_bytes == positions * (2 * H if cache == "bf16" else H + 4)
    held = {line.name: line.bytes for line in found.decode.ledger}
    of_cache = sum(size for name, size in held.items() if name.startswith("cache."))
    assert of_cache == pytest.approx(found.cache_bytes, rel=0.001)
    params = model.num_parameters * 2 / 4
    one_layer = 2 * B * CONTEXT * K // 4 * H * 2  # int8 is read as bf16
    rest = found.decode.peak_bytes - found.cache_bytes - params
    assert 0 < rest < one_layer + 0.1 * 2**30
    assert found.decode.fits


@pytest.mark.parametrize("cache", ["bf16", "int8"])
def test_reading_a_prompt_holds_one_sequence_beside_the_cache(cache):
    model = run().model
    found = report_generation(run(), context=CONTEXT, cache=cache, gpu="h100")
    one_sequence = CONTEXT * (4 * model.embed_dim + 3 * model.mlp_dim // 4) * 2
    rest = found.prefill.peak_bytes - found.cache_bytes - model.num_parameters * 2 / 4
    assert rest < one_sequence + 0.1 * 2**30 < found.cache_bytes * 0.9
    assert not found.prefill.findings


def test_a_window_bounds_the_cache():
    windowed = dataclasses.replace(run(), model=dataclasses.replace(TINY_QWEN, max_seq_len=4096))
    found = report_generation(windowed, context=4096, gpu="h100")
    assert found.cache_bytes == math.prod((2, 2, B, 1, 5, 8, 2))


def test_a_context_beyond_learned_positions_is_refused():
    with pytest.raises(ConfigError, match="exceeds the 1024 learned positions"):
        report_generation(run("gpt2", "tensor=4"), context=2048, gpu="h100")


def test_the_plan_prints_both_programs_and_the_cache(capsys, monkeypatch):
    flags = "--generate --model llama3.2-1b --gpu rtx4090 --context 4096 --batch-size 2"
    monkeypatch.setattr("sys.argv", ["plan", *flags.split()])
    main()
    printed = capsys.readouterr().out
    assert "one token each: llama3.2-1b, 2 × 4096 positions, cache bf16" in printed
    assert "reading a prompt" in printed
    assert "the cache: 256.0 MiB per device" in printed


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--context 10", "are for --generate"),
        ("--generate --json a.json", "writes no file"),
        ("--generate --cache int4", "int4"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(capsys, monkeypatch, flags, said):
    monkeypatch.setattr("sys.argv", ["plan", "--gpu", "h100", *flags.split()])
    with pytest.raises(SystemExit):
        main()
    assert said in capsys.readouterr().err
