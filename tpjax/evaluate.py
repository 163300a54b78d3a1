"""How well a model predicts a text, as it is told in the field."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tpjax.checks import require
from tpjax.corpus import read_tokens
from tpjax.data import EvalBatches, check_rows, place
from tpjax.inference import ModelSource, load
from tpjax.step import lower_eval_step


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Of all tokens that count, but the first of the text.

    Attributes:
        tokens: predicted.
        loss: mean −log p of a token, natural logarithm.
        bytes: UTF-8 that those tokens stand for; a special token stands for none.
        notes: what is to be said of the model.
    """

    tokens: int
    loss: float
    bytes: int
    notes: list[str]

    @property
    def perplexity(self) -> float:
        return math.exp(min(self.loss, 700))  # beyond it there is no float

    @property
    def bits_per_byte(self) -> float | None:
        """Comparable between tokenizers: log₂ of the whole text's probability, per byte; None
        where special tokens alone are predicted, which stand for no bytes."""
        return self.loss * self.tokens / math.log(2) / self.bytes if self.bytes else None


def evaluate(
    source: ModelSource, corpus: tuple[str, ...], batch_size: int, seq_len: int
) -> Evaluation:
    """Reads the whole corpus once, in pieces of `seq_len` tokens that each begin anew.

    Raises:
        ConfigError: of the model or the corpus; or there is nothing to predict.
    """
    loaded = load(source, rows=batch_size, seq_len=seq_len)
    data = dataclasses.replace(loaded.config.data, corpus=corpus)
    tokens, counts = read_tokens(data, loaded.tokenizer)
    predicted = tokens[1:] if counts is None else tokens[1:][counts[1:]]
    require(len(predicted) > 0, f"corpus {' '.join(corpus)} has nothing to predict; add text.")
    batches = EvalBatches(tokens, data.batch_size, data.seq_len, counts)
    step = lower_eval_step(loaded.config, loaded.mesh).compile()
    whole = NamedSharding(loaded.mesh, P())
    loss = 0.0
    for number in range(len(batches)):
        rows = batches.rows(number)
        check_rows(rows, loaded.config.model.vocab_size, f"batch {number}")
        # Sums of a batch in float32, of all of them in the host's float64.
        totals = jax.device_put((np.float32(0), np.int32(0)), whole)
        loss += float(step(loaded.params, totals, place(rows, loaded.mesh))[0])
    require(math.isfinite(loss), "the loss is not a number: the model's weights are spoilt.")
    pieces = (len(loaded.tokenizer.piece(int(token))) for token in predicted)
    return Evaluation(
        tokens=len(predicted), loss=loss / len(predicted), bytes=sum(pieces), notes=loaded.notes
    )
