"""Flags ↔ configuration, shared by the programs of this folder."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_type_hints

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec

from tpjax.config import ConfigError, MeshConfig, ModelConfig, TrainConfig, nearest, require
from tpjax.presets import preset, preset_names, preset_run

T = TypeVar("T")

# A flag that is on, off or left as the model has it is one word of these for tyro.
_THREE_WAY = {
    word: [flag, value]
    for flag in ("--tie-embeddings", "--preallocate")
    for word, value in ((flag, "True"), (flag.replace("--", "--no-", 1), "False"))
}


def parse_run(description: str, argv: list[str] | None = None) -> TrainConfig:
    """The run that the command line asks for, as `parse`."""
    return parse(TrainConfig, lambda run: run, description, argv)


def parse(
    kind: type[T], default: Callable[[TrainConfig], T], description: str, argv: list[str] | None
) -> T:
    """A configuration from flags; the defaults of a run's are those of `--model`.

    Ends the process with status 2 and one clear line where a flag is wrong.

    Args:
        kind: a dataclass of flags, `TrainConfig` or one that holds it.
        default: makes one from a run's defaults.
    """
    argv = [_hyphens(arg) for arg in (sys.argv[1:] if argv is None else argv)]
    messages = io.StringIO()
    try:
        _check_names(kind, argv)
        words = list(_words(argv))
        with contextlib.redirect_stderr(messages):
            return tyro.cli(
                kind,
                args=words,
                default=default(preset_run(_model_name(argv))),
                description=description,
                config=(tyro.conf.OmitArgPrefixes,),
                registry=_registry(),
            )
    except ConfigError as error:
        fail(str(error))
    except SystemExit as stop:
        if stop.code:
            fail(_first_message(messages.getvalue()))
        raise


def fail(message: str, status: int = 2) -> NoReturn:
    """Ends the process with the message and a status; 2 is for wrong input."""
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(status)


def check_writable(*paths: str) -> None:
    """Refuses files that cannot be written, before there is anything to write; "" is none."""
    for path in map(Path, filter(None, paths)):
        folder = path.absolute().parent
        require(folder.is_dir(), f"{path} cannot be written: there is no folder {folder}.")
        require(not path.is_dir(), f"{path} cannot be written: it is a folder.")
        writable = os.access(path if path.exists() else folder, os.W_OK)
        require(writable, f"{path} cannot be written: no permission.")


def _hyphens(arg: str) -> str:
    """A flag may be written with underscores."""
    name, equals, value = arg.partition("=")
    return name.replace("_", "-") + equals + value if arg.startswith("--") else arg


def _words(argv: list[str]) -> Iterator[str]:
    """The flags as tyro reads them."""
    for number, arg in enumerate(argv):
        has_value = not [*argv, "--"][number + 1].startswith("--")
        yield from [arg] if has_value else _THREE_WAY.get(arg, [arg])


def _model_name(argv: list[str]) -> str:
    """The value of `--model`, needed first: it decides the defaults of the others."""
    for number, arg in enumerate(argv):
        if arg.startswith("--model="):
            return arg.removeprefix("--model=")
        if arg == "--model" and number + 1 < len(argv):
            return argv[number + 1]
    return "nano"


def _flag_names(config: Any) -> list[str]:
    names = []
    for field in dataclasses.fields(config):
        hint = get_type_hints(config)[field.name]
        flag = field.name.replace("_", "-")
        if dataclasses.is_dataclass(hint) and hint not in (ModelConfig, MeshConfig):
            names += _flag_names(hint)
        else:
            names += [f"--{flag}"] + ([f"--no-{flag}"] if "bool" in str(hint) else [])
    return names


def _check_names(kind: type, argv: list[str]) -> None:
    known = ["--help", *_flag_names(kind)]
    names = [arg.partition("=")[0] for arg in argv if arg.startswith("--")]
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no flag {name}.{nearest(name, known)}")
        if names.count(name) > 1:
            raise ConfigError(f"{name} is given {names.count(name)} times; give it once.")


def _first_message(boxes: str) -> str:
    """What a box of tyro's says, without its frame and its pointers to --help."""
    lines = [line.strip("│╭╰─╮╯ ") for line in boxes.splitlines()[1:]]
    return " ".join(lines[: lines.index("")] if "" in lines else lines)


def _truth(word: str) -> bool:
    if word not in ("True", "False"):
        raise ValueError(f"{word} must be True or False.")
    return word == "True"


def _registry() -> ConstructorRegistry:
    """A model is named by its preset, a mesh written as axis=size pairs, and what is on, off or
    left alone as a flag with or without --no-."""
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def three_way(info):
        if info.type != bool | None:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="[True|False]",
            instance_from_str=lambda args: _truth(args[0]),
            is_instance=lambda value: value is None or isinstance(value, bool),
            str_from_instance=lambda value: ["as it is" if value is None else str(value)],
        )

    @registry.primitive_rule
    def model(info):
        if info.type is not ModelConfig:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="{" + ",".join(preset_names()) + "}",
            instance_from_str=lambda args: preset(args[0]),
            is_instance=lambda value: isinstance(value, ModelConfig),
            str_from_instance=lambda value: [value.name],
        )

    @registry.primitive_rule
    def mesh(info):
        if info.type not in (MeshConfig, MeshConfig | None):
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="AXIS=N[,AXIS=N]",
            instance_from_str=lambda args: MeshConfig.parse(args[0]),
            is_instance=lambda value: value is None or isinstance(value, MeshConfig),
            str_from_instance=lambda value: ["auto" if value is None else str(value)],
        )

    return registry
