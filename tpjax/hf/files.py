"""A model folder's files: nothing is read that lies outside of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tpjax.checks import ConfigError, require, shown


def inside(folder: Path, name: str) -> Path:
    """`folder / name`, which may be missing, but may not lead elsewhere.

    In a Hugging Face hub cache the files of `snapshots/REVISION` are links into `blobs`
    beside it, which belong to the same model.

    Raises:
        ConfigError: `name` is more than the name of a file, or a link out of the folder.
    """
    plain = name not in ("", ".", "..") and not {"/", "\\", "\0"} & set(name)
    require(plain, f"{folder}: {shown(name)!r} is not the name of a file in it.")
    try:
        home, target = folder.resolve(), (folder / name).resolve()
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{folder / name} cannot be followed: {shown(error)}.") from error
    homes = [home]
    if home.parent.name == "snapshots":
        homes.append(home.parent.parent / "blobs")
    require(
        any(target.is_relative_to(h) for h in homes),
        f"{folder / name} is a link out of its folder, to {target}; copy the file there instead.",
    )
    return folder / name


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """The object in a JSON file of a folder; an empty one where there is no such file.

    Raises:
        ConfigError: it cannot be read, holds no JSON object, or leads out of the folder.
    """
    path = inside(folder, name)
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {shown(error)}.") from error
    require(isinstance(found, dict), f"{path} holds no JSON object.")
    return found
