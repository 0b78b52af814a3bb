"""Mistakes in exploration: each is refused with a sentence that says what is supported."""

import importlib
import sys

import numpy as np
import pytest

pytest.importorskip("gymnasium")
pytest.importorskip("stable_baselines3")

from gymnasium import spaces
from stable_baselines3 import PPO, SAC

from noisygrad.replicas.noisy import NoisySettings
from noisygrad_paper.curiosity import (
    MODELS,
    Dynamics,
    DynamicsSettings,
    GainBonus,
    InformationGain,
    IntrinsicReward,
    ReplayPool,
    Transitions,
)
from noisygrad_paper.curiosity.bonus import Bonus
from noisygrad_paper.curiosity.supported import require_on_policy
from support.made_environment import Made


class Silent(Bonus):
    """Nothing is remarkable."""

    def measure(self, transitions: Transitions) -> None:
        return None

    def learn(self, transitions: Transitions) -> None:
        return None


@pytest.mark.parametrize(
    "spaces_given", [{"actions": spaces.Discrete(2)}, {"observations": spaces.Dict(a=spaces.Box(-1, 1, (2,)))}]
)
def test_curiosity_refuses_other_spaces(spaces_given):
    policy = "MultiInputPolicy" if "observations" in spaces_given else "MlpPolicy"
    with pytest.raises(TypeError, match=r"in a gymnasium.spaces.Box of floats"):
        PPO(policy, Made(**spaces_given), n_steps=8, batch_size=8, device="cpu").learn(8, callback=InformationGain())


def test_curiosity_refuses_off_policy_algorithms():
    agent = SAC("MlpPolicy", Made(), buffer_size=10, device="cpu")
    with pytest.raises(TypeError, match="on-policy algorithm of stable-baselines3"):
        agent.learn(8, callback=InformationGain())


def test_curiosity_refuses_another_environment():
    curious = InformationGain()
    PPO("MlpPolicy", Made(), n_steps=8, batch_size=8, device="cpu").learn(8, callback=curious)
    other = Made(observations=spaces.Box(-1.0, 1.0, (3,), np.float32))
    with pytest.raises(ValueError, match=r"of \(2, 2\) observations and actions, the environment has \(3, 2\)"):
        PPO("MlpPolicy", other, n_steps=8, batch_size=8, device="cpu").learn(8, callback=curious)


@pytest.mark.parametrize("broken", [{"observation": np.nan}, {"reward": np.inf}])
def test_curiosity_refuses_nan(broken):
    agent = PPO("MlpPolicy", Made(**broken), n_steps=8, batch_size=8, device="cpu")
    with pytest.raises(ValueError, match="that are NaN or infinite"):
        agent.learn(8, callback=InformationGain())


def test_a_pool_below_its_minimum_is_refused():
    pool = ReplayPool(minimum=500)
    for call in (pool.rows, pool.scales, lambda: pool.sample(1, 10)):
        with pytest.raises(ValueError, match="holds 0 transitions and needs 500"):
            call()
    with pytest.raises(ValueError, match="1 ≤ minimum ≤ capacity"):
        ReplayPool(capacity=100, minimum=500)


def test_off_policy_algorithms_are_refused():
    env = Made()
    with pytest.raises(TypeError, match=r"on-policy algorithm of stable-baselines3 .* got .*SAC"):
        require_on_policy(SAC("MlpPolicy", env, buffer_size=10, device="cpu"))
    on_policy = PPO("MlpPolicy", env, n_steps=8, batch_size=8, device="cpu")
    assert require_on_policy(on_policy) is on_policy


@pytest.mark.parametrize("missing", ["gymnasium", "stable_baselines3"])
def test_a_missing_extra_is_named(monkeypatch, missing):
    for name in [name for name in sys.modules if name.startswith("noisygrad_paper.curiosity")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"needs {missing}.*pip install 'noisygrad\[rl\]'"):
        importlib.import_module("noisygrad_paper.curiosity")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IntrinsicReward(Silent(), weight=-1.0), "weight of the bonus"),
        (lambda: IntrinsicReward(Silent(), window=0), "window must be at least 1"),
        (lambda: InformationGain("MVG"), "there is no model 'MVG'; there are NNG-MVG, NNG-FFG, or"),
        (lambda: InformationGain(weight=np.nan), "weight of the bonus"),
        (lambda: InformationGain(minimum=0), "1 ≤ minimum ≤ capacity"),
        (lambda: InformationGain(train_every=0), "train_every must be at least 1"),
        (
            lambda: InformationGain(DynamicsSettings(fit=NoisySettings(family="full"))),
            "must be diagonal or a Kronecker",
        ),
        (lambda: DynamicsSettings(fit=NoisySettings(), noise_std=0.0), "noise_std must be a positive number"),
        (lambda: DynamicsSettings(fit=NoisySettings(), hidden=()), "one or more sizes"),
        (lambda: Dynamics(2, 1, MODELS["NNG-FFG"], []), "one seed"),
        (lambda: GainBonus(Dynamics(2, 1, MODELS["NNG-FFG"], [0]), replica=1), "numbered from 0"),
        (lambda: GainBonus(Dynamics(2, 1, MODELS["NNG-FFG"], [0, 1])), "None where models learn together"),
        (lambda: Dynamics(2, 1, MODELS["NNG-FFG"], [0, 1]).train([ReplayPool()]), "2 models and 1 pools"),
        (lambda: Dynamics(2, 1, MODELS["NNG-FFG"], [0]).train([ReplayPool()]), "holds 0 transitions and needs 500"),
    ],
)
def test_settings_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()
