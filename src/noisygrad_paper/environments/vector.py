"""Many copies of a task in one process, without the wrappers that would take longer than the engine itself."""

from collections.abc import Callable
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import DummyVecEnv

from noisygrad_paper.environments import HORIZON, Task

Array = NDArray[np.float32]


class TaskVector(DummyVecEnv):
    """A vector environment of stable-baselines3: `copies` of a task, stepped together.

    An episode ends when its task is over or after `horizon` actions. Both are ends: nothing tells the algorithm to add
    a value to the last reward, as the paper's code does not. Episodes go on from one rollout to the next. The last
    observation of an episode is in its `infos[copy]["terminal_observation"]`. Copy i begins
    with seed + i; without a seed, `reset` draws one.
    """

    def __init__(
        self, task: Callable[[], Task], copies: int, *, horizon: int = HORIZON, seed: int | None = None
    ) -> None:
        for name, value in (("copies", copies), ("horizon", horizon)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        super().__init__([task] * copies)
        self.tasks = [env for env in self.envs if isinstance(env, Task)]
        if len(self.tasks) < copies:
            kind = type(self.envs[0]).__name__
            raise TypeError(f"TaskVector steps noisygrad's own tasks; got {kind}: use DummyVecEnv")
        self.horizon = horizon
        self._steps = [0] * copies
        self._actions: list[float] = []
        if seed is not None:
            self.seed(seed)

    def reset(self) -> Array:
        self._steps = [0] * self.num_envs
        return cast(Array, super().reset())

    def step_async(self, actions: Array) -> None:
        if np.shape(actions) != (self.num_envs, 1) or not np.isfinite(actions).all():
            raise ValueError(f"actions must be finite, of shape ({self.num_envs}, 1); got {actions!r}")
        self._actions = np.asarray(actions)[:, 0].tolist()

    def step_wait(self) -> tuple[Array, Array, NDArray[np.bool_], list[dict[str, Any]]]:
        """Observations, rewards, ends of episodes and, at those, the last observation."""
        infos: list[dict[str, Any]] = [{} for _ in self.envs]
        observations, rewards, dones = [], [], []
        for copy, (env, action) in enumerate(zip(self.tasks, self._actions, strict=True)):
            observation, reward, over = env.advance(action)
            self._steps[copy] += 1
            done = over or self._steps[copy] >= self.horizon
            if done:
                infos[copy]["terminal_observation"] = np.array(observation, dtype=np.float32)
                observation = env.begin()
                self._steps[copy] = 0
            observations.append(observation)
            rewards.append(reward)
            dones.append(done)
        return np.array(observations, dtype=np.float32), np.array(rewards, dtype=np.float32), np.array(dones), infos
