"""Prompts to texts, as they come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from tpjax.cache import Kind
from tpjax.checks import require
from tpjax.generate import Decoding, Generator
from tpjax.inference import Loaded
from tpjax.sampling import Sampling
from tpjax.tokenizer import TextStream, Tokenizer


def prompt_tokens(tokenizer: Tokenizer, text: str, *, chat: bool) -> np.ndarray:
    """A prompt as the model reads it: as a text that begins, or as what a user says.

    Raises:
        ConfigError: it is empty, or the model has no chat template.
    """
    if chat:
        tokens = tokenizer.encode(tokenizer.chat_prompt([{"role": "user", "content": text}]))
    else:
        first = [] if tokenizer.begin_of_text is None else [tokenizer.begin_of_text]
        tokens = np.concatenate([np.array(first, np.uint32), tokenizer.encode(text)])
    require(len(tokens) > 0, "a prompt is empty; give it a word.")
    return tokens


class Answers:
    """What a model makes of prompts, read into its cache side by side.

    Args:
        max_tokens: of an answer; it ends before where the model stops.
        context: positions of the cache; 0: as many as prompts and answers need.

    Raises:
        ConfigError: prompt and answer do not fit into the cache.
    """

    def __init__(
        self,
        loaded: Loaded,
        prompts: Sequence[np.ndarray],
        *,
        max_tokens: int,
        context: int = 0,
        cache: Kind,
        sampling: Sampling,
    ):
        longest, model = max(map(len, prompts)), loaded.config.model
        context = context or min(longest + max_tokens, model.max_seq_len)
        remedy = "." if context >= model.max_seq_len else ", or give a longer --context."
        require(
            longest + max_tokens <= context,
            f"the longest prompt has {longest} tokens, and with max_tokens={max_tokens} they "
            f"exceed the context of {context}; shorten one of them{remedy}",
        )
        self._tokenizer, self._prompts, self._max_tokens = loaded.tokenizer, prompts, max_tokens
        decoding = Decoding.of(prompts, context, loaded.mesh, cache, sampling)
        self._generator = Generator(loaded.config, loaded.mesh, loaded.params, decoding)

    def stream(self, seed: int) -> Iterator[list[str]]:
        """The next piece of each answer, often empty, until all have ended."""
        streams = [TextStream(self._tokenizer, begun=True) for _ in self._prompts]
        running = set(range(len(streams)))
        for count, tokens in enumerate(self._generator.stream(self._prompts, seed), 1):
            pieces = ["" for _ in streams]
            for row in sorted(running):
                if int(tokens[row]) in self._tokenizer.stop_tokens:
                    running.discard(row)
                else:
                    pieces[row] = streams[row].push(int(tokens[row]))
            yield pieces
            if not running or count == self._max_tokens:
                break
        yield [stream.rest() for stream in streams]
