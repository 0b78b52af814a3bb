"""Bonuses without a model, beside which a model's is judged."""

import numpy as np
from numpy.typing import NDArray

from noisygrad_paper.curiosity.bonus import Bonus
from noisygrad_paper.curiosity.recording import Transitions
from noisygrad_paper.curiosity.replay import ReplayPool

Array = NDArray[np.float64]


class NoBonus(Bonus):
    """Nothing is remarkable: the algorithm alone."""

    def measure(self, transitions: Transitions) -> None:
        """None, always."""

    def learn(self, transitions: Transitions) -> None:
        """Nothing."""


class SquaredNorm(Bonus):
    """|standardised observation|² + |standardised action|²: a control, for what is remarkable without any model.

    The pool's means and deviations standardise; by default it is one of its own with the paper's sizes.
    """

    def __init__(self, pool: ReplayPool | None = None) -> None:
        self.pool = ReplayPool() if pool is None else pool

    def measure(self, transitions: Transitions) -> Array | None:
        """The squared norm, once the pool has reached its minimum."""
        if not self.pool.ready:
            return None
        observations, actions, _ = transitions.flat()
        scales = self.pool.scales()
        norms = sum(
            np.square(s.standardise(part).astype(np.float64)).sum(1)
            for s, part in zip(scales, (observations, actions), strict=False)
        )
        return np.asarray(norms).reshape(transitions.rewards.shape)

    def learn(self, transitions: Transitions) -> None:
        """Add the rollout to the pool."""
        self.pool.add(transitions)
