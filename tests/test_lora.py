"""Adapters beside frozen weights: the mathematics of the merged model, and nothing else trained."""

from __future__ import annotations

import dataclasses
import json

import jax
import numpy as np
import pytest
from conftest import (
    TINY,
    TINY_GPT2,
    mesh_of,
    params_of,
    random_batch,
    random_rows,
    tiny_config,
    tiny_run,
    to_numpy,
)
from safetensors.numpy import load_file

from experiments.flags import parse_run
from experiments.summary import summary
from tpjax import lora, quant
from tpjax.config import (
    ConfigError,
    DataConfig,
    LoraConfig,
    MemoryConfig,
    MeshConfig,
    ModelConfig,
    TrainConfig,
)
from tpjax.data import place
from tpjax.evaluate import evaluate
from tpjax.export import export
from tpjax.hf.model import read_model
from tpjax.hf.names import letters_of
from tpjax.hf.save import save
from tpjax.inference import ModelSource, load
from tpjax.loop import train
from tpjax.memory.advice import _changes
from tpjax.memory.compiled import compile_for
from tpjax.presets import preset
from tpjax.resolve import resolve
from tpjax.state import abstract_state, create_state, leaf_name
from tpjax.step import loss_and_gradients, lower_train_step

LORA = LoraConfig(lora_rank=3, lora_alpha=6.0)
INT8 = tiny_config("tensor=2", params="int8")


def adapted(mesh: str, model: ModelConfig = TINY, targets: str = "all", **memory) -> TrainConfig:
    how = dataclasses.replace(LORA, lora_targets=targets)
    return tiny_config(mesh, model=dataclasses.replace(model, lora=how), **memory)


def named(tree: dict) -> dict:
    return {leaf_name(keys): leaf for keys, leaf in jax.tree.leaves_with_path(tree)}


def trained_state(config: TrainConfig):
    """With a B that is not zero."""
    state = create_state(config, mesh_of(config))
    rng = np.random.default_rng(1)

    def one(x):
        return jax.device_put(rng.normal(0, 0.1, x.shape).astype(np.float32), x.sharding)

    return dataclasses.replace(state, params=jax.tree.map(one, state.params))


@pytest.mark.parametrize(
    ("mesh", "model", "targets"),
    [
        ("tensor=1", TINY, "all"),
        ("tensor=4", TINY, "all"),
        ("tensor=8", TINY, "q,k,v"),
        ("data=2,fsdp=2,tensor=2", TINY, "all"),
        ("fsdp=2,tensor=4", TINY_GPT2, "v,o,up,down"),
        ("tensor=2", TINY_GPT2, "all"),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_merged_model(mesh, model, targets):
    config = adapted(mesh, model, targets)
    state, rows = trained_state(config), random_rows(config)
    with jax.set_mesh(mesh_of(config)):
        batch = place(rows, mesh_of(config))
        loss, gradients = jax.jit(
            lambda state, batch: loss_and_gradients(
                config, state.params, batch, frozen=state.frozen
            )
        )(state, batch)
    # The same model on one device, its weights merged: dA = dW Bᵀ s and dB = Aᵀ dW s.
    plain = tiny_config(model=model)
    adapters = {path: np.asarray(x) for path, x in named(state.params).items()}
    base = named(to_numpy(state.frozen))
    wanted = [path for path in base if path.rpartition(".")[2] in config.model.adapted]
    assert adapters.keys() == {lora.adapter_path(path, part) for path in wanted for part in "ab"}
    merged, scale = dict(base), config.model.lora.scale
    for path, w in base.items():
        name = path.rpartition(".")[2]
        if name in config.model.adapted:
            a, b = (adapters[lora.adapter_path(path, part)] for part in "ab")
            flat = np.einsum("lia,lao->lio", a.reshape(len(a), -1, 3), b.reshape(len(b), 3, -1))
            merged[path] = w + scale * flat.reshape(w.shape)
    one = create_state(plain, mesh_of(plain))
    leaves = [merged[leaf_name(keys)] for keys, _ in jax.tree.leaves_with_path(one.params)]
    params = jax.tree.unflatten(jax.tree.structure(one.params), leaves)
    with jax.set_mesh(mesh_of(plain)):
        batch = place(rows, mesh_of(plain))
        wanted, of_weights = jax.jit(lambda p, b: loss_and_gradients(plain, p, b))(params, batch)
    np.testing.assert_allclose(float(loss), float(wanted), rtol=1e-5)
    of_weights, found = named(to_numpy(of_weights)), named(to_numpy(gradients))
    assert found.keys() == adapters.keys()
    for path in base:
        if path.rpartition(".")[2] not in config.model.adapted:
            continue
        a, b = (adapters[lora.adapter_path(path, part)] for part in "ab")
        dw = of_weights[path].reshape(len(a), a[0].size // 3, -1)
        da = scale * np.einsum("lio,lao->lia", dw, b.reshape(len(b), 3, -1))
        db = scale * np.einsum("lia,lio->lao", a.reshape(len(a), -1, 3), dw)
        for part, value in (("a", da), ("b", db)):
            got = found[lora.adapter_path(path, part)]
            largest = np.abs(value).max()
            np.testing.assert_allclose(got, value.reshape(got.shape), atol=1e-4 * largest)


@pytest.mark.parametrize("params", ["bf16", "int8", "nf4"])
def test_a_coarse_base_has_the_gradients_of_its_values(params):
    """Equal to those over a float32 base with the values that the coarse one stands for."""
    config, exact = (adapted("fsdp=2,tensor=2", params=p) for p in (params, "fp32"))
    state, results = trained_state(config), []
    with jax.set_mesh(mesh_of(config)):
        values = jax.jit(
            lambda frozen: jax.tree.map(
                lambda w: quant.value(w, "float32"), frozen, is_leaf=quant.is_quantised
            )
        )(state.frozen)
        batch = random_batch(config, mesh_of(config))
        for one, frozen in ((config, state.frozen), (exact, values)):
            step = jax.jit(lambda p, f, c=one: loss_and_gradients(c, p, batch, frozen=f))
            results.append(to_numpy(step(state.params, frozen)))
    (loss, gradients), (wanted, of_values) = results
    assert loss == pytest.approx(wanted, rel=1e-6)
    for name, value in named(of_values).items():
        found = named(gradients)[name]
        np.testing.assert_allclose(found, value, atol=1e-5 * np.abs(value).max(), err_msg=name)


def test_a_4_bit_base_needs_its_bytes_and_no_more():
    """Compiled for H100: 4 bits and a bf16 scale for 32 of them, tables in int8 with float32
    scales for 128; what else the step needs is what it needs over int8."""
    model = preset("llama3.2-1b")
    sizes, args, held = [], [], []
    for params in ("int8", "nf4"):
        config = TrainConfig(
            model=model,
            mesh=MeshConfig(),
            memory=MemoryConfig(params=params, remat="full"),
            data=DataConfig(batch_size=1, seq_len=1024),
            lora=LoraConfig(lora_rank=16),
        )
        compilation = compile_for(config)
        lines = compilation.ledger.lines
        held.append(sum(line.bytes for line in lines if line.kind == "parameters"))
        sizes.append(memory := compilation.executable.memory_analysis())
        args.append(memory.argument_size_in_bytes)
    D, F, L, kv = model.embed_dim, model.mlp_dim, model.num_layers, 8 * 64
    matrices = L * (2 * D * D + 2 * D * kv + 3 * D * F)
    table = model.padded_vocab_size * D
    adapters = L * 16 * (2 * (D + D) + 2 * (D + kv) + 3 * (D + F))
    gains = 4 * (2 * L + 1) * D
    rest = gains + table + table // 128 * 4 + 3 * 4 * adapters
    assert args[0] == pytest.approx(rest + matrices * (1 + 4 / 128), rel=0.02)  # H is 64
    assert args[1] == pytest.approx(rest + matrices * (1 / 2 + 2 / 32), rel=1e-3)
    # The frozen ones count as parameters; beside them there are an adapter's two moments.
    assert held[1] == pytest.approx(args[1] - 2 * 4 * adapters, rel=1e-3)
    assert sizes[1].temp_size_in_bytes <= 1.02 * sizes[0].temp_size_in_bytes


@pytest.mark.parametrize("params", ["fp32", "bf16", "int8", "nf4"])
def test_a_step_changes_adapters_and_nothing_else(params):
    config = adapted("fsdp=2,tensor=2", params=params, moments="int8")
    mesh = mesh_of(config)
    state = create_state(config, mesh)
    before = to_numpy((state.params, state.frozen))
    assert all(x.dtype == np.float32 for x in jax.tree.leaves(before[0]))
    step = lower_train_step(config, mesh).compile()
    sizes = step.memory_analysis()
    assert sizes.alias_size_in_bytes >= sum(
        x.size * x.dtype.itemsize // 4 for x in jax.tree.leaves(state.frozen)
    )
    for number in range(2):  # B begins at zero, so that A moves from the second step on
        state, metrics = step(state, random_batch(config, mesh, number))
    after = to_numpy((state.params, state.frozen))
    jax.tree.map(np.testing.assert_array_equal, before[1], after[1])
    for name, value in named(after[0]).items():
        assert (value != named(before[0])[name]).any(), name
    assert float(metrics["grad_norm"]) > 0
    moments = {leaf_name(k) for k, x in jax.tree.leaves_with_path(state.opt_state) if x.size > 1}
    assert all("adapters" in name or "count" in name or "step" in name for name in moments)


def test_four_bits_are_advised_beside_adapters_alone():
    for config, advised in ((adapted("tensor=2", params="int8"), True), (INT8, False)):
        assert ("--params=nf4" in [flags for flags, _ in _changes(config)]) == advised


def test_a_fresh_adapter_changes_nothing():
    config, plain = adapted("tensor=2"), tiny_config("tensor=2")
    state, losses = create_state(config, mesh_of(config)), []
    for one, weights in ((config, state.weights), (plain, state.frozen)):
        with jax.set_mesh(mesh_of(one)):
            batch = random_batch(one, mesh_of(one))
            loss = jax.jit(lambda p, b, c=one: loss_and_gradients(c, p, b)[0])(weights, batch)
            losses.append(float(loss))
    assert losses[0] == losses[1]


def test_every_adapter_has_the_letters_of_its_projection():
    for name in ("q", "k", "v", "o", "gate", "up", "down"):
        a, b = letters_of(f"{name}_a"), letters_of(f"{name}_b")
        assert a[:-1] + b[1:] == letters_of(name)
        assert (a[-1], b[0]) == ("A", "A")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A folder with a model of bytes."""
    folder = tmp_path_factory.mktemp("base") / "model"
    config = tiny_config(model=dataclasses.replace(TINY, vocab_size=257))
    params = create_state(config, mesh_of(config)).params
    save(config.model, mesh_of(config), named(params).items(), folder, "fp32")
    return folder


def lora_run(tmp_path, base, **settings):
    run = tiny_run(tmp_path, steps=6, lora=LORA, model=read_model(str(base)))
    data = dataclasses.replace(run.data, tokenizer="bytes")
    return dataclasses.replace(run, data=data, **settings)


def test_a_run_saves_adapters_only_goes_on_and_is_exported_merged(tmp_path, base):
    run = lora_run(tmp_path, base)
    whole = train(run)
    assert whole.out is not None
    said = dict(zip(*(list(column.cells) for column in summary(whole).columns), strict=True))
    assert said["adapters"] == "rank 3, alpha 6, beside all projections"
    kept = sum(f.stat().st_size for f in whole.checkpoint.rglob("*") if f.is_file())
    assert kept < (base / "model.safetensors").stat().st_size
    # Five and one steps, and the second start on another mesh's devices.
    halves = dataclasses.replace(run, out=str(tmp_path / "halves"))
    stopped = dataclasses.replace(halves.recovery, stop_after=5)
    assert train(dataclasses.replace(halves, recovery=stopped)).steps == 5
    train(halves)
    adapters = [params_of(tmp_path / name) for name in ("run", "halves")]
    for path, value in adapters[0].items():
        np.testing.assert_array_equal(value, adapters[1][path])
    export(whole.out, tmp_path / "merged")
    before, after = (load_file(f / "model.safetensors") for f in (base, tmp_path / "merged"))
    assert before.keys() == after.keys()
    name = "model.layers.1.mlp.down_proj.weight"
    a, b = (adapters[0][f"blocks.mlp.adapters.weights.down_{part}"][1] for part in "ab")
    np.testing.assert_allclose(after[name], before[name] + 2.0 * (a @ b).T, atol=1e-6)
    assert (after[name] != before[name]).any()
    embedding = "model.embed_tokens.weight"
    np.testing.assert_array_equal(after[embedding], before[embedding])
    texts = []
    for source in (
        ModelSource(out=str(whole.out)),
        ModelSource(model=str(tmp_path / "merged"), tokenizer="bytes"),
    ):
        found = evaluate(source, run.data.corpus, 4, 16)
        texts.append(found.loss)
    assert texts[0] == pytest.approx(texts[1], rel=1e-5)


def test_a_4_bit_model_computes_with_the_values_it_is_written_with(tmp_path, base):
    loaded = load(ModelSource(model=str(base), tokenizer="bytes", params="nf4"), 4, 16)
    leaves = jax.tree.leaves_with_path(loaded.params, is_leaf=quant.is_quantised)
    values = [(leaf_name(keys), value) for keys, value in leaves]
    assert {value.bits for _, value in values if quant.is_quantised(value)} == {4, 8}
    save(loaded.config.model, loaded.mesh, values, tmp_path / "coarse", "fp32")
    corpus = lora_run(tmp_path, base).data.corpus
    losses = []
    for folder, params in ((base, "fp32"), (base, "nf4"), (tmp_path / "coarse", "fp32")):
        source = ModelSource(model=str(folder), tokenizer="bytes", params=params)
        losses.append(evaluate(source, corpus, 4, 16).loss)
    assert losses[1] == pytest.approx(losses[2], rel=1e-6)
    assert losses[1] != losses[0]


def test_adapters_are_written_as_peft_reads_them(tmp_path, base):
    out = train(lora_run(tmp_path, base)).out
    export(out, tmp_path / "adapters", adapters=True)
    found = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    settings = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (settings["r"], settings["lora_alpha"]) == (3, 6.0)
    assert settings["target_modules"] == sorted(
        f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")
    )
    assert len(found) == 2 * 2 * 7
    weights = params_of(out)
    prefix = "base_model.model.model.layers.1.self_attn.q_proj"
    a, b = (weights[f"blocks.attention.adapters.weights.q_{part}"][1] for part in "ab")
    np.testing.assert_array_equal(found[f"{prefix}.lora_A.weight"], a.T)
    np.testing.assert_array_equal(found[f"{prefix}.lora_B.weight"], b.reshape(3, 64).T)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--params nf4", "params=nf4 is too coarse for weights that are to change"),
        ("--lora-rank -1", "lora_rank=-1 must not be negative"),
        ("--lora-rank 4 --lora-targets q,x", "lora_targets='q,x' is not a choice"),
        ("--lora-rank 4 --update layerwise --remat full", "does not go with update=layerwise"),
        ("--lora-rank 4 --lora-targets gate --model gpt2 --seq-len 64", "gpt2 has no gate"),
    ],
)
def test_adapters_that_cannot_be_are_refused(flags, said, capsys):
    def run_of(flags: str) -> None:
        resolve(parse_run("", flags.split()), num_devices=1, platform="cpu")

    with pytest.raises((ConfigError, SystemExit)) as error:
        run_of(f"{flags} --devices 1")
    assert said in str(error.value) + capsys.readouterr().err


def test_a_mesh_that_does_not_split_adapters_is_refused():
    with pytest.raises(ConfigError, match="fsdp × tensor must divide the model width 32"):
        adapted("fsdp=8,tensor=8")


def test_an_adapter_is_in_shards_over_both_axes():
    """But for its rank: of its width each of four devices has a quarter, or half of the heads."""
    params = abstract_state(adapted("fsdp=2,tensor=2"), mesh_of(adapted("fsdp=2,tensor=2"))).params
    shapes = {
        path.rpartition(".")[2]: leaf.sharding.shard_shape(leaf.shape)
        for path, leaf in named(params).items()
    }
    assert (shapes["q_a"], shapes["q_b"]) == ((2, 8, 3), (2, 3, 4, 8))
    assert (shapes["down_a"], shapes["down_b"]) == ((2, 32, 3), (2, 3, 8))


def test_blocks_of_4_bits_that_a_mesh_would_cut_are_refused():
    """2560 / 80 are 32 blocks of 8 bits, 2560 / 32 are 80 of 4."""

    def resolved(params: str) -> TrainConfig:
        run = TrainConfig(
            model=dataclasses.replace(TINY, embed_dim=2560, lora=LORA),
            mesh=MeshConfig(fsdp=32),
            memory=MemoryConfig(params=params),
            data=DataConfig(batch_size=32, seq_len=32),
        )
        return resolve(run, num_devices=32, platform="cpu")

    assert resolved("int8").memory.params == "int8"
    with pytest.raises(ConfigError, match=r"fsdp=32 would cut .* fsdp may be 1, 2, 4, 8, 16\."):
        resolved("nf4")
