"""`torch.optim` optimisers that fit a posterior: noisy Adam, noisy K-FAC, block-tridiagonal and full covariance."""

from noisygrad.algorithm.step import HeavyBall, Momentum, register_momentum_mode
from noisygrad.optim.finite import NonFiniteError
from noisygrad.optim.optimizer import NoisyOptimizer
from noisygrad.optim.optimizers import NoisyAdam, NoisyBlockTridiagonal, NoisyEKFAC, NoisyFull, NoisyKFAC

__all__ = [
    "HeavyBall",
    "Momentum",
    "NoisyAdam",
    "NoisyBlockTridiagonal",
    "NoisyEKFAC",
    "NoisyFull",
    "NoisyKFAC",
    "NoisyOptimizer",
    "NonFiniteError",
    "register_momentum_mode",
]
