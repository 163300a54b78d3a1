"""Trains a transformer on real text: `python -m experiments.train --remat=dots`."""

from __future__ import annotations

import sys

from rich.console import Console

from experiments.flags import fail, parse_run
from experiments.summary import how_to_go_on, summary
from tpjax.config import ConfigError
from tpjax.loop import Diverged, OutOfMemory, SaveFailed, train
from tpjax.preemption import STOPPED_STATUS


def main() -> None:
    config = parse_run(__doc__ or "")
    try:
        result = train(config)
    except (ConfigError, Diverged) as error:
        fail(str(error))
    except (OutOfMemory, SaveFailed) as error:
        fail(str(error), status=1)
    Console().print(summary(result))
    if result.stopped:
        print(how_to_go_on(result, sys.argv[1:]))
        raise SystemExit(STOPPED_STATUS)


if __name__ == "__main__":
    main()
