"""What losses say of a run: steps that were left out, and losses far above the others."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

LEVEL_STEPS = 50  # over about so many steps the running level of the loss is taken
SPIKE = 3.0  # times the running level


@dataclass(frozen=True, kw_only=True)
class Health:
    """A run's steps up to now.

    Attributes:
        bad_steps: how many were left out, as their loss or gradient was not finite.
        in_a_row: how many of them are the last ones.
        level: the running mean of the loss, None before the first.
        steps: how many losses are in it.
    """

    bad_steps: int = 0
    in_a_row: int = 0
    level: float | None = None
    steps: int = 0

    def after(self, loss: float, grad_norm: float, loss_scale: float) -> Health:
        """With one more step's figures. A gradient that overflows is no bad step where a
        smaller loss scale (fp16) may mend it."""
        if is_bad(loss, grad_norm, loss_scale):
            return dataclasses.replace(
                self, bad_steps=self.bad_steps + 1, in_a_row=self.in_a_row + 1
            )
        share = 1 / min(self.steps + 1, LEVEL_STEPS)
        level = loss if self.level is None else self.level + share * (loss - self.level)
        return dataclasses.replace(self, in_a_row=0, level=level, steps=self.steps + 1)

    def spike(self, loss: float) -> float | None:
        """How many times the running level a loss is, where it is many times as large."""
        if not self.level or not math.isfinite(loss) or loss < SPIKE * self.level:
            return None
        return loss / self.level


def is_bad(loss: float, grad_norm: float, loss_scale: float) -> bool:
    """Whether a step was left out for good reason and for no passing one."""
    if not math.isfinite(loss):
        return True
    return not math.isfinite(grad_norm) and loss_scale <= 1
