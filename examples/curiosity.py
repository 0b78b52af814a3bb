"""Curiosity for PPO on an environment of one's own: a swing that must be pushed in time, with a reward far up.

Run it: python examples/curiosity.py
It needs the extra: pip install 'noisygrad[rl]'
"""

import gymnasium
import numpy as np
import torch
from gymnasium.wrappers import TimeLimit
from stable_baselines3 import PPO
from stable_baselines3.common.monitor import Monitor

from noisygrad_paper.curiosity import InformationGain


class Swing(gymnasium.Env):
    """The push is a seventh of what would hold the swing where the reward is."""

    observation_space = gymnasium.spaces.Box(-2.0, 2.0, (2,), np.float32)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.speed = float(self.np_random.normal(0.0, 0.05)), 0.0
        return np.array([self.place, self.speed], np.float32), {}

    def step(self, action):
        self.speed += 0.2 * (float(action[0]) / 7.0 - self.place) - 0.005 * self.speed
        self.place += 0.2 * self.speed
        there = abs(self.place) > 1.0
        return np.array([self.place, self.speed], np.float32), float(there), there, False, {}


torch.set_num_threads(1)
for name, callback in (("alone", None), ("curious", InformationGain(weight=0.1))):
    env = Monitor(TimeLimit(Swing(), 200))
    agent = PPO("MlpPolicy", env, n_steps=2000, batch_size=500, learning_rate=1e-3, seed=0, device="cpu")
    agent.learn(18_000, callback=callback)
    found = env.get_episode_rewards()
    print(f"PPO {name}: the reward was found in {sum(found):.0f} of {len(found)} episodes")
