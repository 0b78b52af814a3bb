"""Many copies of a task in one process, without the wrappers that would take longer than the engine itself."""

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvIndices

from noisygrad_paper.environments import HORIZON, Task

Array = NDArray[np.float32]


class TaskVector(VecEnv):
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
        self.envs = [task() for _ in range(copies)]
        self.horizon = horizon
        first = self.envs[0]
        if not isinstance(first, Task):
            raise TypeError(f"TaskVector steps noisygrad's own tasks; got {type(first).__name__}: use DummyVecEnv")
        super().__init__(copies, first.observation_space, first.action_space)
        self._steps = [0] * copies
        self._actions: list[float] = []
        if seed is not None:
            self.seed(seed)

    def reset(self) -> Array:
        observations = np.empty((self.num_envs, len(self.envs[0].largest_observation)), dtype=np.float32)
        for copy, env in enumerate(self.envs):
            observations[copy], self.reset_infos[copy] = env.reset(seed=self._seeds[copy], options=self._options[copy])
        self._steps = [0] * self.num_envs
        self._reset_seeds()
        self._reset_options()
        return observations

    def step_async(self, actions: Array) -> None:
        if np.shape(actions) != (self.num_envs, 1) or not np.isfinite(actions).all():
            raise ValueError(f"actions must be finite, of shape ({self.num_envs}, 1); got {actions!r}")
        self._actions = np.asarray(actions)[:, 0].tolist()

    def step_wait(self) -> tuple[Array, Array, NDArray[np.bool_], list[dict[str, Any]]]:
        """Observations, rewards, ends of episodes and, at those, the last observation."""
        infos: list[dict[str, Any]] = [{} for _ in self.envs]
        observations, rewards, dones = [], [], []
        for copy, (env, action) in enumerate(zip(self.envs, self._actions, strict=True)):
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

    def close(self) -> None:
        for env in self.envs:
            env.close()

    def get_images(self) -> Sequence[NDArray[np.uint8] | None]:
        return [env.render() for env in self.envs]

    def get_attr(self, attr_name: str, indices: VecEnvIndices = None) -> list[Any]:
        return [getattr(self.envs[copy], attr_name) for copy in self._get_indices(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: VecEnvIndices = None) -> None:
        for copy in self._get_indices(indices):
            setattr(self.envs[copy], attr_name, value)

    def env_method(
        self, method_name: str, *method_args: Any, indices: VecEnvIndices = None, **method_kwargs: Any
    ) -> list[Any]:
        return [
            getattr(self.envs[copy], method_name)(*method_args, **method_kwargs) for copy in self._get_indices(indices)
        ]

    def env_is_wrapped(
        self, wrapper_class: type[gymnasium.Wrapper[Any, Any, Any, Any]], indices: VecEnvIndices = None
    ) -> list[bool]:
        return [False for _ in self._get_indices(indices)]
