"""How long to train and how often to look at the curvature, by the size of the data: the estimators' rules.

Chosen on splits of boston, of scikit-learn's wine and of the training parts of diabetes and digits, by the ELBO and by
log-likelihood on a part held out; the number of steps and the settings of a large full covariance partly by run time.
"""

import math
from dataclasses import dataclass
from typing import Any, Self

_LARGE_DENSE = 1000
"""From this many weights on, the factorisation of a full covariance decides how many steps one can afford."""
_SMALL = 20_000
"""Up to this many weights a step's matrices are too small for several threads."""


@dataclass(frozen=True, kw_only=True)
class FitPlan:
    """The settings of one fit; what a user did not say follows from the sizes."""

    batch_size: int
    epochs: int
    lr: float
    kl_clip: float
    fisher_decay: float
    stats_every: int
    factor_every: int
    small: bool
    """Whether one thread is best."""

    @property
    def settings(self) -> dict[str, Any]:
        """What the optimiser takes."""
        names = ("lr", "kl_clip", "fisher_decay", "stats_every", "factor_every")
        return {name: getattr(self, name) for name in names}

    @classmethod
    def of(
        cls,
        posterior: str,
        *,
        examples: int,
        weights: int,
        epochs: int | None = None,
        batch_size: int | None = None,
        lr: float | None = None,
    ) -> Self:
        """The rules, as the docstring of `NoisyRegressor` tells them.

        The trust region shrinks with the number of steps T, c = 1/T: a long run need not hurry, and large steps on
        noisy gradients are what makes a long run diverge. A diagonal Fisher knows the least of what a step does, so its
        region is the smallest, and it gets statistics at every step, which are cheap there. The Fisher remembers some
        100 steps.
        """
        dense = posterior == "full" and weights > _LARGE_DENSE
        diagonal = posterior == "diagonal"
        if batch_size is None:
            batch_size = 32 if examples < 256 else min(200, examples // 8)
        batch_size = min(int(batch_size), examples)
        batches = math.ceil(examples / batch_size)
        if epochs is None:
            epochs = math.ceil((200 if dense else min(250 + 2 * examples, 20_000)) / batches)
        steps = epochs * batches
        return cls(
            batch_size=batch_size,
            epochs=int(epochs),
            lr=lr if lr is not None else 1.0 if dense else 0.3,
            kl_clip=min(max((0.3 if diagonal else 1.0) / steps, 1e-4), 5e-3),
            fisher_decay=0.99 if diagonal else 0.96,
            stats_every=1 if diagonal else 8 if dense else 4,
            factor_every=max(8, 8 * (steps // 24)) if dense else 8,
            small=weights <= _SMALL and not dense,
        )
