"""Checkpoints as files: whole or named as what they are, kept, removed, and never half there."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import resource
import shutil
import zlib
from functools import lru_cache, partial
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import initial_state, mesh_of, tiny_config
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.checkpoint import Peak
from benchmarks.faults import read_arrays
from tpjax import checkpoint
from tpjax.checkpoint import About, Damaged, Progress
from tpjax.config import ConfigError, RecoveryConfig
from tpjax.resume import about, versions
from tpjax.saver import SaveFailed, Saver
from tpjax.state import abstract_state, leaf_name


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A folder of two whole checkpoints, of steps 10 and 20."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoints"
    with saver(folder) as to:
        for step in (10, 20):
            to.save(_state(), _about(step))
            to.wait()
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> Path:
    """A copy of it, to damage."""
    return Path(shutil.copytree(saved, tmp_path / "checkpoints"))


CONFIG = tiny_config("data=2,tensor=2", moments="int8")


def saver(folder: Path, **recovery) -> Saver:
    folder.mkdir(exist_ok=True)
    return Saver(folder, RecoveryConfig(**recovery), abstract_state(CONFIG, mesh_of(CONFIG)))


@lru_cache
def _state():
    return initial_state(CONFIG, mesh_of(CONFIG))


def _about(step: int, loss: float | None = None) -> About:
    return about(CONFIG, "the text", Progress(step=step, sequences=8 * step, eval_loss=loss))


def _save(to: Saver, step: int) -> None:
    to.save(_state(), _about(step))
    to.wait()


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_everything_is_in_it_and_beside_it(saved):
    arrays = read_arrays(saved / "00000020")
    state = {leaf_name(keys): leaf for keys, leaf in jax.tree.leaves_with_path(_state())}
    assert arrays.keys() == state.keys()
    moments = "opt_state.tables.embedding.0.mu.embedding.codes"
    assert {"step", "seed", "params.embedding", moments} <= arrays.keys()
    for name, leaf in state.items():
        assert arrays[name].dtype == leaf.dtype
        assert arrays[name].tobytes() == np.asarray(leaf).tobytes(), name
    found, wrong = checkpoint.newest(saved)
    assert (found.path, found.skipped, wrong) == (saved / "00000020", (), ())
    assert found.about == About(
        progress=Progress(step=20, sequences=160),
        config=json.loads(json.dumps(dataclasses.asdict(CONFIG))),
        versions=versions(),
        text="the text",
    )
    assert found.about.versions["jax"] == jax.__version__


def test_each_device_writes_its_own_shards(saved):
    """As many chunks as the mesh has shards: nothing was put together to be written."""
    import orbax.checkpoint as ocp

    tree = ocp.PyTreeCheckpointer().metadata(saved / "00000020").item_metadata.tree
    state = {leaf_name(keys): leaf for keys, leaf in jax.tree.leaves_with_path(_state())}
    assert any(leaf.sharding.shard_shape(leaf.shape) != leaf.shape for leaf in state.values())
    for name, leaf in state.items():
        assert tree[name].storage.chunk_shape == leaf.sharding.shard_shape(leaf.shape), name


def _truncate(path: Path, size: int) -> None:
    with path.open("r+b") as file:
        file.truncate(size)


def _data(path: Path) -> Path:
    """The largest file of a checkpoint."""
    return max((p for p in path.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)


def _flip(path: Path) -> None:
    data = bytearray(_data(path).read_bytes())
    data[len(data) // 2] ^= 1
    _data(path).write_bytes(data)


def _edit(path: Path, **values) -> None:
    run = json.loads((path / "run.json").read_text())
    run = {name: value for name, value in (run | values).items() if name != "crc32"}
    crc32 = zlib.crc32(json.dumps(run, sort_keys=True).encode())
    (path / "run.json").write_text(json.dumps({"crc32": crc32, **run}))


def _files(path: Path) -> dict:
    return json.loads((path / "run.json").read_text())["files"]


def _swap(path: Path, old: str, new: str) -> None:
    """Without the checksum of what is changed."""
    text = (path / "run.json").read_text()
    assert old in text
    (path / "run.json").write_text(text.replace(old, new))


def _progress(path: Path, **values) -> None:
    _edit(path, progress=json.loads((path / "run.json").read_text())["progress"] | values)


def _empty_all(path: Path) -> None:
    for file in path.rglob("*"):
        if file.is_file():
            _truncate(file, 0)


def _link_out(path: Path) -> None:
    target = _data(path).rename(path.parent.parent / "elsewhere")
    (path / "d" / "link").symlink_to(target)


def _empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def _replace_by_link(path: Path) -> None:
    moved = path.rename(path.parent.parent / f"moved-{path.name}")
    path.symlink_to(moved)


def _name_outside(path: Path) -> None:
    (path.parent.parent / "secret").write_text("x")
    files = json.loads((path / "run.json").read_text())["files"]
    _edit(path, files=files | {"../../secret": [1, 0]})


DAMAGES = {
    "truncated": (lambda p: _truncate(_data(p), 100), r"has 100 bytes of \d+ in ocdbt"),
    "emptied": (lambda p: _truncate(_data(p), 0), r"has 0 bytes of \d+ in ocdbt"),
    "all emptied": (_empty_all, "has a run.json that is no JSON object"),
    "one bit": (_flip, "has other bytes than were written in ocdbt"),
    "empty folder": (_empty, "is empty"),
    "a file": (lambda p: (shutil.rmtree(p), p.write_text("")), "is no folder"),
    "a link": (_replace_by_link, "is no folder"),
    "data missing": (lambda p: _data(p).unlink(), "lacks its file ocdbt"),
    "metadata missing": (lambda p: (p / "_METADATA").unlink(), "lacks its file _METADATA"),
    "another project": (lambda p: (p / "run.json").unlink(), "has no run.json: not tpjax's, or"),
    "no settings": (lambda p: (p / "config.json").unlink(), "has no config.json"),
    "settings cut": (lambda p: _truncate(p / "config.json", 9), "config.json that is no JSON"),
    "a list": (lambda p: (p / "run.json").write_text("[1]"), "run.json that is no JSON object"),
    "other format": (lambda p: _edit(p, format=9), "is of format 9, where this tpjax reads 1"),
    "no progress": (lambda p: _edit(p, progress={"step": 1, "x": 2}), "makes no sense"),
    "negative step": (lambda p: _edit(p, progress={"step": -1, "health": {}}), "makes no sense"),
    "words for numbers": (lambda p: _progress(p, eval_loss="low"), "makes no sense"),
    "an endless loss": (lambda p: _progress(p, eval_loss=float("inf")), "makes no sense"),
    "odd health": (lambda p: _progress(p, health={"level": [1]}), "makes no sense"),
    "half a file": (lambda p: _edit(p, files={"_METADATA": [1]}), "makes no sense"),
    "deep": (lambda p: (p / "run.json").write_text("[" * 10**5), "run.json that is no JSON object"),
    "an endless size": (lambda p: _edit(p, files={"a": [float("inf"), 0]}), "makes no sense"),
    "a name of none": (lambda p: _edit(p, files={"a\0": [1, 0]}), "lacks its|no sense|not its own"),
    "a long name": (lambda p: _edit(p, files=_files(p) | {"a" * 5000: [1, 0]}), "cannot be read"),
    "a pipe": (lambda p: ((p / "run.json").unlink(), os.mkfifo(p / "run.json")), "no JSON object"),
    "another place": (lambda p: _swap(p, '"sequences": ', '"sequences": 1'), "makes no sense"),
    "another step": (lambda p: _progress(p, step=15), "is of step 15"),
    "a stranger": (lambda p: (p / "x.pkl").write_text(""), "file that is not its own, x.pkl"),
    "a link inside": (_link_out, "holds d/link, which is neither a file nor a folder"),
    "a path outside": (_name_outside, "lacks its file ../../secret"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_the_newest_whole_one_is_found_and_the_others_named(folder, damage):
    spoil, said = DAMAGES[damage]
    spoil(folder / "00000020")
    found, _ = checkpoint.newest(folder)
    assert found.path == folder / "00000010"
    (skipped,) = found.skipped
    assert skipped.startswith(f"{folder / '00000020'} ")
    with pytest.raises(Damaged, match=said):
        checkpoint.check(folder / "00000020")
    spoil(folder / "00000010")
    with pytest.raises(ConfigError, match=r"no checkpoint in .* is whole: .*00000020.*00000010"):
        checkpoint.choose(folder, "auto")


def test_nothing_to_find(tmp_path):
    for there in (False, True):
        if there:
            (tmp_path / "c" / "00000001.orbax-checkpoint-tmp").mkdir(parents=True)
        assert checkpoint.choose(tmp_path / "c", "auto") is None
        with pytest.raises(ConfigError, match="resume=must, but there is no checkpoint in"):
            checkpoint.choose(tmp_path / "c", "must")
    (tmp_path / "c" / "step_100").mkdir()
    with pytest.raises(ConfigError, match=r"is whole: .*/step_100 is not tpjax's. Name another"):
        checkpoint.choose(tmp_path / "c", "auto")


def test_what_crashes_leave_is_removed_and_later_steps_set_aside(folder):
    shutil.copytree(folder / "00000020", folder / "00000030.orbax-checkpoint-tmp")
    shutil.copytree(folder / "00000010", folder / "00000005.dropped")
    _empty(folder / "00000020")
    with saver(folder) as to:
        checkpoint.set_aside(folder, after=10)
        assert _names(folder) == ["00000010", "00000020.damaged"]
        to.save(_state(), _about(20))
    assert _names(folder) == ["00000010", "00000020", "00000020.damaged"]
    assert checkpoint.newest(folder)[0].path.name == "00000020"


def test_the_newest_and_the_best_are_kept(tmp_path):
    losses = {1: 3.0, 2: 1.0, 3: None, 4: 2.0, 5: None, 6: 1.0}
    with saver(tmp_path / "c", keep=2) as to:
        for step, loss in losses.items():
            to.save(_state(), _about(step, loss))
    assert _names(tmp_path / "c") == [
        "00000002",
        "00000005",
        "00000006",
    ]
    assert to.last.name == "00000006"


def test_a_relative_folder_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with saver(Path("here")) as to:
        to.save(_state(), _about(1))
    assert checkpoint.newest(Path("here"))[0].path == Path("here/00000001")


@pytest.fixture
def small_files():
    """The operating system refuses to write files of more than 4 KiB, as a full disk would."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(size: int = limits[0]) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))

    yield limit
    limit()


@pytest.mark.parametrize("copy", [True, False])
def test_a_save_that_fails_is_told_and_the_last_one_stays(folder, small_files, copy, capfd):
    with saver(folder, checkpoint_copy=copy) as to:
        to.last = folder / "00000020"
        small_files(4096)
        with pytest.raises(SaveFailed) as failed:
            _save(to, 30)
        small_files()
        said = str(failed.value)
        assert said.startswith(f"checkpoint {folder / '00000030'} could not be written: ")
        assert "File too large" in said
        assert said.endswith(f"; the last whole one is {folder / '00000020'}.")
        assert "\n" not in said
        assert _names(folder) == ["00000010", "00000020"]
        assert checkpoint.newest(folder)[0].path == folder / "00000020"
        to.save(_state(), _about(40))  # and the next one is written
    assert checkpoint.newest(folder)[0].path == folder / "00000040"
    assert "Traceback" not in capfd.readouterr().err


def test_a_disk_without_room_is_seen_before_anything_is_written(folder, monkeypatch):
    usage = shutil.disk_usage(folder)._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with (
        saver(folder) as to,
        pytest.raises(
            SaveFailed, match=r"it needs \d\d\d,\d\d\d bytes, and the disk has 1,000 free"
        ),
    ):
        to.save(_state(), _about(30))
    assert _names(folder) == ["00000010", "00000020"]


def test_a_crash_in_the_last_moment_leaves_no_checkpoint(folder, monkeypatch):
    """Between Orbax's last file and the folder's name; what is said beside is there."""

    def crash(self, path):
        (path / "run.json.part").write_text("{")
        raise RuntimeError("the end")

    monkeypatch.setattr(About, "write", crash)
    with saver(folder) as to, pytest.raises(SaveFailed, match="the end"):
        _save(to, 30)
    assert checkpoint.newest(folder)[0].path == folder / "00000020"


def test_without_a_copy_a_save_returns_when_all_is_written(tmp_path):
    with saver(tmp_path / "c", checkpoint_copy=False) as to:
        to.save(_state(), _about(1))
        assert to.last == tmp_path / "c" / "00000001"


def _pointers(state) -> set[int]:
    shards = [s for x in jax.tree.leaves(state) for s in x.addressable_shards]
    return {shard.data.unsafe_buffer_pointer() for shard in shards}


def test_sizes_are_those_of_the_state(tmp_path):
    state = abstract_state(CONFIG, mesh_of(CONFIG))
    leaves = jax.tree.leaves(state)
    with saver(tmp_path) as to:
        assert to.state_bytes == sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)


@pytest.mark.parametrize("memory", ["device", "pinned_host"])
@pytest.mark.parametrize("copy", [True, False])
def test_saving_takes_one_copy_of_the_state_or_two_shards(copy, memory, tmp_path):
    """Anonymous memory of the process while 256 MiB are saved, each device with 8 of 64; with
    moments that wait in the host's memory as on the device."""
    mesh = Mesh(np.array(jax.devices()), "x")
    sharding = NamedSharding(mesh, PartitionSpec("x"), memory_kind=memory)
    array = np.random.default_rng(0).integers(0, 255, 2**26, np.uint8)
    state = {name: jax.device_put(array, sharding, may_alias=False) for name in "abcd"}
    jax.block_until_ready(state)
    largest, whole = 2**23, 2**28

    def add_one(x):
        x = jax.device_put(x, jax.memory.Space.Device) + 1
        return jax.device_put(x, jax.memory.Space.Host) if memory == "pinned_host" else x

    change = partial(jax.tree.map, add_one)
    step = jax.jit(change, donate_argnums=0, out_shardings=sharding).lower(state).compile()
    pointers = _pointers(state)
    saver = Saver(tmp_path, RecoveryConfig(checkpoint_copy=copy), state)
    with saver, Peak() as peak:
        saver.save(state, _about(1))
        if copy:  # in place, while the copy is being written
            state = jax.block_until_ready(step(state))
        saver.wait()
    assert _pointers(state) == pointers
    assert (whole / 2 if copy else 0) < peak.bytes < (1.1 * whole if copy else 2 * largest)
    assert read_arrays(tmp_path / "00000001")["d"].tobytes() == array.tobytes()
