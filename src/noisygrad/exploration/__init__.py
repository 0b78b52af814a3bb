"""Reinforcement learning with a reward for learning: what an action teaches a Bayesian network of the world.

Needs the extra `rl`. The paper's tasks, and its own form of TRPO, are in `noisygrad_paper.environments` and
`noisygrad_paper.exploration`.
"""

from importlib.util import find_spec

_MISSING = [name for name in ("gymnasium", "stable_baselines3") if find_spec(name) is None]
if _MISSING:
    raise ImportError(
        f"noisygrad.exploration needs {', '.join(_MISSING)}, which is not installed: pip install 'noisygrad[rl]'"
    )

from noisygrad.exploration.bonus import Bonus, IntrinsicReward
from noisygrad.exploration.curiosity import GainBonus, InformationGain
from noisygrad.exploration.dynamics import MODELS, Dynamics, DynamicsSettings
from noisygrad.exploration.gain import information_gain
from noisygrad.exploration.recording import Transitions
from noisygrad.exploration.replay import ReplayPool

__all__ = [
    "Bonus",
    "Dynamics",
    "DynamicsSettings",
    "GainBonus",
    "InformationGain",
    "IntrinsicReward",
    "MODELS",
    "ReplayPool",
    "Transitions",
    "information_gain",
]
