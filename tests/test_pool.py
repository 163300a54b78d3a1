"""XLA's pool is what the flags ask for: set before JAX starts, checked after, part of what fits."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import TINY
from jaxlib.xla_client import generate_pjrt_gpu_plugin_options
from rich.console import Console
from test_live import POOL, FakeDevice

from experiments import screen
from tpjax import memory, mesh, pool
from tpjax.config import ConfigError, DataConfig, MeshConfig, PoolConfig, TrainConfig
from tpjax.gpus import GPUS, Outside, kind_of, outside_pool
from tpjax.memory import live
from tpjax.pool import fraction_needed, set_pool, why_not

ROOT = Path(__file__).parent.parent
FRACTION, OLD_FRACTION = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"
PREALLOCATE, ALLOCATOR = "XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_ALLOCATOR"
GIB = 2**30


@pytest.fixture
def environment(monkeypatch) -> dict[str, str]:
    """This process's, of which a test may change all; JAX is taken not to have started."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("XLA_")}
    monkeypatch.setattr(os, "environ", clean)
    monkeypatch.setattr(pool, "backends_are_initialized", lambda: False)
    return clean


@pytest.mark.parametrize(
    ("asked", "read"),
    [
        ({}, {"allocator": "default"}),
        (
            {"pool_fraction": 0.9, "preallocate": False, "allocator": "bfc"},
            {"memory_fraction": 0.9, "preallocate": False, "allocator": "bfc"},
        ),
        (
            {"preallocate": True, "allocator": "cuda_async"},
            {"preallocate": True, "allocator": "cuda_async"},
        ),
        ({"allocator": "platform"}, {"allocator": "platform"}),
        ({"pool_fraction": 1 / 3}, {"memory_fraction": 1 / 3, "allocator": "default"}),
    ],
)
def test_jax_reads_what_was_asked_for(environment, asked, read):
    """As its own reader of the environment says."""
    set_pool(PoolConfig(**asked))
    options = generate_pjrt_gpu_plugin_options()
    of_pool = ("memory_fraction", "preallocate", "allocator")
    assert {name: options[name] for name in of_pool if name in options} == read


@pytest.mark.parametrize(
    ("variables", "asked"),
    [
        ({FRACTION: "0.90"}, {"pool_fraction": 0.9}),
        ({OLD_FRACTION: ".9", PREALLOCATE: "yes"}, {"pool_fraction": 0.9, "preallocate": True}),
        ({ALLOCATOR: "BFC", PREALLOCATE: "0"}, {"allocator": "bfc", "preallocate": False}),
        ({OLD_FRACTION: "2", ALLOCATOR: "vmm"}, {}),  # nothing asked: what it likes
    ],
)
def test_what_the_environment_says_already_stays(environment, variables, asked):
    """JAX refuses both names of the fraction at once."""
    environment.update(variables)
    before = dict(environment)
    set_pool(PoolConfig(**asked))
    assert environment == before
    generate_pjrt_gpu_plugin_options()


@pytest.mark.parametrize(
    ("variables", "asked", "said"),
    [
        (
            {FRACTION: "0.5"},
            {"pool_fraction": 0.9},
            f"pool_fraction=0.9 contradicts {FRACTION}=0.5",
        ),
        ({OLD_FRACTION: "0.5"}, {"pool_fraction": 0.9}, f"contradicts {OLD_FRACTION}=0.5"),
        ({PREALLOCATE: "False"}, {"preallocate": True}, f"contradicts {PREALLOCATE}=False"),
        ({PREALLOCATE: "FALSE"}, {"preallocate": False}, f"contradicts {PREALLOCATE}=FALSE"),
        ({ALLOCATOR: "Platform"}, {"allocator": "bfc"}, f"contradicts {ALLOCATOR}=Platform"),
        ({ALLOCATOR: "platform"}, {"pool_fraction": 0.9}, "allocator=platform has no pool"),
        ({FRACTION: "0.9"}, {"allocator": "platform"}, "allocator=platform has no pool"),
        ({FRACTION: "most"}, {"pool_fraction": 0.9}, f"{FRACTION}=most of the environment is no"),
    ],
)
def test_an_environment_that_contradicts_is_refused(environment, variables, asked, said):
    environment.update(variables)
    before = dict(environment)
    with pytest.raises(ConfigError, match=re.escape(said)) as refused:
        set_pool(PoolConfig(**asked))
    assert "\n" not in str(refused.value)
    assert environment == before


def test_another_pool_after_the_start_is_refused(environment, monkeypatch):
    set_pool(PoolConfig(pool_fraction=0.9))
    monkeypatch.setattr(pool, "backends_are_initialized", lambda: True)
    set_pool(PoolConfig())
    set_pool(PoolConfig(pool_fraction=0.9))
    for other in (PoolConfig(pool_fraction=0.8), PoolConfig(preallocate=False)):
        with pytest.raises(ConfigError, match="JAX has already started with another pool") as said:
            set_pool(other)
        assert other.flags[0] in str(said.value)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"allocator": "platform", "preallocate": True}, "platform has no pool"),
        ({"allocator": "platform", "pool_fraction": 0.5}, "platform has no pool"),
        (
            {"allocator": "cuda_async", "pool_fraction": 0.5, "preallocate": False},
            "cuda_async has no limit",
        ),
        ({"pool_fraction": 1.01}, "pool_fraction=1.01 must be above 0 and at most 1"),
    ],
)
def test_impossible_choices_are_refused(settings, said):
    with pytest.raises(ConfigError, match=said):
        PoolConfig(**settings)
    PoolConfig(allocator="platform", preallocate=False)
    PoolConfig(allocator="cuda_async", pool_fraction=0.5)


def python(code: str, **environment: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("XLA_")}
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT,
        env=clean | environment, check=False,
    )  # fmt: skip


STARTS = """
import os, jax, tpjax
from jaxlib.xla_client import generate_pjrt_gpu_plugin_options
from tpjax import mesh, pool
real = jax.devices
def devices():  # as the CUDA plugin does when JAX starts
    print(generate_pjrt_gpu_plugin_options().get("memory_fraction"))
    return real()
jax.devices = devices
asked = tpjax.PoolConfig(pool_fraction=0.4)
"""


def test_the_pool_is_set_when_jax_starts_and_not_for_simulated_devices():
    on_gpus = "mesh.runs_on_cpu = lambda: False\n"
    start, other = "tpjax.start_devices(2, asked)\n", "tpjax.start_devices(2)\n"
    done = python(STARTS + on_gpus + start + start, JAX_PLATFORMS="cpu")
    assert done.stdout.split() == ["0.4", "0.4"], done.stderr
    done = python(STARTS + on_gpus + other + start, JAX_PLATFORMS="cpu")
    assert "ConfigError: JAX has already started with another pool" in done.stderr
    done = python(STARTS + other + start, JAX_PLATFORMS="cpu")
    assert done.stdout.split() == ["None", "None"], done.stderr


# After the start


@pytest.fixture
def gpu_of(monkeypatch):
    """Makes the driver give every GPU so many bytes; an H100 for the estimates."""

    def of(total: int | None) -> None:
        monkeypatch.setattr(live, "gpu_memory_bytes", lambda device: total)
        monkeypatch.setattr(FakeDevice, "device_kind", GPUS["h100"].name)

    return of


def limited(limit: int | None) -> FakeDevice:
    return FakeDevice({name: v for name, v in POOL.items() if v != 2000} | {"bytes_limit": limit})


def test_the_limit_after_the_start_is_the_one_asked_for(gpu_of):
    gpu_of(80 * GIB)
    asked = PoolConfig(pool_fraction=0.9)
    assert live.check_pool(asked, [limited(72 * GIB)] * 2) == "--pool-fraction=0.9"
    assert live.check_pool(asked, [limited(72 * GIB - 4096)]) == "--pool-fraction=0.9"
    with pytest.raises(ConfigError, match=r"cuda:0 may take 60.00 GiB of 80.00 GiB, which is not"):
        live.check_pool(asked, [limited(72 * GIB), limited(60 * GIB)])
    assert live.check_pool(PoolConfig(), [limited(60 * GIB)]) is None
    assert live.check_pool(PoolConfig(preallocate=False), [limited(1)]) == "--no-preallocate"


def test_a_limit_that_nobody_gives_is_not_available(gpu_of):
    gpu_of(80 * GIB)
    asked = PoolConfig(pool_fraction=0.9)
    said = live.check_pool(asked, [FakeDevice(None)])
    assert said == (
        "--pool-fraction=0.9: whether it is so is not available, because the gpu backend reports "
        "no memory statistics"
    )
    gpu_of(None)
    assert "the driver does not say how much" in str(live.check_pool(asked, [limited(72 * GIB)]))


def test_a_pool_that_leaves_too_little_outside_is_said(gpu_of):
    gpu_of(80 * GIB)
    devices = [limited(int(0.995 * 80 * GIB))] * 4
    said = live.check_pool(PoolConfig(pool_fraction=0.995), devices)
    outside = sum(part.bytes for part in outside_pool(GPUS["h100"], num_devices=4))
    assert f"leaves 409.6 MiB where about {outside / GIB:.2f} GiB are needed" in str(said)
    grows = PoolConfig(pool_fraction=0.995, preallocate=False)
    assert live.check_pool(grows, devices) == "--pool-fraction=0.995 --no-preallocate"


def test_flags_without_effect_on_simulated_devices_are_said():
    device = FakeDevice(None, platform="cpu")
    assert live.check_pool(PoolConfig(), [device]) is None
    said = live.check_pool(PoolConfig(preallocate=True, allocator="bfc"), [device])
    assert said == (
        "--preallocate --allocator=bfc: no effect, because simulated devices have no pool"
    )


def test_capacity_leaves_room_outside_a_large_pool(gpu_of, environment):
    gpu_of(80 * GIB)
    outside = sum(part.bytes for part in outside_pool(GPUS["h100"], num_devices=1))
    assert live.capacity([limited(60 * GIB)]) == (60 * GIB, None)
    assert live.capacity([limited(80 * GIB)]) == (80 * GIB - outside, None)
    environment[ALLOCATOR] = "cuda_async"  # its "limit" is what it takes at the start
    assert live.capacity([limited(60 * GIB)]) == (None, "this allocator has no limit")


def test_the_driver_says_how_much_memory_a_gpu_has(monkeypatch):
    class Driver:
        def cuInit(self, flags):
            return 0

        def cuDeviceGetCount(self, count):
            ctypes.cast(count, ctypes.POINTER(ctypes.c_int))[0] = 2
            return 0

        def cuDeviceGet(self, handle, ordinal):
            ctypes.cast(handle, ctypes.POINTER(ctypes.c_int))[0] = 40 + ordinal
            return 0

        def cuDeviceTotalMem_v2(self, size, handle):
            assert handle.value == 41
            ctypes.cast(size, ctypes.POINTER(ctypes.c_size_t))[0] = 80 * GIB
            return 0

    monkeypatch.setattr(mesh.ctypes, "CDLL", lambda name: Driver())
    monkeypatch.setattr(FakeDevice, "local_hardware_id", 1)
    assert mesh.gpu_memory_bytes(FakeDevice(None)) == 80 * GIB
    monkeypatch.setattr(Driver, "cuDeviceTotalMem_v2", lambda *_: 1)
    assert mesh.gpu_memory_bytes(FakeDevice(None)) is None


def test_kinds_are_known_by_what_the_driver_calls_them():
    assert {kind_of(gpu.name) for gpu in GPUS.values()} == set(GPUS)
    assert kind_of("nvidia  H100 80GB hbm3") == "h100"
    assert kind_of("cpu") is None


# What fits


def test_a_pool_asked_for_is_a_limit_and_leaves_room():
    """Of 1000 bytes, 100 lie outside the pool."""

    def why(peak: int, **asked) -> str | None:
        return why_not(PoolConfig(**asked), peak, 100, 1000)

    def fits(peak: int, **asked) -> bool:
        return why(peak, **asked) is None

    assert fits(900)
    assert not fits(901)
    assert fits(500, pool_fraction=0.5)
    assert "allows less than the peak" in str(
        why_not(PoolConfig(pool_fraction=0.5), 501, 100, 1000)
    )
    assert fits(501, pool_fraction=0.5, allocator="cuda_async")
    assert fits(10, pool_fraction=0.9)
    assert "leaves too little" in str(why(10, pool_fraction=0.91))
    assert fits(10, pool_fraction=0.91, preallocate=False)
    assert not fits(901, pool_fraction=1.0, preallocate=False)


@pytest.mark.parametrize("peak", [750, 751, 755, 888, 899, 899.99, 900])
def test_the_fraction_that_is_named_is_one_that_fits(peak):
    """Peaks of a card of 10⁶ bytes of which 10 % lie outside the pool."""
    sizes = (int(peak * 1000), 100_000, 1_000_000)
    share = fraction_needed(PoolConfig(), *sizes)
    assert (share is None) == (peak <= 750)
    if share is not None:
        assert why_not(PoolConfig(pool_fraction=share), *sizes) is None
        assert share - peak / 1000 < 0.01
    for settled in (PoolConfig(pool_fraction=0.9), PoolConfig(allocator="cuda_async")):
        assert fraction_needed(settled, *sizes) is None


def test_a_plan_judges_by_the_pool_asked_for(capsys):
    def planned(**asked) -> memory.MemoryReport:
        config = TrainConfig(
            model=TINY,
            mesh=MeshConfig(tensor=2),
            data=DataConfig(batch_size=8, seq_len=32),
            pool=PoolConfig(**asked),
        )
        return memory.report_run(config, gpu="rtx4090")

    def printed(report) -> str:
        Console(width=200).print(screen.whole(report))
        return " ".join(capsys.readouterr().out.split())

    card = GPUS["rtx4090"].memory_bytes
    enough = planned(pool_fraction=0.5)
    assert (enough.fits, enough.pool) == (True, PoolConfig(pool_fraction=0.5))
    assert enough.as_json()["pool"]["pool_fraction"] == 0.5
    small = planned(pool_fraction=enough.peak_bytes / card / 2)
    assert small.fits is False
    assert "allows less than the peak; raise it" in printed(small)
    assert planned(pool_fraction=0.999).fits is False
    assert planned(pool_fraction=0.999, preallocate=False).fits is True
    share = enough.peak_bytes / 0.8
    tight = dataclasses.replace(planned(), capacity_bytes=int(share), outside_pool=())
    assert tight.fits is None
    tight = dataclasses.replace(tight, outside_pool=(Outside(what="x", bytes=1, source=""),))
    assert f"set --pool-fraction={tight.pool_fraction:g}" in printed(tight)
