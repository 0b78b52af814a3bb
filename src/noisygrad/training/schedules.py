"""Schedules of the step, for the options that torch's learning-rate schedulers do not reach.

`kl_clip` and `fisher_decay` take a function of the step (1, 2, …); these are such functions, without state, so that a
resumed run finds its place by itself. For the learning rate use `torch.optim.lr_scheduler`, or one of these inside
`LambdaLR`, which counts from 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class StepDecay:
    """`value`, multiplied by `factor` after each of the steps in `at`: ×0.1 at half time is `StepDecay(v, (T // 2,))`.

    The paper's regression does this to lr and to 1 − `fisher_decay` (see `Annealed`).
    """

    value: float
    at: tuple[int, ...]
    factor: float = 0.1

    def __post_init__(self) -> None:
        if not self.value > 0 or not self.factor > 0:
            raise ValueError(f"value and factor must be positive, got {self.value!r} and {self.factor!r}")
        if any(step < 0 for step in self.at):
            raise ValueError(f"`at` holds numbers of steps, at least 0; got {self.at!r}")

    def __call__(self, step: int) -> float:
        """The value at a step."""
        return self.value * self.factor ** sum(step > change for change in self.at)


@dataclass(frozen=True)
class CosineDecay:
    """From `value` to `value · final` along half a cosine over `steps`, and `final` after that."""

    value: float
    steps: int
    final: float = 0.0

    def __post_init__(self) -> None:
        if not self.value > 0 or not 0 <= self.final <= 1:
            raise ValueError(f"value must be positive and final lie in [0, 1], got {self.value!r} and {self.final!r}")
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps!r}")

    def __call__(self, step: int) -> float:
        """The value at a step."""
        progress = min(step / self.steps, 1.0)
        return self.value * (self.final + (1 - self.final) * 0.5 * (1 + math.cos(math.pi * progress)))


@dataclass(frozen=True)
class Annealed:
    """A `fisher_decay` whose rate 1 − decay follows a schedule: `Annealed(StepDecay(1e-3, (T // 2,)))`."""

    rate: Callable[[int], float]

    def __call__(self, step: int) -> float:
        """1 − rate at a step."""
        return 1.0 - self.rate(step)
