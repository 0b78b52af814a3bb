"""A vector environment of stable-baselines3 that keeps what happens in it."""

from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper

from noisygrad_paper.curiosity.recording import Tape, Transitions
from noisygrad_paper.curiosity.supported import require_box

Array = NDArray[np.float32]


class Recorder(VecEnvWrapper):
    """A vector environment of Box observations and actions that keeps what happens in it until `take` is called."""

    def __init__(self, venv: VecEnv) -> None:
        super().__init__(venv)
        require_box(venv.observation_space, venv.action_space)
        self._actions: Array = np.empty(0, dtype=np.float32)
        self._tape = Tape(self.num_envs)

    def discard(self) -> None:
        """Forget what is recorded; the episodes go on."""
        self._tape.discard()

    def reset(self) -> Array:
        """Begin new episodes; what is recorded is forgotten."""
        observations = cast(Array, self.venv.reset())
        self._tape.begin(observations)
        return observations

    def step_async(self, actions: Array) -> None:
        """Hand the actions on."""
        self._actions = np.array(actions)
        self.venv.step_async(actions)

    def step_wait(self) -> tuple[Array, Array, NDArray[np.bool_], list[dict[str, Any]]]:
        """The results, as the environment gives them; ValueError where an observation or a reward is not finite."""
        given, rewards, dones, infos = self.venv.step_wait()
        observations = cast(Array, given)
        self._tape.add(self._actions, observations, rewards, dones, infos)
        return observations, rewards, dones, infos

    def take(self) -> Transitions:
        """All since the last call, in order; RuntimeError where nothing has happened since."""
        return self._tape.take()
