"""The files of a model folder, which are data and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tpjax.checks import ConfigError, require, shown


def inside(folder: Path, name: str) -> Path:
    """The file `name` of a folder, which may not be there.

    Raises:
        ConfigError: the name, or a link of that name, leads out of the folder; the links of
            Hugging Face's cache, from snapshots/REVISION to blobs beside it, are taken.
    """
    require(
        name == Path(name).name and name not in ("", ".", ".."),
        f"{folder}: {shown(name)} is no name of a file in it.",
    )
    path = folder / name
    target, home = path.resolve(), folder.resolve()
    blobs = home.parent.parent / "blobs"
    require(
        target.parent == home or (home.parent.name == "snapshots" and target.parent == blobs),
        f"{path} is a link out of its folder; put the file itself there.",
    )
    return path


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ConfigError: it is not there, or is no JSON object.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror or error}.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {shown(str(error))}.") from error
    require(isinstance(found, dict), f"{path} is not a JSON object.")
    return found
