"""Mistakes in exploration: each is refused with a sentence that says what is supported."""

import ast
import importlib
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("Box2D")
gymnasium = pytest.importorskip("gymnasium")
pytest.importorskip("sb3_contrib")

from gymnasium import spaces
from stable_baselines3 import PPO, SAC
from stable_baselines3.common.vec_env import DummyVecEnv

import noisygrad
from noisygrad.exploration import (
    CartPoleSwingup,
    DoublePendulum,
    IntrinsicReward,
    LinearBaselineTRPO,
    LinearFeatureBaseline,
    MountainCar,
    NoBonus,
    Recorder,
    ReplayPool,
    TaskVector,
    paper_trpo,
)
from noisygrad.exploration.supported import require_on_policy


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


@pytest.mark.parametrize("missing", ["Box2D", "gymnasium", "stable_baselines3", "sb3_contrib"])
def test_a_missing_extra_is_named(monkeypatch, missing):
    for name in [name for name in sys.modules if name.startswith("noisygrad.exploration")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ImportError, match=rf"needs {missing}.*pip install 'noisygrad\[rl\]'"):
        importlib.import_module("noisygrad.exploration")


def test_nothing_else_needs_the_extra():
    root = Path(noisygrad.__file__).parent
    extra = {"Box2D", "gymnasium", "stable_baselines3", "sb3_contrib"}
    for path in root.rglob("*.py"):
        if "exploration" not in path.relative_to(root).parts:
            nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
            names = {a.name.split(".")[0] for node in nodes if isinstance(node, ast.Import) for a in node.names}
            names |= {(node.module or "").split(".")[0] for node in nodes if isinstance(node, ast.ImportFrom)}
            assert not names & extra, path


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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MountainCar(render_mode="human"), "render_mode must be None or 'rgb_array'"),
        (lambda: DoublePendulum(threshold=0.0), "threshold must be positive"),
        (lambda: TaskVector(MountainCar, 0), "copies must be at least 1"),
        (lambda: TaskVector(MountainCar, 1, horizon=0), "horizon must be at least 1"),
        (lambda: paper_trpo("Acrobot"), "there are CartPoleSwingup, MountainCar, DoublePendulum"),
        (lambda: paper_trpo("MountainCar", batch=5001), "multiple of the 10 copies"),
        (lambda: LinearFeatureBaseline(ridge=0.0), "ridge must be positive"),
        (lambda: IntrinsicReward(NoBonus(), weight=-1.0), "weight of the bonus"),
        (lambda: IntrinsicReward(NoBonus(), window=0), "window must be at least 1"),
    ],
)
def test_settings_are_checked(make, message):
    with pytest.raises(ValueError, match=message):
        make()


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
