"""The baseline that the paper's code subtracts from returns: linear in features of observation and time.

A critic network in its place spoils the comparison. Where no reward was ever seen its output is noise, which the
standardised advantages blow up to full size, and TRPO without any bonus then wanders until it meets a reward.
"""

import numpy as np
from numpy.typing import NDArray

from noisygrad_paper.curiosity.recording import Transitions

Array = NDArray[np.float64]


class LinearFeatureBaseline:
    """V(o, t) = wᵀφ(o, t), φ = (o, o², t/100, (t/100)², (t/100)³, 1) with o clipped to [−10, 10]; 0 before any fit.

    `ridge` is the penalty on |w|², against a sum of squared errors.
    """

    def __init__(self, ridge: float = 1e-5) -> None:
        if not ridge > 0:
            raise ValueError(f"ridge must be positive, got {ridge!r}")
        self.ridge = ridge
        self.weights: Array | None = None

    @staticmethod
    def features(observations: NDArray[np.floating], times: NDArray[np.int64]) -> Array:
        """φ for observations `[..., d]` and times `[...]`, shape `[..., 2d + 4]`."""
        clipped = np.clip(observations.astype(np.float64), -10.0, 10.0)
        time = times[..., None] / 100.0
        return np.concatenate([clipped, clipped**2, time, time**2, time**3, np.ones_like(time)], axis=-1)

    def __call__(self, observations: NDArray[np.floating], times: NDArray[np.int64]) -> Array:
        """Values of observations `[..., d]` at times `[...]`."""
        if self.weights is None:
            return np.zeros(times.shape)
        values: Array = self.features(observations, times) @ self.weights
        return values

    def fit(self, transitions: Transitions, discount: float) -> None:
        """Ridge regression of the discounted sum of rewards that followed.

        An episode that the rollout cuts off goes on with the value that this baseline had for it.
        """
        targets = discounted(transitions, self(transitions.last_observations, transitions.last_times), discount)
        rows = self.features(transitions.observations, transitions.times).reshape(targets.size, -1)
        gram = rows.T @ rows + self.ridge * np.eye(rows.shape[1])
        self.weights = np.linalg.solve(gram, rows.T @ targets.reshape(-1)).astype(np.float64)


def discounted(transitions: Transitions, last_values: Array, discount: float) -> Array:
    """The discounted sum of rewards from each action to the end of its episode, `[steps, copies]`.

    `last_values`, `[copies]`, stand for what comes after the rollout.
    """
    sums = np.empty(transitions.rewards.shape)
    following = last_values
    for step in reversed(range(len(sums))):
        following = transitions.rewards[step] + discount * np.where(transitions.dones[step], 0.0, following)
        sums[step] = following
    return sums
