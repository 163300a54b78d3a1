"""The shapes in which a parameter, or its gradient, turns up in a compiled program."""

from __future__ import annotations

import math
from functools import lru_cache


def signature(shape: tuple[int, ...]) -> tuple[int, ...]:
    """A shape without order and without ones: what transposes and reshapes leave of it."""
    return tuple(sorted(d for d in shape if d > 1))


@lru_cache
def forms(whole: tuple[int, ...], scales: tuple[int, ...]) -> list[tuple[int, ...]]:
    """A parameter's local shape and that of one layer of it, as they are and with one
    dimension gathered over a mesh axis."""
    found = []
    for shape in (whole, whole[1:]):
        found.append(shape)
        for scale in scales:
            for i, size in enumerate(shape):
                found.append((*shape[:i], size * scale, *shape[i + 1 :]))
    return found


@lru_cache
def signatures(whole: tuple[int, ...], scales: tuple[int, ...]) -> set[tuple[int, ...]]:
    """The forms without order, and as the matrices that matmuls make of them."""
    found = set()
    for form in forms(whole, scales):
        found.add(signature(form))
        if len(form) > 2:
            found.add(signature((form[0], math.prod(form[1:]))))
            found.add(signature((math.prod(form[:-1]), form[-1])))
    return found
