"""Every wrong value ends in one line that names it and the remedy."""

from __future__ import annotations

import dataclasses
import json

import pytest

from experiments.flags import parse_run
from tpjax.config import (
    ConfigError,
    DataConfig,
    MemoryConfig,
    MeshConfig,
    ModelConfig,
    OptimConfig,
    RopeConfig,
    TrainConfig,
)
from tpjax.gpus import gpu
from tpjax.presets import preset, preset_names, preset_run
from tpjax.resolve import resolve

PUBLISHED = {
    "gpt2": 124_439_808,
    "smollm2-135m": 134_515_008,
    "llama3.2-1b": 1_235_814_400,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
}


def test_presets_have_the_published_parameter_counts():
    for name, count in PUBLISHED.items():
        assert preset(name).num_parameters == count, name
    # nanoGPT prints 0.80M for this model with its 65 characters; ours has 257 byte tokens.
    characters = dataclasses.replace(preset("nanogpt-shakespeare"), vocab_size=65)
    assert characters.num_parameters == 804_096
    assert set(preset_names()) == {*PUBLISHED, "nano", "nanogpt-shakespeare"}


@pytest.mark.parametrize("name", preset_names())
def test_presets_run_on_the_default_devices(name):
    for platform in ("cpu", "gpu"):
        config = resolve(preset_run(name), num_devices=4, platform=platform)
        assert config.mesh is not None
        assert config.mesh.num_devices == 4
        assert config.memory.compute == ("fp32" if platform == "cpu" else "bf16")
        assert config.memory.loss_chunks > 0


@pytest.mark.parametrize("name", preset_names())
def test_padded_vocabulary_splits_over_every_allowed_axis(name):
    model = preset(name)
    for tensor in range(1, model.num_heads + 1):
        if model.num_heads % tensor == 0:
            assert model.padded_vocab_size % (tensor * model.table_parts) == 0
    assert 0 <= model.padded_vocab_size - model.vocab_size < 64 * model.num_heads


@pytest.mark.parametrize(("name", "parts"), [("llama3.2-1b", 8), ("qwen3-8b", 19), ("nano", 1)])
def test_tables_are_in_few_parts(name, parts):
    """Of at most 128 MiB in float32: a row more than the next divisor is cheap, a thousand
    parts are not."""
    assert preset(name).table_parts == parts


@pytest.mark.parametrize("name", preset_names())
def test_parts_of_tables_are_of_the_size_asked_for(name):
    model = preset(name)
    part_bytes = model.padded_vocab_size * model.embed_dim * 4 / model.table_parts
    assert part_bytes <= 128 * 2**20
    assert model.table_parts == 1 or part_bytes > 60 * 2**20


def test_default_mesh_goes_to_tensor_as_far_as_the_heads_allow():
    def mesh_for(name: str, devices: int, **data) -> str:
        config = dataclasses.replace(preset_run(name), data=DataConfig(**data))
        return str(resolve(config, num_devices=devices, platform="cpu").mesh)

    assert mesh_for("nano", 4, batch_size=8, seq_len=256) == "tensor=4"
    assert mesh_for("nano", 8, batch_size=8, seq_len=256) == "tensor=8"
    assert mesh_for("nano", 4, batch_size=8, seq_len=1) == "tensor=4"
    assert mesh_for("smollm2-135m", 4, batch_size=8, seq_len=512) == "data=4"
    assert mesh_for("smollm2-135m", 6, batch_size=8, seq_len=96 * 3) == "data=2,tensor=3"


def test_cudnn_attention_where_it_takes_the_shapes():
    def attention(H: int, T: int, platform: str = "gpu", **memory) -> str:
        config = dataclasses.replace(
            preset_run("nano"),
            model=dataclasses.replace(preset("nano"), head_dim=H),
            data=DataConfig(seq_len=T),
            memory=MemoryConfig(**memory),
            mesh=MeshConfig(),
        )
        return resolve(config, num_devices=1, platform=platform).memory.attention

    assert attention(64, 256) == "cudnn"
    assert attention(64, 256, "cpu") == attention(64, 256, compute="fp32") == "xla"
    assert attention(160, 256) == attention(20, 256) == attention(64, 255) == "xla"
    with pytest.raises(ConfigError, match="needs an even seq_len, not 255; use --attention=xla"):
        attention(64, 255, attention="cudnn")


def test_automatic_chunks_stay_below_their_limit():
    config = dataclasses.replace(
        preset_run("llama3.2-1b"), mesh=MeshConfig(tensor=4), data=DataConfig(batch_size=8)
    )
    chunks = resolve(config, num_devices=4, platform="gpu").memory.loss_chunks
    assert chunks == 32
    assert 8 * 2048 * 128_256 // 4 * 4 / chunks <= 64 * 1024**2


def resolved(name="nano", devices=4, **changes):
    return lambda: resolve(
        dataclasses.replace(preset_run(name), **changes), num_devices=devices, platform="cpu"
    )


WRONG = {
    "steps=0 must be greater than 0": lambda: TrainConfig(model=preset("nano"), steps=0),
    "seed=-1 must not be negative": lambda: TrainConfig(model=preset("nano"), seed=-1),
    "remat='dot' is not a choice. Did you mean dots": lambda: MemoryConfig(remat="dot"),
    "min_lr=0.1 must not exceed lr=0.01": lambda: OptimConfig(lr=0.01, min_lr=0.1),
    "beta2=1.0 must be at least 0 and below 1": lambda: OptimConfig(beta2=1.0),
    "corpus names no file": lambda: DataConfig(corpus=()),
    "model 'llama' is not a preset or a path. Did you mean llama": lambda: preset("llama"),
    "gpu 'h10' is unknown. Did you mean h100": lambda: gpu("h10"),
    "mesh axis 'tensr' is unknown. Did you mean tensor": lambda: MeshConfig.parse("tensr=2"),
    "mesh axis 'data' is named twice": lambda: MeshConfig.parse("data=2,data=2"),
    "mesh 'tensor' needs a whole number": lambda: MeshConfig.parse("tensor"),
    "tensor=0 must be greater than 0": lambda: MeshConfig.parse("tensor=0"),
    "rope kind=yarn needs original_max_seq_len": lambda: RopeConfig(kind="yarn"),
    "num_heads=8 must be a multiple of num_kv_heads=3": lambda: dataclasses.replace(
        preset("nano"), num_kv_heads=3
    ),
    "head_dim=15 must be even": lambda: dataclasses.replace(preset("nano"), head_dim=15),
    "mesh data=3,tensor=2 has 6 devices, but there are 8": resolved(
        devices=8, mesh=MeshConfig(data=3, tensor=2)
    ),
    "tensor=2 does not split smollm2-135m (9 heads, 3 key/value heads, feed-forward 1536); "
    "tensor may be 1, 3": resolved("smollm2-135m", 2, mesh=MeshConfig(tensor=2)),
    "fsdp=3 does not divide the model width 128": resolved(devices=3, mesh=MeshConfig(fsdp=3)),
    "batch_size=6 does not split into data × fsdp × accumulate = 4 parts; use a multiple of 4, "
    "such as 8": resolved(mesh=MeshConfig(data=4), data=DataConfig(batch_size=6, seq_len=64)),
    "seq_len=30 does not split over tensor=4": resolved(
        mesh=MeshConfig(tensor=4), data=DataConfig(seq_len=30)
    ),
    "seq_len=2048 exceeds the 1024 learned positions of gpt2": resolved(
        "gpt2", data=DataConfig(seq_len=2048), mesh=MeshConfig(tensor=4)
    ),
    "loss_chunks=3 does not divide the 64 tokens per sequence of a device; it may be 1, 2, 4": (
        resolved(mesh=MeshConfig(tensor=4), memory=MemoryConfig(loss_chunks=3))
    ),
    "split=3 is for --update=layerwise; --accumulate splits the batch of a whole update": (
        resolved(memory=MemoryConfig(split=3))
    ),
    "offload='residual' is not a choice. Did you mean residuals?": lambda: MemoryConfig(
        offload="residual"
    ),
    "attention=cudnn needs a GPU and compute=bf16 or fp16; use --attention=xla": resolved(
        memory=MemoryConfig(attention="cudnn")
    ),
    "remat=attention,qkv: attention=materialised has no attention to keep": resolved(
        memory=MemoryConfig(attention="materialised", remat="attention,qkv")
    ),
    "remat=nested cannot split the 7 layers of nano into equal groups; use --remat=full": resolved(
        model=dataclasses.replace(preset("nano"), num_layers=7), memory=MemoryConfig(remat="nested")
    ),
    "offload=residuals needs a choice of what to keep, and remat=none keeps everything": resolved(
        memory=MemoryConfig(offload="residuals", remat="none")
    ),
    "no mesh of 7 devices fits nano": resolved(devices=7),
    "warmup=100 must be below steps=50": resolved(steps=50, optim=OptimConfig(warmup=100)),
    "rope factor=2.0 needs a kind that stretches": lambda: RopeConfig(factor=2.0),
}


@pytest.mark.parametrize("message", WRONG)
def test_wrong_values_end_in_one_line(message):
    with pytest.raises(ConfigError) as error:
        WRONG[message]()
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_configurations_are_frozen_keyword_only_and_plain_data():
    with pytest.raises(TypeError):
        ModelConfig(257)
    config = resolve(preset_run("nano"), num_devices=4, platform="cpu")
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.steps = 3
    assert json.loads(json.dumps(dataclasses.asdict(config)))["mesh"]["tensor"] == 4


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        ("", None),
        ("--preallocate", True),
        ("--preallocate True", True),
        ("--preallocate=False", False),
        ("--no-preallocate --steps 3", False),
    ],
)
def test_what_can_be_left_alone_is_a_flag_with_or_without_a_value(flags, value):
    assert parse_run("", flags.split()).pool.preallocate is value


def test_offload_takes_its_names_in_any_order():
    memory = MemoryConfig(offload="moments,residuals")
    assert (memory.offloads_residuals, memory.offloads_moments) == (True, True)


def test_flags_set_what_they_name():
    flags = (
        "--model gpt2 --mesh fsdp=2,tensor=2 --remat=full --no-donate --corpus a b "
        "--no-tie-embeddings --no-sequence-parallel --lr 0.5 --warmup=7 --dry-run"
    )
    config = parse_run("", flags.split())
    assert config.model == preset("gpt2")
    assert config.mesh == MeshConfig(fsdp=2, tensor=2)
    assert config.memory == MemoryConfig(
        remat="full", donate=False, tie_embeddings=False, sequence_parallel=False
    )
    assert config.data.corpus == ("a", "b")
    assert (config.optim.lr, config.optim.warmup, config.dry_run) == (0.5, 7, True)
    resolved_model = resolve(config, num_devices=4, platform="cpu").model
    assert not resolved_model.tie_embeddings
    assert parse_run("", []) == preset_run("nano")
    shakespeare = parse_run("", ["--model=nanogpt-shakespeare", "--steps=3"])
    assert shakespeare == dataclasses.replace(preset_run("nanogpt-shakespeare"), steps=3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--remta=dots", "there is no flag --remta. Did you mean --remat"),
        ("--no-tie_embeddings --lr=-1", "lr=-1.0 must be greater than 0."),
        ("--remat=dot", "remat='dot' is not a choice. Did you mean dots?"),
        ("--steps many", "--steps"),
        ("--batch-size", "--batch-size"),
        ("--model nanoo", "model 'nanoo' is not a preset or a path. Did you mean nano?"),
        ("--mesh tensor:4", "mesh axis 'tensor:4' is unknown"),
        ("--lr=-1", "lr=-1.0 must be greater than 0."),
        ("dots", "dots"),
    ],
)
def test_wrong_flags_end_in_one_line(capsys, flags, message):
    with pytest.raises(SystemExit) as stop:
        parse_run("", flags.split())
    assert stop.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("error: ")
    assert message in printed
    assert printed.count("\n") == 1


def test_help_names_every_flag(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_run("Trains.", ["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for flag in ("--model", "--mesh", "--remat", "--no-donate", "--tie-embeddings", "--corpus"):
        assert flag in text
