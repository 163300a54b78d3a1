"""Conversations as text: a model's own chat template, rendered in a sandbox."""

from __future__ import annotations

import datetime
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from tpjax.checks import ConfigError, require, shown

TRAINING_DATE = datetime.datetime(2024, 7, 26)
"""What a template that asks for the date gets in training text, so that a conversation is the
same tokens on every day; the one that Llama 3's takes where it cannot ask."""


@dataclass(frozen=True)
class Answer:
    """Where in a rendered conversation the assistant speaks, in characters.

    Attributes:
        start: the first character after the header of the turn.
        content_end: the end of what it says, or `start` where the template changes that.
        turn_end: the end of its turn, or None where the template leaves out something of
            earlier turns, so that only the token that ends the turn can tell.
    """

    start: int
    content_end: int
    turn_end: int | None


@dataclass(frozen=True)
class ChatTemplate:
    """A Jinja template as models bring it, with the names that `transformers` gives it. The
    sandbox keeps it from the machine, but not from taking as long as it likes.

    Attributes:
        source: its text; not trusted.
        names: the special tokens' texts, by names such as `bos_token`.
        where: what it is called in an error.
    """

    source: str
    names: dict[str, str]
    where: str

    @cached_property
    def _template(self) -> Any:
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        try:
            return environment.from_string(self.source)
        except Exception as error:  # whatever an untrusted template makes Python's parser raise
            raise ConfigError(f"chat template of {self.where}: {shown(error)}.") from error

    def render(
        self, messages: Any, *, answer_next: bool, now: datetime.datetime | None = None
    ) -> str:
        """The conversation as text, with all special tokens written out.

        Args:
            answer_next: end with the header of an answer.
            now: the date a template may ask for; by default today's.

        Raises:
            ConfigError: the messages are none, or the template fails on them.
        """
        check_messages(messages)
        return self._render(messages, answer_next, now or datetime.datetime.now())

    def _render(self, messages: list, answer_next: bool, now: datetime.datetime) -> str:
        template = self._template
        try:
            return template.render(
                **self.names,
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=answer_next,
                strftime_now=now.strftime,
            )
        except Exception as error:  # a template can fail in any way
            raise ConfigError(f"chat template of {self.where}: {shown(error)}.") from error

    def answers(self, messages: Any) -> tuple[str, list[Answer]]:
        """A whole conversation as text, and where the assistant speaks in it.

        Raises:
            ConfigError: as `render`; or the conversation up to an answer is not the
                beginning of the whole.
        """
        check_messages(messages)
        text, found = self._render(messages, False, TRAINING_DATE), []
        for place, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:place], True, TRAINING_DATE)
            through = self._render(messages[: place + 1], False, TRAINING_DATE)
            require(
                text.startswith(before),
                f"chat template of {self.where}: what it makes of the messages before message "
                f"{place + 1} is not the beginning of the whole conversation, so that the answer "
                "cannot be told apart.",
            )
            start, end = len(before), len(through) if text.startswith(through) else None
            said = message["content"].strip()
            at = -1 if end is None else text.find(said, start, end)
            require(
                text[start:].lstrip().startswith(said)
                or before != self._render(messages[:place], False, TRAINING_DATE),
                f"chat template of {self.where}: it pays no heed to add_generation_prompt, so that "
                "the header of an answer cannot be told from the answer.",
            )
            found.append(Answer(start, start if at < 0 else at + len(said), end))
        return text, found


def check_messages(messages: Any) -> None:
    """Raises `ConfigError` unless it is a list of objects with a "role" and a "content"."""
    require(
        isinstance(messages, list) and len(messages) > 0,
        "a conversation must be a list of messages, with one or more of them.",
    )
    for number, message in enumerate(messages, 1):
        for key in ("role", "content"):
            require(
                isinstance(message, dict) and isinstance(message.get(key), str),
                f'message {number} is not an object with a "role" and a "content", both strings.',
            )


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """Jinja's own filter would escape HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _raise(message: str) -> None:
    """A template's own refusal, such as of a role it does not know."""
    from jinja2 import TemplateError

    raise TemplateError(message)
