"""Going on with a run: what has changed since its checkpoint was made."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from dataclasses import dataclass
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from tpjax.checkpoint import About, Checkpoint, Progress
from tpjax.checks import shown
from tpjax.config import ConfigError, TrainConfig

_LIBRARIES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "tpjax")
# Settings with which a run continues all the same, up to rounding. (The layer-by-layer update
# clips by other norms.) The corpus is compared by its tokens.
_OTHER_CURVE = ("memory.update",)
_SAME_CURVE = ("mesh", "memory", "eval_every", "deterministic", "data.accumulate")
_MOST_NAMED = 6  # changes in an error
_UNSAID = ("pool", "recovery", "devices", "out", "force", "dry_run", "data.corpus",
           "data.tokenizer", "model.name")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Change:
    """A setting that is not what it was.

    Attributes:
        breaks: whether the loss curve is another than that of an unbroken run.
    """

    name: str
    before: Any
    after: Any
    breaks: bool = True

    def __str__(self) -> str:
        return f"{shown(self.name)} {_said(self.before)} → {_said(self.after)}"


def versions() -> dict[str, str]:
    """Of the libraries that decide a run's bits."""
    of_libraries = {name: importlib.metadata.version(name) for name in _LIBRARIES}
    return {"python": platform.python_version(), **of_libraries}


def about(config: TrainConfig, text: str, progress: Progress) -> About:
    """What to write beside a state.

    Args:
        text: the fingerprint of the training text.
    """
    settings = dataclasses.asdict(config)
    return About(progress=progress, config=settings, versions=versions(), text=text)


def settings_of(checkpoint: Checkpoint) -> TrainConfig:
    """The run that wrote a checkpoint, as it was resolved.

    Raises:
        ConfigError: its settings are not those of a run of this version.
    """
    try:
        return _made(TrainConfig, checkpoint.about.config)
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
        raise ConfigError(
            f"checkpoint {checkpoint.path} has settings that this version of tpjax does not know: "
            f"{shown(error)}."
        ) from error


def _made(kind: Any, value: Any) -> Any:
    """A value of JSON as a setting of some type."""
    options = [option for option in get_args(kind) if option is not type(None)]
    if get_origin(kind) in (Union, UnionType):
        nested = [option for option in options if dataclasses.is_dataclass(option)]
        return _made(nested[0], value) if nested and value is not None else value
    if dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind)
        made: Any = kind
        return made(**{name: _made(hints[name], one) for name, one in value.items()})
    return tuple(value) if get_origin(kind) is tuple else value


def changes(checkpoint: Checkpoint, config: TrainConfig, text: str) -> list[str]:
    """What differs between the run that wrote a checkpoint and this one, a line for each kind.

    Raises:
        ConfigError: something that breaks the loss curve, without `force`.
    """
    before, now = _flat(checkpoint.about.config), _flat(dataclasses.asdict(config))
    found = [
        Change(
            name=_flag(name),
            before=before.get(name),
            after=now.get(name),
            breaks=_is_among(name, _OTHER_CURVE) or not _is_among(name, _SAME_CURVE),
        )
        for name in {**now, **before}
        if before.get(name) != now.get(name)
        and not _is_among(name, _UNSAID)
        and not (name == "model.folder" and before.get(name) and now[name])  # only moved
    ]
    if checkpoint.about.text != text:
        before_text = checkpoint.about.text
        found.append(Change(name="the text of --corpus", before=before_text, after=text))
    breaking = _joined([str(change) for change in found if change.breaks])
    if breaking and not config.force:
        raise ConfigError(
            f"the run in {checkpoint.path.parent.parent} was begun with other settings: {breaking}."
            " Give those it was begun with, --force to go on with these, or another --out."
        )
    old, new = checkpoint.about.versions, versions()
    libraries = [f"{n} {shown(old.get(n, 'none'))} → {new[n]}" for n in new if old.get(n) != new[n]]
    lines = []
    if found:
        lines.append(f"changed since then: {'; '.join(map(str, found))}")
    if libraries:
        lines.append(f"other versions, so that last bits may differ: {'; '.join(libraries)}")
    return lines


def _joined(parts: list[str]) -> str:
    more = f"; and {len(parts) - _MOST_NAMED} more" if len(parts) > _MOST_NAMED else ""
    return "; ".join(parts[:_MOST_NAMED]) + more


def _flat(settings: dict, prefix: str = "") -> dict[str, Any]:
    """Nested settings as one dict, {"memory.params": "fp32", …}; lists for tuples, as JSON."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, dict) and prefix + name != "mesh":
            flat |= _flat(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = list(value) if isinstance(value, tuple) else value
    return flat


def _is_among(name: str, groups: tuple[str, ...]) -> bool:
    return any(name == group or name.startswith(f"{group}.") for group in groups)


def _flag(name: str) -> str:
    group, _, rest = name.partition(".")
    return name if group == "model" else f"--{(rest or group).replace('_', '-')}"


def _said(value: Any) -> str:
    if isinstance(value, dict):  # a mesh
        sizes = [f"{axis}={size}" for axis, size in value.items() if size != 1]
        return shown(",".join(sizes)) or "tensor=1"
    return "unset" if value is None else shown(value)
