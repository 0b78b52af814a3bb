"""Mistakes with the paper's tasks and its TRPO: each is refused with a sentence that says what is supported."""

import importlib
import sys

import numpy as np
import pytest

pytest.importorskip("Box2D")
pytest.importorskip("gymnasium")
pytest.importorskip("sb3_contrib")

from gymnasium import spaces
from stable_baselines3.common.vec_env import DummyVecEnv

from noisygrad_paper.curiosity import InformationGain, IntrinsicReward
from noisygrad_paper.environments import CartPoleSwingup, DoublePendulum, MountainCar
from noisygrad_paper.environments.vector import TaskVector
from noisygrad_paper.exploration import LinearBaselineTRPO, LinearFeatureBaseline, NoBonus, Recorder, paper_trpo
from support.made_environment import Made


@pytest.mark.parametrize(
    ("spaces_given", "what"),
    [
        ({"actions": spaces.Discrete(2)}, "actions in a gymnasium.spaces.Box .* Discrete"),
        ({"actions": spaces.MultiBinary(3)}, "actions in a gymnasium.spaces.Box"),
        ({"observations": spaces.Discrete(5)}, "observations in a gymnasium.spaces.Box"),
        ({"observations": spaces.Box(0, 255, (8, 8, 3), np.uint8)}, "observations in a gymnasium.spaces.Box of floats"),
        ({"observations": spaces.Dict(a=spaces.Box(-1, 1, (2,)))}, "observations in a gymnasium.spaces.Box"),
    ],
)
def test_other_spaces_are_refused(spaces_given, what):
    with pytest.raises(TypeError, match=what):
        LinearBaselineTRPO("MultiInputPolicy", Made(**spaces_given), n_steps=8)


def test_curiosity_refuses_what_takes_its_bonus_itself():
    with pytest.raises(TypeError, match="takes its bonus itself"):
        paper_trpo("MountainCar", batch=20, seed=0).learn(20, callback=InformationGain())


@pytest.mark.parametrize("broken", [{"observation": np.nan}, {"observation": np.inf}, {"reward": np.nan}])
def test_nan_from_an_environment_is_refused(broken):
    trpo = LinearBaselineTRPO("MlpPolicy", Made(**broken), n_steps=8, batch_size=8, device="cpu")
    what = "observations" if "observation" in broken else "rewards"
    with pytest.raises(ValueError, match=rf"the environment gave {what} that are NaN or infinite \(copies \[0\]\)"):
        trpo.learn(8)


def test_nan_names_the_copy():
    env = Recorder(DummyVecEnv([Made, lambda: Made(observation=np.nan, after=1)]))
    env.reset()
    with pytest.raises(ValueError, match=r"copies \[1\]"):
        env.step(np.zeros((2, 2), dtype=np.float32))


@pytest.mark.parametrize("action", [np.array([np.nan]), np.zeros(2), 0.5])
def test_actions_are_checked(action):
    env = MountainCar()
    with pytest.raises(RuntimeError, match="call reset"):
        env.step(np.zeros(1))
    env.reset(seed=0)
    with pytest.raises(ValueError, match="one finite number"):
        env.step(action)


def test_vector_actions_are_checked():
    env = TaskVector(MountainCar, 2, seed=0)
    env.reset()
    for actions in (np.zeros(2), np.full((2, 1), np.nan)):
        with pytest.raises(ValueError, match=r"of shape \(2, 1\)"):
            env.step(actions)


def test_states_are_checked():
    for state in ((0, 0), (0, 0, np.nan, 0)):
        with pytest.raises(ValueError, match="the state must be finite numbers for x, ẋ, θ, θ̇"):
            CartPoleSwingup().reset(options={"state": state})


def test_only_tasks_go_into_a_task_vector():
    with pytest.raises(TypeError, match="use DummyVecEnv"):
        TaskVector(Made, 2)


def test_a_bonus_of_nan_is_refused():
    class Diverged(NoBonus):
        def measure(self, transitions):
            return np.full(transitions.rewards.shape, np.nan)

    with pytest.raises(ValueError, match="Diverged gave a bonus of NaN"):
        paper_trpo("MountainCar", intrinsic=IntrinsicReward(Diverged()), batch=20, seed=0).learn(20)


def test_nothing_recorded():
    with pytest.raises(RuntimeError, match="nothing was recorded"):
        Recorder(TaskVector(MountainCar, 1, seed=0)).take()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MountainCar(render_mode="human"), "render_mode must be None or 'rgb_array'"),
        (lambda: DoublePendulum(threshold=0.0), "threshold must be a positive number"),
        (lambda: TaskVector(MountainCar, 0), "copies must be at least 1"),
        (lambda: TaskVector(MountainCar, 1, horizon=0), "horizon must be at least 1"),
        (lambda: paper_trpo("Acrobot"), "there are CartPoleSwingup, MountainCar, DoublePendulum"),
        (lambda: paper_trpo("MountainCar", batch=5001), "multiple of the 10 copies"),
        (lambda: LinearFeatureBaseline(ridge=0.0), "ridge must be positive"),
    ],
)
def test_settings_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("package", ["environments", "exploration"])
@pytest.mark.parametrize("missing", ["Box2D", "gymnasium", "PIL"])
def test_a_missing_package_is_named(monkeypatch, package, missing):
    for name in [name for name in sys.modules if name.startswith(f"noisygrad_paper.{package}")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ModuleNotFoundError, match=rf"needs {missing}.*pip install 'noisygrad\[paper\]'"):
        importlib.import_module(f"noisygrad_paper.{package}")
