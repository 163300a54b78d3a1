"""JAX's names taken apart: paths of arguments and results, and the `op_name` of operations."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

# Parts of an op_name that say how JAX got there, not what is computed.
_STRUCTURE = {"while", "body", "cond", "scan", "closed_call", "core_call", "eval_jaxpr", "pjit"}
_STRUCTURE |= {"checkpoint", "remat", "rematted_computation", "shard_map", "main"}
_STRUCTURE |= {"custom_vjp_call", "custom_jvp_call"}
_BRANCH = re.compile(r"^branch_\d+_fun$")  # of lax.cond
_WRAPPER = re.compile(r"^(\w+)\((.*)\)$")
_MOMENTS = re.compile(r"\b(opt\w*|mu|nu|moments?|momentum|trace|velocity|exp_avg\w*)\b")
_PARAMETERS = re.compile(r"\b(params?|parameters|weights?|model|variables|theta|frozen)\b")
_GRADIENTS = re.compile(r"\b(grads?|gradients?)\b")


def readable(path: str) -> str:
    """A path of JAX's without its brackets: "p['mlp']['up']" → "p.mlp.up"."""
    return re.sub(r"\['([^']*)'\]", r".\1", path)


def path_kind(path: str) -> str | None:
    """The kind that the path of an argument or result names, or None."""
    words = path.lower()
    for pattern, kind in (
        (_GRADIENTS, "gradients"),
        (_MOMENTS, "moments"),
        (_PARAMETERS, "parameters"),
    ):
        if pattern.search(words):
            return kind
    return None


@dataclass(frozen=True)
class Place:
    """An `op_name` taken apart.

    Attributes:
        scope: the user's scopes, joined by "/".
        primitive: the last part.
        backward: computed while going back through the program.
        recomputed: computed a second time for the backward pass.
    """

    scope: str
    primitive: str
    backward: bool
    recomputed: bool

    @classmethod
    @lru_cache(maxsize=4096)
    def parse(cls, op_name: str) -> Place:
        # Where XLA joins several operations, the first: "a;b" or "outer/(a:b)".
        parts = _split(op_name.partition(";")[0])
        if parts[-1].startswith("("):
            parts[-1:] = _split(parts[-1][1:].partition(":")[0])
        scopes = [scope for part in parts[:-1] for scope in _scopes(part)]
        recomputed = "rematted_computation" in parts
        backward = "transpose(" in op_name or any(s.endswith("_gradient") for s in scopes)
        called = _WRAPPER.match(parts[-1])
        primitive = called[2] if called else parts[-1]
        return cls("/".join(scopes), primitive, backward and not recomputed, recomputed)


def _split(op_name: str) -> list[str]:
    """At slashes that are not inside parentheses."""
    parts, depth = [""], 0
    for character in op_name:
        depth += (character == "(") - (character == ")")
        if character == "/" and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def _scopes(part: str) -> list[str]:
    """The user's scopes in one part: those inside jvp(…) and the like, too."""
    if wrapped := _WRAPPER.match(part):
        if wrapped[1] in ("jit", "pjit"):
            return []
        return [scope for inner in _split(wrapped[2]) for scope in _scopes(inner)]
    structure = part in _STRUCTURE or "->" in part or _BRANCH.match(part)
    return [] if not part or structure else [part]
