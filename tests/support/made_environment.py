"""An environment that tests of exploration can break."""

import gymnasium
import numpy as np
from gymnasium import spaces


class Made(gymnasium.Env):
    """An environment that can be given any spaces and that breaks after some steps."""

    def __init__(self, observations=None, actions=None, observation=0.0, reward=0.0, after=3):
        unit = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.observation_space = unit if observations is None else observations
        self.action_space = unit if actions is None else actions
        self.broken, self.after = (observation, reward), after

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self.observation_space.sample(), {}

    def step(self, action):
        self.steps += 1
        seen, reward = self.observation_space.sample(), 0.0
        if self.steps >= self.after:
            seen, reward = seen + self.broken[0], self.broken[1]
        return seen, reward, False, False, {}
