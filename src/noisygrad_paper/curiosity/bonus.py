"""A bonus for each action, beside the reward of the task.

`Bonus` says how remarkable each transition of a rollout is; `IntrinsicReward` turns that into a reward in the paper's
way, the same for every bonus, so that they can be compared.
"""

import math
from abc import ABC, abstractmethod
from collections import deque

import numpy as np
from numpy.typing import NDArray

from noisygrad_paper.curiosity.recording import Transitions

Array = NDArray[np.float64]


class Bonus(ABC):
    """How remarkable transitions are, on a scale of its own."""

    @abstractmethod
    def measure(self, transitions: Transitions) -> Array | None:
        """A number of at least 0 for each action, `[steps, copies]`; None as long as it cannot tell."""

    @abstractmethod
    def learn(self, transitions: Transitions) -> None:
        """Take the rollout in; called after `measure` on the same rollout."""


class IntrinsicReward:
    """weight · bonus / typical bonus, where the typical one is the mean over the last rollouts of their medians.

    So constant factors of a bonus do not matter. The last `window` rollouts count, that at hand among them. Bonuses
    above `largest` are cut to it before. `weight` is η, of a typical bonus beside the task's reward.
    """

    def __init__(self, bonus: Bonus, *, weight: float = 1e-4, window: int = 10, largest: float = 1000.0) -> None:
        if not (weight >= 0 and math.isfinite(weight)):
            raise ValueError(f"the weight of the bonus must be finite and at least 0, got {weight!r}")
        if window < 1 or not largest > 0:
            raise ValueError(f"window must be at least 1 and largest positive, got {window!r} and {largest!r}")
        self.bonus, self.weight, self.largest = bonus, weight, largest
        self._medians: deque[float] = deque(maxlen=window)

    def __call__(self, transitions: Transitions) -> Array:
        """The reward to add to each action, `[steps, copies]`; then the bonus takes the rollout in."""
        found = self.bonus.measure(transitions)
        rewards = np.zeros(transitions.rewards.shape)
        if found is not None:
            if np.isnan(found).any():
                raise ValueError(f"{type(self.bonus).__name__} gave a bonus of NaN: its model has diverged")
            found = np.clip(found, 0.0, self.largest)
            self._medians.append(float(np.median(found)))
            typical = float(np.mean(self._medians))
            if typical > 0.0:
                rewards = self.weight * found / typical
        self.bonus.learn(transitions)
        return rewards
