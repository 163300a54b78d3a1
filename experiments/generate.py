"""Goes on with a text, or answers: a token at a time, as it comes.

python -m experiments.generate --model FOLDER --prompt "The capital of France is"
python -m experiments.generate --out runs/a --chat --prompt "Who are you?" "And who am I?"
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from experiments.flags import fail, parse
from tpjax.checks import check_fields, require
from tpjax.config import ConfigError
from tpjax.generate import Decoding, Generator
from tpjax.inference import Loaded, ModelSource, load
from tpjax.sampling import Sampling
from tpjax.tokenizer import TextStream, Tokenizer


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


def main() -> None:
    flags = parse(Generation, lambda _: Generation(), __doc__ or "", None)
    try:
        answer(flags)
    except ConfigError as error:
        fail(str(error))


def answer(flags: Generation) -> None:
    """Prints each answer as it comes; of several prompts one after the other."""
    require(len(flags.prompt) > 0, "there is nothing to go on with; give a --prompt.")
    loaded = load(flags.source, rows=len(flags.prompt), seq_len=1)
    prompts = [prompt_tokens(loaded.tokenizer, text, flags.chat) for text in flags.prompt]
    needed = max(map(len, prompts)) + flags.max_tokens
    context = flags.context or min(needed, loaded.config.model.max_seq_len)
    require(
        needed <= context,
        f"the longest prompt has {needed - flags.max_tokens} tokens, and with max_tokens="
        f"{flags.max_tokens} they exceed the context of {context}; shorten one of them"
        + ("." if context == loaded.config.model.max_seq_len else ", or give a longer --context."),
    )
    kind = loaded.config.memory.compute if flags.cache == "auto" else flags.cache
    assert kind != "auto"  # resolved
    decoding = Decoding.of(prompts, context, loaded.mesh, kind, flags.sampling)
    generator = Generator(loaded.config, loaded.mesh, loaded.params, decoding)
    for note in loaded.notes:
        print(note)
    texts = streamed(loaded, generator, prompts, flags)
    for prompt, text in zip(flags.prompt, texts, strict=True):
        if len(prompts) > 1:
            print(f"\n{prompt!r}:\n{text}")


def prompt_tokens(tokenizer: Tokenizer, text: str, chat: bool) -> np.ndarray:
    """A prompt as the model reads it."""
    if chat:
        return tokenizer.encode(tokenizer.chat_prompt([{"role": "user", "content": text}]))
    first = [] if tokenizer.begin_of_text is None else [tokenizer.begin_of_text]
    tokens = np.concatenate([np.array(first, np.uint32), tokenizer.encode(text)])
    require(len(tokens) > 0, "a prompt is empty; give it a word.")
    return tokens


def streamed(
    loaded: Loaded, generator: Generator, prompts: list[np.ndarray], flags: Generation
) -> list[str]:
    """All answers, each until the model stops; a single one is printed as it comes."""
    tokenizer, stops = loaded.tokenizer, loaded.tokenizer.stop_tokens
    streams, texts = [TextStream(tokenizer) for _ in prompts], ["" for _ in prompts]
    running = set(range(len(prompts)))
    for count, tokens in enumerate(generator.stream(prompts, flags.seed), 1):
        for row in sorted(running):
            if int(tokens[row]) in stops:
                running.discard(row)
                continue
            piece = streams[row].push(int(tokens[row]))
            texts[row] += piece
            if len(prompts) == 1:
                print(piece, end="", flush=True)
        if not running or count == flags.max_tokens:
            break
    rests = [stream.rest() for stream in streams]
    if len(prompts) == 1:
        print(rests[0])
    return [text + rest for text, rest in zip(texts, rests, strict=True)]


if __name__ == "__main__":
    main()
