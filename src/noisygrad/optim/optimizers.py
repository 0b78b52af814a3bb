"""The four optimisers: one algorithm, four covariance families."""

from __future__ import annotations

from typing import Any, ClassVar

from torch import nn

from noisygrad.likelihoods import Likelihood
from noisygrad.optim.base import NoisyOptimizer
from noisygrad.posterior.structure import Family


class NoisyAdam(NoisyOptimizer):
    """Noisy Adam (Algorithm 1): a fully factorised Gaussian posterior. Arguments: `NoisyOptimizer`."""

    family: ClassVar[Family] = "diagonal"


class NoisyKFAC(NoisyOptimizer):
    """Noisy K-FAC (Algorithm 2): a matrix-variate Gaussian posterior for each layer. Arguments: `NoisyOptimizer`.

    Statistics every 10 steps and factors every 100 unless you say otherwise.
    """

    family: ClassVar[Family] = "kronecker"

    def __init__(self, model: nn.Module, likelihood: Likelihood, **options: Any) -> None:
        super().__init__(model, likelihood, **{"stats_every": 10, "factor_every": 100} | options)


class NoisyBlockTridiagonal(NoisyOptimizer):
    """Block-tridiagonal noisy K-FAC: neighbouring Linear layers are correlated too. Arguments: `NoisyOptimizer`.

    Statistics every 10 steps and factors every 100 unless you say otherwise.
    """

    family: ClassVar[Family] = "tridiagonal"

    def __init__(self, model: nn.Module, likelihood: Likelihood, **options: Any) -> None:
        super().__init__(model, likelihood, **{"stats_every": 10, "factor_every": 100} | options)


class NoisyFull(NoisyOptimizer):
    """Noisy natural gradient with a full covariance, for networks of up to some thousand weights.

    Arguments: `NoisyOptimizer`. Factors every 10 steps unless you say otherwise.
    """

    family: ClassVar[Family] = "full"

    def __init__(self, model: nn.Module, likelihood: Likelihood, **options: Any) -> None:
        super().__init__(model, likelihood, **{"factor_every": 10} | options)
