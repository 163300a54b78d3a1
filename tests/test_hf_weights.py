"""Model folders out and in again: the same bits, on any mesh, whole or in shards."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY, TINY_GPT2, initial_state, mesh_of, tiny_config
from safetensors.numpy import load_file, save_file

from tpjax.config import ConfigError, LoraConfig, ModelConfig, RopeConfig, TrainConfig
from tpjax.hf.load import Weights
from tpjax.hf.model import read_model
from tpjax.hf.save import save
from tpjax.layers import in_blocks
from tpjax.quant import is_quantised
from tpjax.state import leaf_name

LLAMA = dataclasses.replace(
    TINY,
    qkv_bias=True,
    o_bias=True,
    mlp_bias=True,
    tie_embeddings=False,
    rope=RopeConfig(theta=500.0, kind="yarn", factor=2.0, original_max_seq_len=16, truncate=False),
)
QWEN3 = dataclasses.replace(TINY, qk_norm=True, sliding_window=5)
PLAIN_GPT2 = dataclasses.replace(
    TINY_GPT2, qkv_bias=False, o_bias=False, mlp_bias=False, norm_bias=False, head_dim=4
)
FULL_GPT2 = dataclasses.replace(TINY_GPT2, head_dim=4, tie_embeddings=False)


def named(params: dict) -> dict[str, np.ndarray]:
    return {leaf_name(keys): np.asarray(x) for keys, x in jax.tree.leaves_with_path(params)}


def random_params(config: TrainConfig) -> dict:
    """As a new state's, but no vector is all ones or zeros, and padding is zero."""
    mesh, rng = mesh_of(config), np.random.default_rng(0)

    def one(keys: tuple, x):
        value = rng.normal(0, 0.3, x.shape).astype(np.float32)
        if leaf_name(keys) in ("embedding", "head"):
            value[config.model.vocab_size :] = 0
        return jax.device_put(value.astype(x.dtype), x.sharding)

    return jax.tree.map_with_path(one, initial_state(config, mesh).params)


def units(params: dict) -> list:
    leaves = jax.tree.leaves_with_path(params, is_leaf=is_quantised)
    return [(leaf_name(keys), value) for keys, value in leaves]


def written(tmp_path: Path, mesh: str, model: ModelConfig, dtype: str = "fp32", **settings):
    """A folder written from a mesh, and the parameters that it was written from."""
    config = tiny_config(mesh, model=model, **settings)
    params, folder = random_params(config), tmp_path / "model"
    save(model, mesh_of(config), units(params), folder, dtype, max_file_bytes=8000)
    return folder, params


def read(folder: Path, mesh: str, **settings) -> dict:
    config = tiny_config(mesh, model=read_model(str(folder)), **settings)
    return Weights(config, mesh_of(config)).params()


@pytest.mark.parametrize("model", [TINY, LLAMA, QWEN3, FULL_GPT2], ids=lambda m: m.name)
@pytest.mark.parametrize(
    ("out", "into"),
    [("tensor=4", "fsdp=2,tensor=2"), ("data=2,fsdp=2", "tensor=8"), ("tensor=8", "fsdp=4")],
)
def test_out_and_in_again_gives_the_same_bits(tmp_path, model, out, into):
    folder, params = written(tmp_path, out, model)
    assert len(list(folder.glob("*.safetensors"))) > 3
    again = read_model(str(folder))
    assert dataclasses.replace(again, name=model.name, folder="") == model
    back = read(folder, into)
    before, after = named(params), named(back)
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_array_equal(value, after[name], err_msg=name)


def test_a_gpt2_without_biases_is_one_with_zeros(tmp_path):
    folder, params = written(tmp_path, "tensor=4", PLAIN_GPT2)
    after = named(read(folder, "tensor=2"))
    for name, value in named(params).items():
        np.testing.assert_array_equal(value, after.pop(name))
    assert len(after) == 9  # four projections' and two of the feed-forward, three shifts
    assert not any(value.any() for value in after.values())


def test_bf16_comes_back_as_it_was(tmp_path):
    folder, params = written(tmp_path, "tensor=4", TINY, "bf16", params="bf16")
    kinds = {
        x.dtype.name for file in folder.glob("*.safetensors") for x in load_file(file).values()
    }
    assert kinds == {"bfloat16"}
    after = named(read(folder, "fsdp=2,tensor=2", params="bf16"))
    for name, value in named(params).items():
        np.testing.assert_array_equal(value, after[name])


def test_int8_is_made_of_what_the_file_has_and_alike_on_every_mesh(tmp_path):
    folder, params = written(tmp_path, "tensor=4", LLAMA)
    back = [named(read(folder, mesh, params="int8")) for mesh in ("tensor=1", "fsdp=2,tensor=4")]
    for name, value in named(params).items():
        if f"{name}.codes" not in back[0]:
            np.testing.assert_array_equal(value, back[1][name])
            continue
        codes, scales = (back[0][f"{name}.{part}"] for part in ("codes", "scales"))
        blocks = codes.shape[-1] // scales.shape[-1] if codes.shape[-1] != scales.shape[-1] else 0
        wide = np.repeat(scales, blocks, -1) if blocks else _spread(scales, codes.shape)
        assert np.abs(codes * wide - value).max() <= 0.5001 * scales.max()
        for part in ("codes", "scales"):
            np.testing.assert_array_equal(back[0][f"{name}.{part}"], back[1][f"{name}.{part}"])


def test_nf4_is_half_the_bytes_and_alike_on_every_mesh(tmp_path):
    folder, params = written(tmp_path, "tensor=4", LLAMA)
    back = []
    model = dataclasses.replace(read_model(str(folder)), lora=LoraConfig(lora_rank=2))
    for mesh in ("tensor=1", "fsdp=2,tensor=4"):
        config = tiny_config(mesh, model=model, params="nf4")
        back.append(Weights(config, mesh_of(config)).params())
        for path, value in units(back[-1]):
            if not is_quantised(value) or value.bits == 8:
                continue
            name, whole = path.rpartition(".")[2], named(params)[path]
            with jax.set_mesh(mesh_of(config)):
                wanted = [in_blocks(LLAMA, name, jnp.asarray(layer), 4) for layer in whole]
            np.testing.assert_array_equal(value.codes, [w.codes for w in wanted])
            np.testing.assert_array_equal(value.scales, [w.scales for w in wanted])
            assert value.codes.nbytes * 2 == whole.size
    kinds = {path.rpartition(".")[2]: v.bits for path, v in units(back[0]) if is_quantised(v)}
    assert {name for name, bits in kinds.items() if bits == 8} == {"embedding", "head"}
    assert {"q", "k", "v", "o", "gate", "up", "down"} == kinds.keys() - {"embedding", "head"}
    one, other = (named(b) for b in back)
    assert one.keys() == other.keys()
    for path, value in one.items():
        np.testing.assert_array_equal(value, other[path])


def _spread(scales: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    for axis, (few, many) in enumerate(zip(scales.shape, shape, strict=True)):
        scales = np.repeat(scales, many // few, axis)
    return scales


def edit(folder: Path, change) -> None:
    """Rewrites a folder's weights as one file after a change of its tensors."""
    tensors = {}
    for file in folder.glob("*.safetensors*"):
        if file.suffix == ".safetensors":
            tensors |= load_file(file)
        file.unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def refused(folder: Path, *, tie: bool | None = None) -> str:
    config = tiny_config(model=read_model(str(folder)))
    if tie is not None:
        model = dataclasses.replace(config.model, tie_embeddings=tie)
        config = dataclasses.replace(config, model=model)
    with pytest.raises(ConfigError) as error:
        Weights(config, mesh_of(config))
    assert "\n" not in str(error.value)
    return str(error.value)


TABLE, GAIN = "model.embed_tokens.weight", "model.layers.1.input_layernorm.weight"
K, UP = "model.layers.1.self_attn.k_proj.weight", "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t.pop(K), f"has no tensor {K}"),
        (lambda t: t.update(extra=t[K]), "has tensor extra,"),
        (lambda t: t.update({UP: t[UP].T.copy()}), "has shape [32, 64], and its config makes"),
        (
            lambda t: t.update({K: t[K][:-8]}),
            "has shape [24, 32], and its config makes it [32, 32]",
        ),
        (lambda t: t.update({K: t[K].astype(np.int32)}), "has numbers of kind I32"),
        (lambda t: t.update({"lm_head.weight": t[TABLE] * 2}), "other than"),
    ],
    ids=["missing", "left over", "turned", "cut", "integers", "head"],
)
def test_every_tensor_is_there_in_its_shape_or_named(tmp_path, change, said):
    folder, _ = written(tmp_path, "tensor=1", TINY)
    edit(folder, change)
    assert said in refused(folder)


def test_each_way_in_which_settings_and_tensors_disagree_about_the_head(tmp_path):
    untied = dataclasses.replace(TINY, tie_embeddings=False)
    folder, params = written(tmp_path, "tensor=1", untied)
    # Tied by this run: the two are not the same.
    assert "--no-tie-embeddings takes" in refused(folder, tie=True)
    # Its head is gone, though its config has one.
    edit(folder, lambda tensors: tensors.pop("lm_head.weight"))
    assert "--tie-embeddings does" in refused(folder)
    tied = tiny_config(model=dataclasses.replace(read_model(str(folder)), tie_embeddings=True))
    assert "head" not in Weights(tied, mesh_of(tied)).params()
    # Untied by this run only: the head starts as a copy.
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": True}))
    model = dataclasses.replace(read_model(str(folder)), tie_embeddings=False)
    config = tiny_config(model=model)
    copied = Weights(config, mesh_of(config)).params()
    np.testing.assert_array_equal(copied["head"], params["embedding"])
    # Tied, and a head that is the same all the same.
    edit(folder, lambda t: t.update({"lm_head.weight": t[TABLE].copy()}))
    assert "head" not in read(folder, "tensor=2")


def test_buffers_of_older_versions_and_names_without_a_head_are_known(tmp_path):
    folder, params = written(tmp_path, "tensor=1", FULL_GPT2)

    def older(tensors: dict) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = np.ones((1, 1, 8, 8), np.float32)

    edit(folder, older)
    after = named(read(folder, "tensor=4"))
    for name, value in named(params).items():
        np.testing.assert_array_equal(value, after[name])


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: next(f.glob("*00002*")).unlink(), "names, is missing"),
        (lambda f: _cut(next(f.glob("*00002*"))), "not a whole safetensors file"),
        (lambda f: _index(f, lambda m: m.update({K: "model-00099.safetensors"})), "is missing"),
        (lambda f: _index(f, lambda m: m.pop(GAIN)), f"does not name tensor {GAIN}"),
        (
            lambda f: _index(f, lambda m: m.update({K: "../x.safetensors"})),
            "is not the name of a file",
        ),
        (lambda f: _index(f, lambda m: m.update(more=m[K])), "has tensor more in"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{"), "cannot be read as JSON"),
        (lambda f: [p.unlink() for p in f.glob("*safetensors*")], "has neither"),
        (lambda f: _link(next(f.glob("*00002*"))), "is a link out of its folder"),
    ],
    ids=["missing", "cut", "elsewhere", "unnamed", "outside", "absent", "json", "none", "link"],
)
def test_files_that_are_not_as_they_should_be_are_named(tmp_path, damage, said):
    folder, _ = written(tmp_path, "tensor=1", TINY)
    damage(folder)
    assert said in refused(folder)


def _cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])


def _index(folder: Path, change) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index["weight_map"])
    path.write_text(json.dumps(index))


def _link(file: Path) -> None:
    other = file.rename(file.parent.parent / "other.safetensors")
    file.symlink_to(other)


def test_the_links_of_the_hub_cache_are_taken(tmp_path):
    folder, params = written(tmp_path, "tensor=1", TINY)
    blobs, snapshot = tmp_path / "hub" / "blobs", tmp_path / "hub" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(folder.iterdir()):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    after = named(read(snapshot, "tensor=2"))
    np.testing.assert_array_equal(after["embedding"], params["embedding"])


def test_rounding_is_said(tmp_path):
    folder, _ = written(tmp_path, "tensor=1", TINY, "fp16")
    model = read_model(str(folder))
    said = {}
    for params in ("fp32", "bf16", "int8"):
        config = tiny_config(model=model, params=params)
        said[params] = Weights(config, mesh_of(config)).notes
    assert said["fp32"] == []
    assert said["bf16"] == [f"weights of {folder} are F16, here rounded to bf16"]
    assert "rounded to int8" in said["int8"][0]
