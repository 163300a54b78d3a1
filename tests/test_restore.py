"""Checkpoints onto other meshes and into other number formats."""

from __future__ import annotations

import dataclasses
import itertools
import socket
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import TINY, initial_state, mesh_of, tiny_config, to_numpy

from tpjax import checkpoint, quant
from tpjax.config import ConfigError, MeshConfig, RecoveryConfig, TrainConfig
from tpjax.restore import Restoration
from tpjax.resume import about
from tpjax.saver import Saver
from tpjax.sharding import bytes_per_device
from tpjax.state import TrainState, abstract_state

ROOT = Path(__file__).parent.parent
MESHES = [
    "tensor=4",
    "fsdp=2,tensor=2",
    "tensor=1",
    "data=2,fsdp=2,tensor=2",
    "tensor=8",
    "tensor=4",
]
MEMORY = {
    "fp32": {},
    "bf16": {"params": "bf16", "moments": "bf16"},
    "int8": {"params": "int8", "moments": "int8"},
    "factored": {"params": "bf16", "moments": "factored"},
    "fp16": {"compute": "fp16"},
}


@lru_cache
def random_state(config: TrainConfig, mesh) -> TrainState:
    """A state with noise in every array, second moments and scales positive."""
    rng = np.random.default_rng(0)

    def noise(keys, leaf):
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            values = rng.normal(size=leaf.shape)
            second = any(getattr(key, "name", "") in ("nu", "scales") for key in keys)
            values = np.asarray(abs(values) if second else values, leaf.dtype)
        elif leaf.dtype == jnp.uint32:  # the seed is the run's
            values = np.zeros((), np.uint32)
        else:
            values = rng.integers(0, 100, leaf.shape).astype(leaf.dtype)
        return jax.device_put(values, leaf.sharding)

    return jax.tree.map_with_path(noise, initial_state(config, mesh))


def save(config: TrainConfig, state: TrainState, folder: Path) -> checkpoint.Checkpoint:
    folder.mkdir(exist_ok=True)
    step = len(checkpoint.steps_in(folder))
    with Saver(folder, RecoveryConfig(keep=99), abstract_state(config, mesh_of(config))) as to:
        to.save(state, about(config, "", checkpoint.Progress(step=step)))
    return checkpoint.choose(folder, "must")


def restore(found: checkpoint.Checkpoint, config: TrainConfig) -> TrainState:
    return Restoration(found, config, mesh_of(config)).state()


@pytest.mark.parametrize("memory", MEMORY)
def test_from_mesh_to_mesh_every_bit_stays(memory, tmp_path):
    configs = [tiny_config(mesh, **MEMORY[memory]) for mesh in MESHES]
    state = random_state(configs[0], mesh_of(configs[0]))
    first = to_numpy(state)
    for config, target in itertools.pairwise(configs):
        found = save(config, state, tmp_path / "checkpoints")
        restoration = Restoration(found, target, mesh_of(target))
        assert restoration.notes == []
        state = restoration.state()
        for leaf, like in zip(
            jax.tree.leaves(state),
            jax.tree.leaves(abstract_state(target, mesh_of(target))),
            strict=True,
        ):
            assert leaf.sharding == like.sharding
        jax.tree.map(np.testing.assert_array_equal, to_numpy(state), first)


PROCESS = """
import sys; sys.path.insert(0, "tests")
import jax
from test_restore import numbered, tiny_config  # configures JAX for eight devices
jax.config.update("jax_num_cpu_devices", 2)
number, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=number)
from pathlib import Path
import numpy as np
from tpjax.checkpoint import Progress
from tpjax.config import RecoveryConfig
from tpjax.mesh import make_mesh
from tpjax.resume import about
from tpjax.saver import Saver
from tpjax.state import abstract_state
config = tiny_config("tensor=4")
shapes = abstract_state(config, make_mesh(config.mesh, config.model, jax.devices()))
state = jax.tree.map(
    lambda x: jax.make_array_from_callback(x.shape, x.sharding, lambda i: numbered(x)[i]), shapes
)
with Saver(Path(folder), RecoveryConfig(keep=1), shapes) as to:
    for step in (1, 2):
        to.save(state, about(config, "", Progress(step=step)))
        to.wait()
"""


def numbered(leaf) -> np.ndarray:
    """Every element another number, as far as there are any."""
    return np.arange(leaf.size).reshape(leaf.shape).astype(leaf.dtype)


def test_two_processes_write_one_checkpoint(tmp_path):
    """Each has half of the devices and writes their shards; one process reads them all."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    command = [sys.executable, "-c", PROCESS]
    both = [
        subprocess.Popen([*command, str(i), port, str(folder)], cwd=ROOT, stderr=subprocess.PIPE)
        for i in range(2)
    ]
    for process in both:
        error = process.communicate()[1].decode()
        assert process.returncode == 0, error
    assert [path.name for path in folder.iterdir()] == ["00000002"]
    written = [folder / "00000002" / f"ocdbt.process_{i}" / "d" for i in range(2)]
    sizes = [sum(file.stat().st_size for file in of.iterdir()) for of in written]
    assert min(sizes) > 0.45 * sum(sizes)
    config = dataclasses.replace(tiny_config("tensor=1"), seed=0)
    state = restore(checkpoint.choose(folder, "must"), config)
    jax.tree.map(lambda x: np.testing.assert_array_equal(np.asarray(x), numbered(x)), state)


@pytest.mark.parametrize("params", ["fp32", "int8"])
def test_no_device_ever_holds_more_than_its_shards(params, tmp_path, monkeypatch):
    """Everything that is put on a device while a checkpoint is read is counted: what waits at
    once beside the state is one array's shard."""
    config = tiny_config("tensor=4")
    target = tiny_config("fsdp=2,tensor=2", params=params)
    found = save(config, random_state(config, mesh_of(config)), tmp_path / "checkpoints")
    put, sizes = jax.device_put, []

    def counted(x, device=None, **how):
        done = put(x, device, **how)
        sizes.extend(shard.data.nbytes for shard in done.addressable_shards)
        return done

    monkeypatch.setattr(jax, "device_put", counted)
    restoration = Restoration(found, target, mesh_of(target))
    before, most = _bytes_of_first(), 0
    read = restoration._read

    def watched(*of):
        nonlocal most
        array = read(*of)
        most = max(most, _bytes_of_first() - before)
        return array

    monkeypatch.setattr(restoration, "_read", watched)
    state = restoration.state()
    # As stored and as it is here: where nothing is converted they are the same.
    stored = abstract_state(tiny_config("fsdp=2,tensor=2"), mesh_of(target))
    shards = [x.sharding.shard_shape(x.shape) for x in jax.tree.leaves(stored)]
    largest = max(int(np.prod(shape)) * 4 for shape in shards)
    assert len(sizes) > 4 * len(jax.tree.leaves(state))
    assert max(sizes) == largest < stored.params["embedding"].size * 4 / 2
    assert most <= bytes_per_device(state) + largest


def _bytes_of_first() -> int:
    """Bytes of all arrays alive on the first device."""
    device = jax.devices()[0]
    shards = [s.data for x in jax.live_arrays() for s in x.addressable_shards if s.device == device]
    return sum({data.unsafe_buffer_pointer(): data.nbytes for data in shards}.values())


def test_parameters_are_converted_where_that_is_asked_for(tmp_path):
    config = tiny_config("tensor=4")
    state = random_state(config, mesh_of(config))
    found = save(config, state, tmp_path / "checkpoints")
    bf16 = tiny_config("fsdp=2,tensor=2", params="bf16")
    restoration = Restoration(found, bf16, mesh_of(bf16))
    assert restoration.notes == [
        "the parameters are float32 in the checkpoint and bfloat16 from here on"
    ]
    done = restoration.state()
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a).astype(b.dtype), np.asarray(b)),
        state.params,
        done.params,
    )
    jax.tree.map(np.testing.assert_array_equal, to_numpy(state.opt_state), to_numpy(done.opt_state))

    int8 = tiny_config("fsdp=2,tensor=2", params="int8", moments="int8")
    restoration = Restoration(found, int8, mesh_of(int8))
    assert restoration.notes == [
        "the parameters are float32 in the checkpoint and int8 from here on",
        "the moments are float32 in the checkpoint and int8 from here on",
    ]
    done = restoration.state()
    _near(state.params["embedding"], done.params["embedding"])
    was, now = (x.opt_state["tables"]["embedding"][0] for x in (state, done))
    _near(was.mu["embedding"], now.mu["embedding"])
    _near(np.sqrt(was.nu["embedding"]), now.nu["embedding"])

    back = tiny_config("tensor=8")
    again = restore(save(int8, done, tmp_path / "checkpoints"), back)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(_values(a), np.asarray(b)),
        done.params,
        again.params,
        is_leaf=quant.is_quantised,
    )
    second = again.opt_state["tables"]["embedding"][0].nu["embedding"]
    np.testing.assert_allclose(np.asarray(second), _values(now.nu["embedding"]) ** 2, rtol=1e-6)


def _values(x) -> np.ndarray:
    """In NumPy, so that the conversion is not compared with itself."""
    if not isinstance(x, quant.Quantised):
        return np.asarray(x)
    codes, scales = np.asarray(x.codes, np.float32), np.asarray(x.scales)
    for axis, (n, blocks) in enumerate(zip(codes.shape, scales.shape, strict=True)):
        scales = np.repeat(scales, n // blocks, axis)
    return codes * scales


def _near(values, stored: quant.Quantised) -> None:
    """Each is at most half a step of its block away, or is kept from becoming zero."""
    scales = _values(dataclasses.replace(stored, codes=np.ones(stored.shape)))
    distance = np.abs(np.asarray(values) - _values(stored))
    kept = (np.asarray(stored.codes) == 1) & (distance <= scales)
    assert ((distance <= scales / 2 * 1.00001) | kept).all()
    assert len(np.unique(np.asarray(stored.codes))) > 20


def test_a_loss_scale_comes_and_goes(tmp_path):
    fp32, fp16 = tiny_config("tensor=2"), tiny_config("tensor=2", compute="fp16")
    found = save(fp32, random_state(fp32, mesh_of(fp32)), tmp_path / "checkpoints")
    restoration = Restoration(found, fp16, mesh_of(fp16))
    assert restoration.notes == ["the loss scale begins anew, as the checkpoint has none"]
    state = restoration.state()
    assert (float(state.loss_scale.scale), int(state.loss_scale.good_steps)) == (2.0**16, 0)
    assert restore(save(fp16, state, tmp_path / "checkpoints"), fp32).loss_scale is None


def test_the_seed_is_the_runs(tmp_path):
    config = tiny_config("tensor=2")
    found = save(config, random_state(config, mesh_of(config)), tmp_path / "checkpoints")
    assert int(restore(found, dataclasses.replace(config, seed=7)).seed) == 7


OTHERS = {
    "layers": ({"num_layers": 3}, r"its \S+ is of another shape"),
    "width": ({"embed_dim": 64, "head_dim": 16}, r"its \S+ is of another shape"),
    "vocabulary": ({"vocab_size": 300}, r"its \S+embedding is of another shape"),
    "untied": ({"tie_embeddings": False}, r"\S+head is not in it"),
    "biases": ({"qkv_bias": True}, r"\S+ is not in it"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_another_model_is_named(other, tmp_path):
    config = tiny_config("tensor=2")
    found = save(config, initial_state(config, mesh_of(config)), tmp_path / "checkpoints")
    change, said = OTHERS[other]
    target = tiny_config("tensor=2", model=dataclasses.replace(TINY, **change))
    line = rf"checkpoint {found.path} is of another model: {said}. Start with the model that it"
    with pytest.raises(ConfigError, match=line):
        Restoration(found, target, mesh_of(target))
    back = save(target, initial_state(target, mesh_of(target)), tmp_path / "others")
    with pytest.raises(ConfigError, match="is of another model"):
        Restoration(back, config, mesh_of(config))


@pytest.mark.parametrize("moments", ["fp32", "int8"])
def test_factored_moments_stay_what_they_are(moments, tmp_path):
    plain, factored = (tiny_config("tensor=2", moments=m) for m in (moments, "factored"))
    for config, target in ((plain, factored), (factored, plain)):
        folder = tmp_path / config.memory.moments
        found = save(config, initial_state(config, mesh_of(config)), folder)
        with pytest.raises(ConfigError, match=r"factored.*Keep --moments as it was"):
            Restoration(found, target, mesh_of(target))


def test_int8_blocks_that_a_mesh_would_cut_are_named(tmp_path):
    model = dataclasses.replace(TINY, embed_dim=48)  # 16 blocks of 3
    config = tiny_config("tensor=2", model=model, params="int8")
    found = save(config, initial_state(config, mesh_of(config)), tmp_path / "checkpoints")
    plain = tiny_config("tensor=1", model=model, params="fp32")
    target = dataclasses.replace(plain, mesh=MeshConfig(fsdp=3))
    with pytest.raises(ConfigError, match="the mesh would cut its blocks of 8-bit numbers"):
        Restoration(found, target, mesh_of(target))
