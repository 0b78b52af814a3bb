"""The one training loop, with its checkpoints, progress and schedules; and a whole step as CUDA graphs."""

from noisygrad.training.captured import CapturedStep
from noisygrad.training.checkpoint import CheckpointError, load_checkpoint, save_checkpoint
from noisygrad.training.history import EpochRecord, History
from noisygrad.training.loop import train
from noisygrad.training.schedules import Annealed, CosineDecay, StepDecay

__all__ = [
    "Annealed",
    "CapturedStep",
    "CheckpointError",
    "CosineDecay",
    "EpochRecord",
    "History",
    "StepDecay",
    "load_checkpoint",
    "save_checkpoint",
    "train",
]
