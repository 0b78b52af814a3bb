"""What exploration works with, and errors that say so."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray
from stable_baselines3.common.on_policy_algorithm import OnPolicyAlgorithm

Array = NDArray[np.float32]


def require_box(observations: gymnasium.Space[Any], actions: gymnasium.Space[Any]) -> tuple[spaces.Box, spaces.Box]:
    """Both spaces, if they are of real numbers in one dimension: the dynamics of anything else are no regression."""
    for what, space in (("observations", observations), ("actions", actions)):
        if not isinstance(space, spaces.Box) or len(space.shape) != 1 or not np.issubdtype(space.dtype, np.floating):
            raise TypeError(
                f"exploration needs {what} in a gymnasium.spaces.Box of floats with one dimension; this environment's "
                f"are in {space}. Discrete actions and images are not supported."
            )
    assert isinstance(observations, spaces.Box)
    assert isinstance(actions, spaces.Box)
    return observations, actions


def require_on_policy(algorithm: object) -> OnPolicyAlgorithm:
    """The algorithm, if it learns from whole rollouts, whose rewards can be changed before it does."""
    if not isinstance(algorithm, OnPolicyAlgorithm):
        raise TypeError(
            "a bonus is added to whole rollouts, so it needs an on-policy algorithm of stable-baselines3 (PPO, A2C, "
            f"sb3_contrib's TRPO); got {type(algorithm).__module__}.{type(algorithm).__name__}"
        )
    return algorithm


def require_finite(what: str, values: Array | NDArray[np.float64]) -> None:
    """Raise ValueError where numbers are not finite, and say in which copy of the environment."""
    if not np.isfinite(values).all():
        copies = np.flatnonzero(~np.isfinite(values.reshape(len(values), -1)).all(1)).tolist()
        raise ValueError(f"the environment gave {what} that are NaN or infinite (copies {copies}); nothing was learned")
