"""The paper's experiment on exploration: its TRPO, its models, and controls. Needs the extra `paper`."""

from noisygrad_paper.extras import require

require("noisygrad_paper.exploration", "gymnasium", "stable_baselines3", "sb3_contrib", "Box2D", "PIL")

from noisygrad_paper.exploration.baseline import LinearFeatureBaseline
from noisygrad_paper.exploration.controls import NoBonus, SquaredNorm
from noisygrad_paper.exploration.models import MODELS
from noisygrad_paper.exploration.recorder import Recorder
from noisygrad_paper.exploration.trpo import LinearBaselineTRPO, paper_trpo

__all__ = ["LinearBaselineTRPO", "LinearFeatureBaseline", "MODELS", "NoBonus", "Recorder", "SquaredNorm", "paper_trpo"]
