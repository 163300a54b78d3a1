"""What a value of a compiled program is: its kind, and a name that a user knows.

From the paths of the program's arguments and results, and from the scopes and
primitives that JAX writes into each operation's `op_name`. It knows no model:
scopes are those of `jax.named_scope`, whoever sets them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from tpjax.memory.buffers import Value
from tpjax.memory.forms import forms, signature, signatures
from tpjax.memory.hlo import Index, Instruction, Origin, Program
from tpjax.memory.paths import Place, path_kind, readable

# Instructions that hand values on under the name of something larger.
_CARRIERS = {"while", "tuple", "get-tuple-element", "parameter", "conditional", "call"}
_ATTENTION = re.compile(r"\b(attend|dot_product_attention|flash_attention|mha)")
_LOGITS = re.compile(r"logits|log_softmax|cross_entropy")
_MOST_MAKERS = 32  # to look at, for what a value is made of
_PARAMETER = re.compile(r"\b(kernel|bias|embedding|w\d*|p)\b")  # one of them, as an argument
_REAL = re.compile(r"(b?f\d)")  # dtypes that parameters have


@dataclass(frozen=True)
class Description:
    """Kind (of `records.KINDS`), name and source line of a value, and whether it is made
    going back through the program."""

    kind: str
    name: str
    source: str | None
    backward: bool = False


class Namer:
    """Describes the values of one program.

    Args:
        program: its text.
        outputs: the path of each result, in order.
        axis_sizes: of the mesh: what a gradient may be larger by before it is scattered.
    """

    def __init__(self, program: Program, outputs: Sequence[str], axis_sizes: Sequence[int] = ()):
        self.program = program
        self.arguments = {
            int(one.arguments): one for one in program.by_computation[""] if _is_argument(one)
        }
        self._scales = tuple(sorted({size for size in axis_sizes if size > 1}))
        self._alike: dict[tuple, str | None] = {}  # what `parameter_like` has found
        self._ends = dict(zip(outputs, _results(program), strict=False))
        self._outputs = self._output_places()

    @cached_property
    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Path → local shape, of the arguments that are parameters."""
        found = {}
        for one in self.arguments.values():
            if self.argument(int(one.arguments)).kind == "parameters" and (shape := _shape(one)):
                found[readable(one.op_name)] = shape
        return found

    def argument(self, number: int) -> Description:
        """The argument of that number."""
        one = self.arguments.get(number)
        path = readable(one.op_name) if one is not None and one.op_name else f"argument {number}"
        kind = path_kind(path)
        if kind is None:
            is_real = one is not None and _REAL.match(one.result) is not None
            kind = "parameters" if is_real and _tree(path) in self._models else "inputs"
        return Description(kind, path, None)

    @cached_property
    def _models(self) -> set[str]:
        """The arguments that are trees with parameters in them: where some leaf is called
        what only parameters are called, all are."""
        paths = [readable(one.op_name) for one in self.arguments.values()]
        named = [p for p in paths if path_kind(p) == "parameters" or _PARAMETER.search(p.lower())]
        return {_tree(path) for path in named}

    @cached_property
    def updates(self) -> dict[str, set[int]]:
        """The path of each result → the numbers of the arguments of its shape and dtype that
        it is made of directly (with all results of the same kernel)."""
        found: dict[str, set[int]] = {path: set() for path in self._ends}
        for path, name in self._ends.items():
            place: tuple[str, Index] = (name, ())
            while (step := self.program.same(*place)) is not None:
                place = step
            maker, index = self.program.instructions[place[0]], place[1]
            parts = maker.operands
            if maker.opcode == "while" and index:
                parts = self.program.instructions[maker.operands[0]].operands[index[0] :][:1]
            for part in parts:
                made_of = self.program.origin(part).instruction
                if _is_argument(made_of) and made_of.result.partition("{")[0] in maker.result:
                    found[path].add(int(made_of.arguments))
        return found

    def is_argument(self, value: Value, number: int) -> bool:
        """Whether a value is the argument of that number as it came in."""
        one = self.arguments.get(number)
        return one is not None and value.instruction == one.name

    def result(self, value: Value) -> Description | None:
        """The program's result that a value is, or None."""
        path = self._outputs.get((value.instruction, value.index))
        if path is None:
            return None
        made = self.made(self.program.origin(value.instruction, value.index), value.shape)
        kind = "gradients" if made.backward else path_kind(path)
        if kind is None:  # a parameter's new value, where it ends as the old one does
            old = [self.argument(number) for number in self.updates[path]]
            ends = [d for d in old if d.kind == "parameters" and _last(d.name) == _last(path)]
            kind = "parameters" if ends else None
        return Description(kind or made.kind, path, made.source)

    def result_shape(self, path: str) -> tuple[int, ...] | None:
        """The shape of the result of that path, which may be another where it is made."""
        return _shape(self.program.instructions[self._ends[path]]) if path in self._ends else None

    def value(self, value: Value) -> Description:
        """A temporary value, or a result that no path describes."""
        if value.is_table:
            return Description("other", "tables of pointers", None)
        place = (value.instruction, value.index)
        origin = self.program.origin(*place)
        if origin.instruction.opcode in ("broadcast", "constant") and (
            place in self.program.carried  # what a loop starts from: named for what it becomes
        ):
            origin = self.program.origin(*self.program.carried[place])
        maker, index = origin.instruction, origin.index
        if maker.opcode == "custom-call" and index and index[-1] and value.dtype in ("s8", "u8"):
            return self._described("workspace", origin)
        if maker.collective and not origin.stored:
            inner = self.operand(maker, origin.operand_number, value.shape)
            return Description("collectives", f"{maker.collective} of {inner.name}", inner.source)
        made = self.made(origin, value.shape)
        if _is_argument(maker) and value.instruction != maker.name:  # cast, moved, or a part
            return dataclasses.replace(made, name=f"{made.name} (copy)")
        return made

    def value_name(self, instruction: str, index: Index) -> str:
        """The name alone, of a value whose shape does not matter."""
        return self.made(self.program.origin(instruction, index), ()).name

    def operand(self, one: Instruction, number: int, shape: tuple[int, ...]) -> Description:
        """What an instruction gets as an operand; `shape` is what is known of it."""
        return self.made(self.program.origin(one.operands[number]), shape)

    def made(self, origin: Origin, shape: tuple[int, ...]) -> Description:
        """A value of that origin and shape; a collective's, for what it moves."""
        while origin.instruction.collective:
            moved = origin.instruction.operands[origin.operand_number]
            inner = self.program.origin(moved)
            origin = Origin(inner.instruction, inner.index, origin.path + inner.path)
        if _is_argument(origin.instruction):
            return self.argument(int(origin.instruction.arguments))
        place, _ = self._place(origin)
        if place is None:
            return self._described("other", origin)
        if _ATTENTION.search(f"{place.scope}/{place.primitive}"):
            return self._described("attention", origin)
        if _LOGITS.search(place.scope):
            return self._described("logits", origin)
        if (parameter := self.parameter_like(shape, place.scope, _merged(origin))) and (
            place.backward
            or "update" in place.scope
            or (not place.scope and self._follows_backward(origin.instruction))
        ):
            described = self._described("gradients", origin)
            return dataclasses.replace(described, name=f"gradient of {parameter}")
        return self._described("activations", origin)

    def parameter_like(
        self, shape: tuple[int, ...], scope: str, merged: bool = False
    ) -> str | None:
        """As `_parameter_like`, asked once for each kind of array."""
        asked = (shape, scope, merged)
        if asked not in self._alike:
            self._alike[asked] = self._parameter_like(*asked)
        return self._alike[asked]

    def _parameter_like(self, shape: tuple[int, ...], scope: str, merged: bool) -> str | None:
        """The parameter that an array is as large as, or one layer of it.

        Where the scope names a parameter, in any order of the dimensions; where it
        names none, in the parameter's own order; without a scope, whichever fit. If the
        array is a part of a `merged` matmul, the scope is that of one part, and any of
        its neighbours may be meant that has its shape.
        """
        dims = signature(shape)
        if not dims:
            return None
        named = {p: w for p, w in self.parameters.items() if _ends(p, scope, neighbours=merged)}
        fitting = [
            path
            for path, whole in sorted((named or self.parameters).items())
            if shape in forms(whole, self._scales)
            or (not merged and (named or not scope) and dims in signatures(whole, self._scales))
        ]
        if len(fitting) > 3:
            return f"one of {len(fitting)} parameters of this shape"
        return " or ".join(fitting) or None

    def _place(self, origin: Origin) -> tuple[Place | None, Instruction]:
        """The operation nearest to the value that lies in a user's scope (further back where
        that is inside of it), or else the one that made it, or else what that was made of."""
        found: tuple[Place, Instruction] | None = None
        for one in origin.path:
            if one.opcode not in _CARRIERS and one.op_name:
                place = Place.parse(one.op_name)
                if place.scope.startswith(f"{found[0].scope}/" if found else "") and place.scope:
                    found = place, one
        if found is not None:
            return found
        for one in self._makers(origin.instruction):
            return Place.parse(one.op_name), one
        return None, origin.instruction

    def _makers(self, maker: Instruction) -> Iterator[Instruction]:
        """The instruction and those that its operands come from, the nearest first; without
        the program's arguments and what has no `op_name`."""
        queue, seen = [maker], set()
        while queue and len(seen) < _MOST_MAKERS:
            one = queue.pop(0)
            if one.name in seen:
                continue
            seen.add(one.name)
            if one.op_name and not _is_argument(one):
                yield one
            queue += [
                self.program.origin(name).instruction
                for name in one.operands
                if name in self.program.instructions
            ]

    def _follows_backward(self, maker: Instruction) -> bool:
        """Whether a value without a scope is made of what the backward pass has made."""
        return any(Place.parse(one.op_name).backward for one in self._makers(maker))

    def _described(self, kind: str, origin: Origin) -> Description:
        place, one = self._place(origin)
        source = self.program.source(one) or self.program.source(origin.instruction)
        if place is None:
            return Description(kind, origin.instruction.opcode, source)
        name = place.scope or place.primitive
        if kind == "workspace":
            name = f"workspace of {name}"
        elif place.recomputed:
            name = f"{name} (recomputed)"
        elif place.backward:
            name = f"gradient at {name}"
        return Description(kind, name, source, place.backward)

    def _output_places(self) -> dict[tuple[str, Index], str]:
        """Where the results are: every name that a result has on its way to the end."""
        places = {}
        for path, name in self._ends.items():
            index: Index = ()
            while True:
                places[name, index] = path
                step = self.program.same(name, index)
                if step is None:
                    break
                name, index = step
        return places


def _results(program: Program) -> tuple[str, ...]:
    """The instructions that give the program's results."""
    root = program.roots[""]
    return root.operands if root.opcode == "tuple" else (root.name,)


def _tree(path: str) -> str:
    """The argument that a path begins with."""
    return re.split(r"[.\[]", path)[0]


def _last(path: str) -> str:
    """The last word of a path, or nothing where it is a single one."""
    return (re.findall(r"\w+", path)[1:] or [""])[-1]


def _shape(one: Instruction) -> tuple[int, ...]:
    """An instruction's, where it gives one array."""
    dims = re.match(r"\w+\[([\d,]*)\]", one.result)
    return tuple(int(d) for d in dims[1].split(",") if d) if dims else ()


def _is_argument(one: Instruction) -> bool:
    return one.opcode == "parameter" and one.computation == ""


def _merged(origin: Origin) -> bool:
    """Whether a value is cut out of a matmul that XLA made of several, named after one."""
    made_by = origin.instruction.op_name
    return any(one.opcode == "slice" and one.op_name == made_by != "" for one in origin.path)


def _ends(path: str, scope: str, neighbours: bool = False) -> bool:
    """Whether a parameter's path, such as "p['blocks']['mlp']['up']", ends as a scope does,
    or (`neighbours`) but for the last part."""
    words = re.findall(r"\w+", path)
    parts = scope.split("/")
    if neighbours:
        return len(parts) > 1 and words[-2:-1] == parts[-2:-1]
    return bool(scope) and (words[-len(parts) :] == parts or words[-2:] == parts[-2:])
