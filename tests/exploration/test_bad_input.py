"""Mistakes in exploration: each is refused with a sentence that says what is supported."""

import importlib
import subprocess
import sys
import tempfile

import numpy as np
import pytest

pytest.importorskip("Box2D")
gymnasium = pytest.importorskip("gymnasium")
pytest.importorskip("sb3_contrib")

from gymnasium import spaces
from stable_baselines3 import PPO, SAC
from stable_baselines3.common.vec_env import DummyVecEnv

from noisygrad.exploration import (
    MODELS,
    CartPoleSwingup,
    DoublePendulum,
    Dynamics,
    DynamicsSettings,
    GainBonus,
    InformationGain,
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
from noisygrad.replicas.noisy import NoisySettings


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


def test_curiosity_refuses_what_takes_its_bonus_itself():
    with pytest.raises(TypeError, match="takes its bonus itself"):
        paper_trpo("MountainCar", batch=20, seed=0).learn(20, callback=InformationGain())


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
    # As where the extra is not installed: the command line and the report work, and the command says what it lacks.
    program = """
import sys
for name in ("Box2D", "gymnasium", "stable_baselines3", "sb3_contrib"):
    sys.modules[name] = None
import noisygrad_paper.report.site
from noisygrad.cli.main import main
main(["reproduce", "exploration", "--results", sys.argv[1]])
"""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", program, folder]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 2
    assert "pip install 'noisygrad[rl]'" in done.stderr
    assert "Traceback" not in done.stderr


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
        (lambda: InformationGain("MVG"), "there is no model 'MVG'; there are NNG-MVG, NNG-FFG, BBB"),
        (lambda: InformationGain(weight=np.nan), "weight of the bonus"),
        (lambda: InformationGain(minimum=0), "1 ≤ minimum ≤ capacity"),
        (lambda: InformationGain(train_every=0), "train_every must be at least 1"),
        (lambda: DynamicsSettings(fit=NoisySettings(family="full")), "the diagonal or the kronecker family"),
        (lambda: DynamicsSettings(fit=NoisySettings(damping_mode="exact")), "factored damping"),
        (lambda: DynamicsSettings(fit=NoisySettings(), noise_std=0.0), "noise_std must be positive"),
        (lambda: DynamicsSettings(fit=NoisySettings(), hidden=()), "one or more sizes"),
        (lambda: Dynamics(2, 1, MODELS["BBB"], []), "one seed"),
        (lambda: GainBonus(Dynamics(2, 1, MODELS["BBB"], [0]), replica=1), "numbered from 0"),
        (lambda: GainBonus(Dynamics(2, 1, MODELS["BBB"], [0, 1])), "None where models learn together"),
        (lambda: Dynamics(2, 1, MODELS["BBB"], [0, 1]).train([ReplayPool()]), "2 models and 1 pools"),
        (lambda: Dynamics(2, 1, MODELS["BBB"], [0]).train([ReplayPool()]), "holds 0 transitions and needs 500"),
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
