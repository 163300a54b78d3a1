"""How XLA takes memory from GPUs: settings that it reads from the environment as JAX starts.

XLA's own pool (`bfc`, the default) never grows beyond its share of the GPU's memory,
and by default takes all of it at the start. The driver's (`cuda_async`) can be made
to take a share at the start, but has no limit. `platform` has no pool: each array is
asked of the driver and given back to it, which waits for the device.
"""

from __future__ import annotations

import dataclasses
import math
import os
from typing import Any

import jax
from jax._src.xla_bridge import backends_are_initialized

from tpjax.config import ConfigError, PoolConfig, require

DEFAULT_POOL_FRACTION = 0.75  # of a GPU's memory, that JAX gives XLA's pool

# By field of `PoolConfig`: the variables that XLA reads, the one to set first.
_VARIABLES = {
    "pool_fraction": ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"),
    "preallocate": ("XLA_PYTHON_CLIENT_PREALLOCATE",),
    "allocator": ("XLA_PYTHON_CLIENT_ALLOCATOR",),
}


def runs_on_cpu() -> bool:
    """Whether JAX has started on the CPU, or is told to."""
    if backends_are_initialized():
        return jax.default_backend() == "cpu"
    return jax.config.values["jax_platforms"] == "cpu"


def set_pool(pool: PoolConfig) -> None:
    """Puts what the pool is asked to be into the environment, before JAX starts on GPUs.

    Raises:
        ConfigError: the environment says something else, or what is impossible together
            with it, or JAX has started without these settings.
    """
    settings = dataclasses.asdict(pool).items()
    asked: dict[str, Any] = {name: v for name, v in settings if v not in (None, "auto")}
    there = {name: found for name in _VARIABLES if (found := _read(name)) is not None}
    missing = {name: value for name, value in asked.items() if name not in there}
    others = [name for name in asked.keys() & there.keys() if there[name][1] != asked[name]]
    require(
        not (backends_are_initialized() and (missing or others)),
        f"JAX has already started with another pool than {' '.join(pool.flags)}; call "
        "tpjax.start_devices with the pool before any other use of JAX (in a notebook: restart the "
        "kernel), or leave it out.",
    )
    for name in others:
        variable = there[name][0]
        raise ConfigError(
            f"{name}={asked[name]} contradicts {variable}={os.environ[variable]} of the "
            "environment; unset that, or leave out the flag."
        )
    if asked:
        PoolConfig(**({name: value for name, (_, value) in there.items()} | asked))
    os.environ.update({_VARIABLES[name][0]: str(v).lower() for name, v in missing.items()})


def pool_is_limited() -> bool:
    """Whether the allocator that the environment names keeps to the pool's share."""
    found = _read("allocator")
    return found is None or found[1] == "bfc"


def why_not(pool: PoolConfig, peak_bytes: int, outside_bytes: int, memory_bytes: int) -> str | None:
    """Why a program does not fit into a GPU, in one line; None where it does.

    Args:
        peak_bytes: what it needs of the pool.
        outside_bytes: what lies outside the pool.
        memory_bytes: all that the GPU has.
    """
    if peak_bytes + outside_bytes > memory_bytes:
        return "it needs more than there is"
    if pool.pool_fraction is None:
        return None
    asked_bytes = int(pool.pool_fraction * memory_bytes)
    if peak_bytes > asked_bytes and pool.allocator != "cuda_async":
        return f"--pool-fraction={pool.pool_fraction:g} allows less than the peak; raise it"
    if asked_bytes + outside_bytes > memory_bytes and pool.preallocate is not False:
        return (
            f"--pool-fraction={pool.pool_fraction:g}, taken at the start, leaves too little for "
            "what lies outside the pool; lower it, or use --no-preallocate"
        )
    return None


def fraction_needed(
    pool: PoolConfig, peak_bytes: int, outside_bytes: int, memory_bytes: int
) -> float | None:
    """The pool's share that a program which fits has to ask for, rounded up as far as it
    leaves room for the rest; None where JAX's own share will do, where one was asked for,
    or where the allocator has no limit. Arguments as `why_not`."""
    if pool.pool_fraction is not None or pool.allocator not in ("auto", "bfc"):
        return None
    shares = [math.ceil(peak_bytes / memory_bytes * parts) / parts for parts in (100, 10_000)]
    room = 1 - outside_bytes / memory_bytes
    share = next((share for share in shares if share <= room), room)
    return share if share > DEFAULT_POOL_FRACTION else None


def _read(name: str) -> tuple[str, Any] | None:
    """The variable that decides a field and its value, as XLA reads it; None where none does."""
    for variable in _VARIABLES[name]:
        text = os.environ.get(variable, "")
        if not text or text.lower() == "default":  # XLA's word for its own choice
            continue
        if name == "allocator":
            return variable, text.lower()
        if name == "preallocate":
            return variable, text not in ("false", "False", "0")
        try:
            return variable, float(text)
        except ValueError:
            raise ConfigError(f"{variable}={text} of the environment is no number.") from None
    return None
