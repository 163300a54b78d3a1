"""Goes on with a text, or answers: token by token, as they come.

python -m experiments.generate --model FOLDER --prompt "The capital of France is"
python -m experiments.generate --out runs/a --chat --prompt "Who are you?" "And who am I?"
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Literal

from experiments.flags import fail, parse
from tpjax.answer import Answers, prompt_tokens
from tpjax.checks import check_fields, require
from tpjax.config import ConfigError
from tpjax.inference import ModelSource, load
from tpjax.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What to ask, and how to answer."""

    source: ModelSource = field(default_factory=ModelSource)
    prompt: tuple[str, ...] = ()
    """One text or several; several are gone on with side by side."""
    chat: bool = False
    """Take each prompt as what a user says, and put it into the model's chat template."""
    max_tokens: int = 128
    """Tokens of an answer at most; it ends before where the model stops."""
    context: int = 0
    """Positions of the cache; by default as many as prompts and answers need."""
    cache: Literal["auto", "fp32", "bf16", "int8"] = "auto"
    """How keys and values are kept: as computed, or in int8 with a scale per head and position."""
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    """Decides the choices; the same one gives the same text."""

    def __post_init__(self) -> None:
        check_fields(self, positive="max_tokens", non_negative="context seed")
        require(self.seed < 2**32, f"seed={self.seed} must be below 2**32.")


def main() -> None:
    flags = parse(Generation, lambda _: Generation(), __doc__ or "", None)
    try:
        answer(flags)
    except ConfigError as error:
        fail(str(error))


def answer(flags: Generation) -> None:
    """Prints one answer as it comes, or several one after the other when all are there."""
    require(len(flags.prompt) > 0, "there is nothing to go on with; give a --prompt.")
    loaded = load(flags.source, rows=len(flags.prompt), seq_len=1)
    prompts = [prompt_tokens(loaded.tokenizer, text, chat=flags.chat) for text in flags.prompt]
    kind = loaded.config.memory.compute if flags.cache == "auto" else flags.cache
    assert kind != "auto"  # resolved
    answers = Answers(
        loaded,
        prompts,
        max_tokens=flags.max_tokens,
        context=flags.context,
        cache=kind,
        sampling=flags.sampling,
    )
    for note in loaded.notes:
        print(note, file=sys.stderr)
    texts = ["" for _ in prompts]
    for pieces in answers.stream(flags.seed):
        texts = [text + piece for text, piece in zip(texts, pieces, strict=True)]
        if len(prompts) == 1:
            print(pieces[0], end="", flush=True)
    if len(prompts) == 1:
        print()
        return
    for prompt, text in zip(flags.prompt, texts, strict=True):
        print(f"{prompt!r}:\n{text}\n")


if __name__ == "__main__":
    main()
