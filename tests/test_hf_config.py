"""Settings of a config.json: taken over as transformers does, or refused by name."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from conftest import TINY, initial_state, mesh_of, tiny_config
from test_hf_weights import units, written

from tpjax.config import ConfigError, LoraConfig, ModelConfig, RopeConfig
from tpjax.generate import Decoding, Generator
from tpjax.hf.families import write_config
from tpjax.hf.model import read_model
from tpjax.hf.save import save
from tpjax.sampling import Sampling

BASE = {
    "model_type": "llama",
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}


def read(tmp_path, **settings) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(BASE | settings))
    return read_model(str(tmp_path))


def rope(tmp_path, **settings) -> RopeConfig:
    found = read(tmp_path, **settings).rope
    assert found is not None
    return found


def test_where_a_rope_was_trained_is_read_as_transformers_reads_it(tmp_path):
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert rope(tmp_path, rope_scaling=yarn).original_max_seq_len == 128
    nested = yarn | {"original_max_position_embeddings": 32}
    assert rope(tmp_path, rope_scaling=nested).original_max_seq_len == 32
    beside = {"rope_scaling": nested, "original_max_position_embeddings": 64}
    assert rope(tmp_path, **beside).original_max_seq_len == 64
    # The older form, where it is there, is all that counts.
    both = {"rope_parameters": LLAMA3, "rope_scaling": {"type": "linear", "factor": 2.0}}
    assert rope(tmp_path, rope_theta=5e5, **both) == RopeConfig(
        theta=5e5, kind="linear", factor=2.0
    )
    new = {"rope_theta": 7.0, "rope_type": "default"}
    assert rope(tmp_path, rope_parameters=new, rope_theta=9.0).theta == 7.0


def test_windows_are_read_as_transformers_reads_them(tmp_path):
    mistral = {"model_type": "mistral"}
    full = ["full_attention"] * 2
    assert read(tmp_path, **mistral).sliding_window == 4096
    assert read(tmp_path, **mistral, sliding_window=None).sliding_window is None
    assert read(tmp_path, **mistral, sliding_window=32, layer_types=full).sliding_window == 32
    qwen = {"model_type": "qwen2", "sliding_window": 16}
    assert read(tmp_path, **qwen).sliding_window is None
    qwen["use_sliding_window"] = True
    assert read(tmp_path, **qwen).sliding_window is None  # none of 2 layers is beyond the 28th
    assert read(tmp_path, **qwen, max_window_layers=0).sliding_window == 16
    assert read(tmp_path, **qwen, layer_types=["sliding_attention"] * 2).sliding_window == 16
    with pytest.raises(ConfigError, match="layers of different attention"):
        read(tmp_path, **qwen, max_window_layers=1)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"model_type": "gemma"}, "model_type gemma is not supported; it may be llama"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "RoPE of type longrope is not supported"),
        ({"rope_scaling": {"type": "linear"}}, "factor=None must be a number"),
        ({"rope_scaling": {**LLAMA3, "factor": None}}, "factor=None must be a number"),
        ({"rope_scaling": {**LLAMA3, "warp": 2}}, "RoPE setting warp is not supported"),
        ({"hidden_size": None}, "hidden_size=None must be a number above 0"),
        ({"hidden_size": 10**400}, "must be a number above 0"),
        ({"num_hidden_layers": 10**12}, "must be at most 10000"),
        ({"vocab_size": 10**20}, "must be at most"),
        ({"num_attention_heads": 2.5}, "must be a whole number"),
        ({"tie_word_embeddings": "yes"}, "must be true or false"),
        ({"num_key_value_heads": 3}, "must be a multiple of num_kv_heads=3"),
        ({"model_type": "qwen2", "use_sliding_window": True, "max_window_layers": None},
         "max_window_layers=None must be a number of layers"),
        ({"model_type": "qwen2", "layer_types": ["full_attention"]}, "is not a list of one for"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_name(tmp_path, settings, said):
    with pytest.raises(ConfigError) as error:
        read(tmp_path, **settings)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_a_config_alone_is_a_shape_with_random_weights(tmp_path):
    folder = read(tmp_path).folder
    assert folder == str(tmp_path)
    alone = read_model(str(tmp_path / "config.json"))
    assert alone.folder == ""
    assert dataclasses.replace(alone, folder=folder) == read_model(folder)


def test_a_table_of_any_size_has_parts():
    huge = dataclasses.replace(TINY, embed_dim=2**16, num_heads=1024, num_kv_heads=1024)
    assert huge.padded_vocab_size // 1024 % huge.table_parts == 0


def test_an_export_says_what_the_model_is_and_not_what_its_old_folder_says_by_now(tmp_path):
    folder, _ = written(tmp_path, "tensor=1", TINY)
    model = read_model(str(folder))
    params = units(initial_state(tiny_config(), mesh_of(tiny_config())).params)

    def exported(name: str, model: ModelConfig = model) -> dict:
        tokens = {"eos_token_id": 5, "bos_token_id": None}
        save(model, mesh_of(tiny_config()), params, tmp_path / name, "fp32", tokens=tokens)
        return json.loads((tmp_path / name / "config.json").read_text())

    settings = json.loads((folder / "config.json").read_text()) | {"our_note": 1, "eos_token_id": 7}
    (folder / "config.json").write_text(json.dumps(settings))
    same = exported("same")
    assert (same["our_note"], same["eos_token_id"]) == (1, 7)
    adapted = dataclasses.replace(model, lora=LoraConfig(lora_rank=2))
    assert exported("adapted", adapted) == same
    (folder / "config.json").write_text(json.dumps(settings | {"rope_theta": 777.0}))
    made = exported("edited")
    assert (made["rope_theta"], made["eos_token_id"], made["bos_token_id"]) == (10_000, 5, None)
    assert read_model(str(tmp_path / "edited")).rope == TINY.rope


def test_what_transformers_has_no_setting_for_is_not_exported():
    stretched = RopeConfig(kind="dynamic", factor=2.0, original_max_seq_len=16)
    for model in (
        dataclasses.replace(TINY, rope=stretched),
        dataclasses.replace(TINY, o_bias=True),
        dataclasses.replace(TINY, qk_norm=True, qkv_bias=True),
        dataclasses.replace(TINY, mlp="gelu"),
    ):
        with pytest.raises(ConfigError, match=r"transformers"):
            write_config(model)


def test_weights_that_fp16_cannot_hold_are_refused_and_leave_nothing(tmp_path):
    config = tiny_config()
    params = initial_state(config, mesh_of(config)).params
    params["norm"]["gain"] *= 1e6
    with pytest.raises(ConfigError, match=r"model\.norm\.weight has weights that fp16 cannot"):
        save(TINY, mesh_of(config), units(params), tmp_path / "out", "fp16")
    assert list(tmp_path.iterdir()) == []


def test_a_spoilt_model_says_so_and_prints_nothing():
    config = tiny_config(sequence_parallel=False)
    params = initial_state(config, mesh_of(config)).params
    params["norm"]["gain"] *= np.nan
    prompt = [np.array([1, 2])]
    for sampling in (Sampling(temperature=0), Sampling(top_k=3)):
        decoding = Decoding.of(prompt, 8, mesh_of(config), "fp32", sampling)
        with pytest.raises(ConfigError, match="weights are spoilt"):
            next(Generator(config, mesh_of(config), params, decoding).stream(prompt, 0))
