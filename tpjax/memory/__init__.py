"""What a program needs of each device's memory, before it runs and while it does."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tpjax.memory.compiled import absent_mesh, compile_for
    from tpjax.memory.explain import report, report_run
    from tpjax.memory.live import live_memory
    from tpjax.memory.picture import draw
    from tpjax.memory.records import MemoryReport

_HOMES = {
    "MemoryReport": "records",
    "absent_mesh": "compiled",
    "compile_for": "compiled",
    "draw": "picture",
    "live_memory": "live",
    "report": "explain",
    "report_run": "explain",
}

__all__ = [
    "MemoryReport",
    "absent_mesh",
    "compile_for",
    "draw",
    "live_memory",
    "report",
    "report_run",
]


def __getattr__(name: str):
    """Imports what is asked for; nothing of JAX before."""
    if name not in _HOMES:
        raise AttributeError(f"module 'tpjax.memory' has no attribute {name!r}")
    return getattr(importlib.import_module(f"tpjax.memory.{_HOMES[name]}"), name)
