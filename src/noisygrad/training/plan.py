"""How long to train and how often to look at the curvature, by the size of the data: the estimators' rules."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How long to train and how often to look at the curvature; what a user did not say, by the size of the data."""

    batch_size: int
    epochs: int
    lr: float
    stats_every: int
    factor_every: int

    @classmethod
    def of(
        cls, posterior: str, examples: int, weights: int, epochs: int | None, batch_size: int | None, lr: float | None
    ) -> Self:
        """The rules, as the docstring of `NoisyRegressor` tells them."""
        heavy = posterior == "full" and weights > 1000
        if batch_size is None:
            batch_size = 500 if heavy else 32 if examples < 256 else min(200, examples // 8)
        batch_size = min(batch_size, examples)
        batches = math.ceil(examples / batch_size)
        if epochs is None:
            steps = 250 if heavy else min(500 + 2 * examples, 20_000)
            epochs = max(1, round(steps / batches))
        steps = epochs * batches
        return cls(
            batch_size=batch_size,
            epochs=epochs,
            lr=0.3 if lr is None else lr,
            stats_every=2 if heavy else 1,
            factor_every=max(1, steps // 8) if heavy else 5,
        )
