"""Curiosity for algorithms of stable-baselines3: what it adds, what it learns from, and that it goes on."""

import dataclasses

import numpy as np
import pytest

for _module in ("Box2D", "gymnasium", "sb3_contrib"):
    pytest.importorskip(_module)

import gymnasium
from sb3_contrib import TRPO
from stable_baselines3 import A2C, PPO
from stable_baselines3.common.callbacks import BaseCallback

from noisygrad_paper.curiosity import MODELS, InformationGain

QUICK = dataclasses.replace(MODELS["NNG-MVG"], hidden=(4,), updates=20)


class Counter(gymnasium.Env):
    """Counts its steps to five, beside a number that the action is added to; in float64, as many environments are."""

    observation_space = gymnasium.spaces.Box(-50.0, 50.0, (2,), np.float64)
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.state = np.array([0.0, self.np_random.normal()])
        return self.state.copy(), {}

    def step(self, action):
        self.state = self.state + np.array([1.0, float(action[0])])
        return self.state.copy(), 0.5, self.state[0] == 5.0, False, {}


class Witness(BaseCallback):
    """Looks at the buffer after everyone else."""

    def __init__(self, gamma):
        super().__init__()
        self.gamma, self.bonuses = gamma, []

    def _on_step(self):
        return True

    def _on_rollout_end(self):
        buffer = self.model.rollout_buffer
        self.bonuses.append(buffer.rewards - 0.5)
        after = self.gamma * self.locals["values"].numpy().flatten() * (1.0 - self.locals["dones"])
        expected = buffer.rewards[-1] + after - buffer.values[-1]
        np.testing.assert_allclose(buffer.advantages[-1], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("algorithm", [PPO, A2C, TRPO])
def test_the_bonus_is_in_rewards_and_advantages(algorithm):
    more = {} if algorithm is A2C else {"batch_size": 64}
    agent = algorithm("MlpPolicy", Counter(), n_steps=64, seed=0, device="cpu", gamma=0.9, **more)
    curious, witness = InformationGain(QUICK, weight=0.1, minimum=60, train_every=64), Witness(0.9)
    agent.learn(4 * 64, callback=[curious, witness])
    first, *others = witness.bonuses
    assert (first == 0).all()  # nothing is known of a world never seen
    for bonus in others:
        assert (bonus > 0).any()
        assert (bonus > -1e-6).all()
    assert np.median(others[0]) == pytest.approx(0.1, rel=1e-3)  # a typical bonus has the weight


def test_what_it_learns_from_spans_no_two_episodes():
    agent = PPO("MlpPolicy", Counter(), n_steps=32, batch_size=32, seed=0, device="cpu")
    curious = InformationGain(QUICK, minimum=30, train_every=32)
    agent.learn(96, callback=curious)
    observations, actions, following = curious.bonus.pool.rows()
    assert len(observations) == 96
    np.testing.assert_array_equal(following[:, 0], observations[:, 0] + 1.0)
    np.testing.assert_allclose(following[:, 1], observations[:, 1] + actions[:, 0], atol=1e-5)
    assert (np.abs(actions) <= 1.0).all()
    assert set(observations[:, 0]) == {0.0, 1.0, 2.0, 3.0, 4.0}


def test_learning_goes_on_with_what_it_knows():
    agent = PPO("MlpPolicy", Counter(), n_steps=32, batch_size=32, seed=0, device="cpu")
    curious = InformationGain(QUICK, minimum=30, train_every=64)
    with pytest.raises(RuntimeError, match="when learning begins"):
        _ = curious.bonus
    agent.learn(96, callback=curious)
    assert len(curious.bonus.errors) == 1  # trained after the second rollout, so it could judge the third
    agent.learn(32, callback=curious, reset_num_timesteps=False)
    agent.learn(32, callback=curious)
    assert len(curious.bonus.errors) == 3
    assert len(curious.bonus.pool) == 160


def test_the_seed_is_the_algorithms():
    def bonus(seed):
        agent = PPO("MlpPolicy", Counter(), n_steps=64, batch_size=64, seed=seed, device="cpu")
        curious = InformationGain(QUICK, minimum=60, train_every=64)
        agent.learn(128, callback=curious)
        return curious.bonus.errors[0].model

    assert bonus(1) == bonus(1)
    assert bonus(1) != bonus(2)
