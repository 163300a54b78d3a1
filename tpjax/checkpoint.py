"""Checkpoints: written by Orbax beside the training, found again whole or not at all.

A run's folder has `checkpoints/00000100/` for step 100: Orbax's files with the state, each
process's own shards; `config.json`, the run's settings; and `run.json`: how far the run was,
which versions wrote it, and the size and checksum of every file. Orbax writes into a folder of
another name and renames it when all is there, so that a crash leaves no half of one.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import stat
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tpjax.checks import ConfigError, shown
from tpjax.folder import write_whole
from tpjax.health import Health

_RUN, _CONFIG = "run.json", "config.json"
_FORMAT = 1
_TEMPORARY, _DROPPED, DAMAGED = ".orbax-checkpoint-tmp", ".dropped", ".damaged"
# Orbax's own marks, which it writes again after everything else.
_UNLISTED = frozenset({_RUN, "_CHECKPOINT_METADATA", "commit_success.txt"})
_MOST_DIGITS = 10  # of a step
_PIECE_BYTES = 1024**2
_MAX_JSON_BYTES = 64 * 1024**2


class Damaged(Exception):
    """Why a folder is no whole checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a run is.

    Attributes:
        step: steps taken.
        sequences: sequences of the training text read.
        eval_loss: the loss on held-out text after this step; None where it was not taken.
        health: of the steps up to here.
    """

    step: int = 0
    sequences: int = 0
    eval_loss: float | None = None
    health: Health = dataclasses.field(default_factory=Health)


@dataclass(frozen=True, kw_only=True)
class About:
    """What a checkpoint says beside the state.

    Attributes:
        progress: how far the run was.
        config: its settings, as `dataclasses.asdict` gives them.
        versions: of the libraries, by name.
        text: a fingerprint of the training text's tokens.
    """

    progress: Progress
    config: dict
    versions: dict[str, str]
    text: str

    @staticmethod
    def read(path: Path) -> tuple[About, dict[str, tuple[int, int]]]:
        """What a checkpoint's folder says, and its files with their sizes and checksums.

        Raises:
            Damaged: it says nothing, or not this.
        """
        if path.is_symlink() or not path.is_dir():
            raise Damaged("is no folder")
        if not os.listdir(path):
            raise Damaged("is empty")
        run, config = _read_json(path / _RUN), _read_json(path / _CONFIG)
        if run.get("format") != _FORMAT:
            raise Damaged(f"is of format {run.get('format')!r}, where this tpjax reads {_FORMAT}")
        try:
            progress = dict(run["progress"])
            progress["health"] = _numbers(Health(**progress["health"]), "level")
            about = About(
                progress=_numbers(Progress(**progress), "eval_loss"),
                config=config,
                versions={str(name): str(version) for name, version in run["versions"].items()},
                text=str(run["text"]),
            )
            files = {str(name): (int(size), int(crc)) for name, (size, crc) in run["files"].items()}
            if run.pop("crc32") != _checksum_of(run):
                raise ValueError
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise Damaged(f"has a {_RUN} that makes no sense") from error
        if about.progress.step != int(path.name):
            raise Damaged(f"is of step {about.progress.step}")
        return about, files

    def write(self, path: Path) -> None:
        """Puts it beside the files in a folder, with their sizes and checksums."""
        write_whole(path / _CONFIG, json.dumps(self.config, indent=2) + "\n")
        files = {name: [file.stat().st_size, _checksum(file)] for name, file in _files(path)}
        rest = {
            "progress": dataclasses.asdict(self.progress),
            "versions": self.versions,
            "text": self.text,
        }
        run = {"format": _FORMAT, **rest, "files": files}
        text = json.dumps({"crc32": _checksum_of(run), **run}, indent=1)
        write_whole(path / _RUN, text + "\n")


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A whole checkpoint, and those newer than it that are not."""

    path: Path
    about: About
    skipped: tuple[str, ...] = ()


def newest(folder: Path) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """The newest whole checkpoint, and what is wrong with what lies beside it in its place."""
    skipped: list[str] = []
    for path in reversed(steps_in(folder)):
        try:
            about = check(path)
        except Damaged as reason:
            skipped.append(f"{path} {reason}")
        else:
            return Checkpoint(path=path, about=about, skipped=tuple(skipped)), ()
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if path.name.endswith(DAMAGED):
            skipped.append(f"{shown(path)} was set aside")
        elif not _is_step(path) and _TEMPORARY not in path.name and path.suffix != _DROPPED:
            skipped.append(f"{shown(path)} is not tpjax's")
    return None, tuple(skipped)


def steps_in(folder: Path) -> list[Path]:
    """What is called like a step, in their order."""
    there = folder.iterdir() if folder.is_dir() else []
    return sorted(filter(_is_step, there), key=lambda path: int(path.name))


def _is_step(path: Path) -> bool:
    return path.name.isdecimal() and len(path.name) <= _MOST_DIGITS


def check(path: Path) -> About:
    """What a checkpoint says, if all its files are there as they were written.

    Raises:
        Damaged: why it is not whole.
    """
    try:
        return _check(path)
    except OSError as error:
        raise Damaged(f"cannot be read: {error.strerror}") from error
    except ValueError as error:  # names that are none
        raise Damaged(f"has a {_RUN} that makes no sense") from error


def _check(path: Path) -> About:
    about, files = About.read(path)
    foreign = {name for name, _ in _files(path)} - files.keys()
    if foreign:
        raise Damaged(f"has a file that is not its own, {shown(min(foreign))}")
    for name, (size, checksum) in sorted(files.items()):
        file = path / name
        if not _is_inside(path, name) or not file.is_file():
            raise Damaged(f"lacks its file {shown(name)}")
        if file.stat().st_size != size:
            raise Damaged(f"has {file.stat().st_size} bytes of {size} in {name}")
        if _checksum(file) != checksum:
            raise Damaged(f"has other bytes than were written in {name}")
    return about


def set_aside(folder: Path, after: int) -> None:
    """Renames what is called like a later step than that one."""
    for path in steps_in(folder):
        if int(path.name) > after:
            target = path.with_name(path.name + DAMAGED)
            _remove(target)
            path.rename(target)


def clear(folder: Path) -> None:
    """Removes what interrupted saves and removals have left."""
    for path in folder.iterdir():
        if _TEMPORARY in path.name or path.name.endswith(_DROPPED):
            _remove(path)


def drop(path: Path) -> None:
    """Removes a checkpoint; interrupted, it leaves nothing that looks like one."""
    dropped = path.with_name(path.name + _DROPPED)
    _remove(dropped)
    path.rename(dropped)
    _remove(dropped)


def temporary(path: Path) -> Path:
    """Where a checkpoint is being written."""
    return path.with_name(path.name + _TEMPORARY)


def check_space(folder: Path, needed_bytes: int) -> None:
    """
    Raises:
        OSError: the file system has less than that free.
    """
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise OSError(f"it needs {needed_bytes:,} bytes, and the disk has {free:,} free")


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


def _files(path: Path) -> list[tuple[str, Path]]:
    """A checkpoint's files, by their names inside it.

    Raises:
        Damaged: something in it is neither a file nor a folder.
    """
    found = []
    for parent, folders, names in os.walk(path):
        for name in (*folders, *names):
            entry = Path(parent, name)
            mode = entry.lstat().st_mode
            inside = entry.relative_to(path).as_posix()
            if stat.S_ISREG(mode):
                found.append((inside, entry))
            elif not stat.S_ISDIR(mode):
                raise Damaged(f"holds {shown(inside)}, which is neither a file nor a folder")
    return [(name, file) for name, file in sorted(found) if name not in _UNLISTED]


def _is_inside(path: Path, name: str) -> bool:
    return (path / name).resolve().is_relative_to(path.resolve())


def _checksum(file: Path) -> int:
    """CRC-32 of its bytes."""
    crc = 0
    with file.open("rb") as pieces:
        while piece := pieces.read(_PIECE_BYTES):
            crc = zlib.crc32(piece, crc)
    return crc


def _checksum_of(run: dict) -> int:
    return zlib.crc32(json.dumps(run, sort_keys=True).encode())


def _read_json(path: Path) -> dict:
    try:
        if not stat.S_ISREG(path.lstat().st_mode) or path.stat().st_size > _MAX_JSON_BYTES:
            raise ValueError
        value = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(value, dict):
            raise ValueError
    except FileNotFoundError:
        raise Damaged(f"has no {path.name}: not tpjax's, or not finished") from None
    except OSError as error:
        raise Damaged(f"has a {path.name} that cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise Damaged(f"has a {path.name} that is no JSON object") from None
    return value


_T = TypeVar("_T", Health, Progress)


def _numbers(of: _T, maybe_none: str) -> _T:
    """The same, if its fields are numbers that make sense.

    Raises:
        ValueError: they are not.
    """
    for field in dataclasses.fields(of):
        value = getattr(of, field.name)
        if field.name == maybe_none:
            right = value is None or (isinstance(value, float) and math.isfinite(value))
        else:
            right = isinstance(value, Health) or (type(value) is int and 0 <= value < 2**62)
        if not right:
            raise ValueError(field.name)
    return of


def choose(folder: Path, resume: str) -> Checkpoint | None:
    """The checkpoint to go on from, or None to begin.

    Raises:
        ConfigError: none is whole though there are some, or there is none and there must be.
    """
    found, wrong = newest(folder)
    if found is None and wrong:
        raise ConfigError(
            f"no checkpoint in {folder} is whole: {'; '.join(wrong)}. Name another folder to "
            "begin anew."
        )
    if found is None and resume == "must":
        raise ConfigError(f"resume=must, but there is no checkpoint in {folder}.")
    return found
