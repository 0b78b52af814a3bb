"""Reinforcement learning with a reward for learning: the paper's section on exploration.

Importing it registers the paper's three tasks with gymnasium. It needs the extra `rl`.
"""

from importlib.util import find_spec

_MISSING = [name for name in ("gymnasium", "Box2D", "stable_baselines3", "sb3_contrib") if find_spec(name) is None]
if _MISSING:
    raise ImportError(
        f"noisygrad.exploration needs {', '.join(_MISSING)}, which is not installed: pip install 'noisygrad[rl]'"
        + " (Box2D has wheels for Python 3.11 to 3.13, on Linux for x86-64 alone)" * ("Box2D" in _MISSING)
    )

from noisygrad.exploration.baseline import LinearFeatureBaseline
from noisygrad.exploration.bonus import Bonus, IntrinsicReward, NoBonus, SquaredNorm
from noisygrad.exploration.curiosity import GainBonus, InformationGain
from noisygrad.exploration.dynamics import MODELS, Dynamics, DynamicsSettings
from noisygrad.exploration.gain import information_gain
from noisygrad.exploration.recording import Recorder, Transitions
from noisygrad.exploration.replay import ReplayPool
from noisygrad.exploration.trpo import LinearBaselineTRPO, paper_trpo
from noisygrad_paper.environments import TASKS, CartPoleSwingup, DoublePendulum, MountainCar, Task
from noisygrad_paper.environments.vector import TaskVector

__all__ = [
    "Bonus",
    "CartPoleSwingup",
    "DoublePendulum",
    "Dynamics",
    "DynamicsSettings",
    "GainBonus",
    "InformationGain",
    "IntrinsicReward",
    "LinearBaselineTRPO",
    "LinearFeatureBaseline",
    "MODELS",
    "MountainCar",
    "NoBonus",
    "Recorder",
    "ReplayPool",
    "SquaredNorm",
    "TASKS",
    "Task",
    "TaskVector",
    "Transitions",
    "information_gain",
    "paper_trpo",
]
