"""Writes a run's parameters as a folder that transformers loads.

    python -m experiments.export --out runs/a --to exported

Works on the host's memory, one parameter at a time; no GPU is touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax

from experiments.flags import fail, parse
from tpjax.checks import require
from tpjax.config import ConfigError
from tpjax.export import export


@dataclass(frozen=True, kw_only=True)
class Export:
    """What to write, and where."""

    out: str = ""
    """A run's folder: the newest checkpoint in it."""
    to: str = ""
    """A new folder."""
    dtype: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Of the weights written; auto is as the run keeps them, and bf16 for int8 and nf4."""
    adapters: bool = False
    """Write the adapters of --lora-rank alone, as PEFT reads them; without, they are merged."""


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    flags = parse(Export, lambda _: Export(), __doc__ or "", None)
    try:
        require(bool(flags.out), "name a run's folder with --out.")
        require(bool(flags.to), "name a new folder with --to.")
        for line in export(Path(flags.out), Path(flags.to), flags.dtype, adapters=flags.adapters):
            print(line)
    except ConfigError as error:
        fail(str(error))


if __name__ == "__main__":
    main()
