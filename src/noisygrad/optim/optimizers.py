"""The optimisers: one algorithm, a class for each covariance family."""

from __future__ import annotations

from typing import ClassVar

from noisygrad.optim.optimizer import NoisyOptimizer


class NoisyAdam(NoisyOptimizer):
    """Noisy Adam (Algorithm 1): a fully factorised Gaussian posterior. Arguments: `NoisyOptimizer`.

    Statistics at every step; the factors of step and noise follow every 10 unless you say otherwise (1 in the paper).
    """

    family: ClassVar[str] = "diagonal"
    default_factor_every: ClassVar[int] = 10


class NoisyKFAC(NoisyOptimizer):
    """Noisy K-FAC (Algorithm 2): a matrix-variate Gaussian posterior for each layer. Arguments: `NoisyOptimizer`.

    Statistics every 10 steps and factors every 100 unless you say otherwise.
    """

    family: ClassVar[str] = "kronecker"
    default_stats_every: ClassVar[int] = 10
    default_factor_every: ClassVar[int] = 100


class NoisyEKFAC(NoisyOptimizer):
    """Noisy EK-FAC: the Fisher's own diagonal in the eigenbasis of noisy K-FAC. Arguments: `NoisyOptimizer`.

    The prior and the damping are always added exactly. Statistics every 10 steps; a new basis, and factors, every 100
    unless you say otherwise.
    """

    family: ClassVar[str] = "eigen"
    default_stats_every: ClassVar[int] = 10
    default_factor_every: ClassVar[int] = 100


class NoisyBlockTridiagonal(NoisyOptimizer):
    """Block-tridiagonal noisy K-FAC: neighbouring Linear layers are correlated too. Arguments: `NoisyOptimizer`.

    Statistics every 10 steps and factors every 100 unless you say otherwise.
    """

    family: ClassVar[str] = "tridiagonal"
    default_stats_every: ClassVar[int] = 10
    default_factor_every: ClassVar[int] = 100


class NoisyFull(NoisyOptimizer):
    """Noisy natural gradient with a full covariance, for networks of up to some thousand weights.

    Arguments: `NoisyOptimizer`. Factors every 10 steps unless you say otherwise.
    """

    family: ClassVar[str] = "full"
    default_factor_every: ClassVar[int] = 10
