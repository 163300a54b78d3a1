"""How well a model predicts a text: loss, perplexity, bits per byte.

python -m experiments.evaluate --model FOLDER --corpus book.txt
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table

from experiments.flags import fail, parse
from tpjax.checks import check_fields
from tpjax.config import ConfigError
from tpjax.evaluate import evaluate
from tpjax.inference import ModelSource


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Which model, and which text."""

    source: ModelSource = field(default_factory=ModelSource)
    corpus: tuple[str, ...] = ("stdlib",)
    """As of training; all of it is read. Of conversations the answers count."""
    batch_size: int = 8
    """Sequences at a time, over all devices."""
    seq_len: int = 1024
    """Tokens that the model sees at once; each piece of the text begins anew."""

    def __post_init__(self) -> None:
        check_fields(self, positive="batch_size seq_len")


def main() -> None:
    flags = parse(Evaluation, lambda _: Evaluation(), __doc__ or "", None)
    try:
        found = evaluate(flags.source, flags.corpus, flags.batch_size, flags.seq_len)
    except ConfigError as error:
        fail(str(error))
    for note in found.notes:
        print(note)
    table = Table(show_header=False)
    table.add_row("tokens predicted", f"{found.tokens:,}")
    table.add_row("loss per token", f"{found.loss:.4f}")
    table.add_row("perplexity", f"{found.perplexity:.3f}")
    if found.bits_per_byte is None:
        table.add_row("bits per byte", "not available, because special tokens alone are predicted")
    else:
        table.add_row("bits per byte", f"{found.bits_per_byte:.4f} ({found.bytes:,} bytes)")
    Console().print(table)


if __name__ == "__main__":
    main()
