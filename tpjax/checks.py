"""What every check of a setting shares: the one error there is, and how it is said."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any, get_args, get_type_hints

MAX_SHOWN = 80  # characters


class ConfigError(Exception):
    """A wrong setting, in one line: what is wrong and what to do."""


def nearest(word: str, known: Iterable[str]) -> str:
    """`" Did you mean X?"` for the known words near `word`, else all of them."""
    known = list(known)
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(close)}?" if close else f" Known: {', '.join(known)}."


def require(condition: bool, message: str) -> None:
    """Raises `ConfigError(message)` unless `condition` holds."""
    if not condition:
        raise ConfigError(message)


def check_names(field: str, value: str, alone: Iterable[str], together: Iterable[str]) -> None:
    """A value that is one word of `alone`, or words of `together` with commas between them."""
    alone, together, words = tuple(alone), tuple(together), value.split(",")
    if value in alone:
        return
    for word in words:
        require(
            word in together,
            f"{field}={value!r} is not a choice.{nearest(word.strip(), (*alone, *together))}"
            if word not in alone
            else f"{field}={value!r}: {word} goes alone; names to put together are "
            f"{', '.join(together)}.",
        )
    require(len(set(words)) == len(words), f"{field}={value!r} names something twice.")


def check_fields(config: Any, *, positive: str = "", non_negative: str = "") -> None:
    """Choices named by a `Literal`, and the signs of the fields listed."""
    for name, hint in get_type_hints(type(config)).items():
        value, choices = getattr(config, name), get_args(hint)
        if choices and all(isinstance(choice, str) for choice in choices):
            require(
                value in choices,
                f"{name}={value!r} is not a choice.{nearest(str(value), choices)}",
            )
    for name in positive.split():
        value = getattr(config, name)
        require(value is None or value > 0, f"{name}={value} must be greater than 0.")
    for name in non_negative.split():
        value = getattr(config, name)
        require(value is None or value >= 0, f"{name}={value} must not be negative.")


def shown(value: Any) -> str:
    """What a file says, fit for one line: its special characters escaped, and not long."""
    text = str(value)
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"
