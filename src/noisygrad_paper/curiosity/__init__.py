"""Reinforcement learning with a reward for learning: what an action teaches a Bayesian network of the world.

Needs the extra `rl`. The paper's tasks, and its own form of TRPO, are in `noisygrad_paper.environments` and
`noisygrad_paper.exploration`.
"""

from noisygrad_paper.extras import require

require("noisygrad_paper.curiosity", "gymnasium", "stable_baselines3", extra="rl")

from noisygrad_paper.curiosity.bonus import Bonus, IntrinsicReward
from noisygrad_paper.curiosity.callback import GainBonus, InformationGain
from noisygrad_paper.curiosity.dynamics import MODELS, Dynamics, DynamicsSettings
from noisygrad_paper.curiosity.recording import Transitions
from noisygrad_paper.curiosity.replay import ReplayPool

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
]
