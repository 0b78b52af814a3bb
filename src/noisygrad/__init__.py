"""Bayesian deep learning by noisy natural gradient: swap the optimiser, get a posterior.

import noisygrad as ng

optimizer = ng.NoisyKFAC(model, ng.Categorical(), num_data=len(train_set))
for x, y in loader:
    loss = optimizer.step(lambda: (model(x), y))
prediction = optimizer.posterior().predict(x)
"""

from typing import TYPE_CHECKING, Any

from noisygrad import active, metrics, networks
from noisygrad.curvature import register_layer
from noisygrad.kernels.factorisation import FactorisationError
from noisygrad.likelihoods import (
    Bernoulli,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Likelihood,
    Poisson,
    register_likelihood,
)
from noisygrad.optim import (
    NoisyAdam,
    NoisyBlockTridiagonal,
    NoisyEKFAC,
    NoisyFull,
    NoisyKFAC,
    NoisyOptimizer,
    NonFiniteError,
)
from noisygrad.posterior import Posterior, load_posterior
from noisygrad.predictions import Prediction
from noisygrad.training import train

if TYPE_CHECKING:
    from noisygrad.estimators.estimators import NoisyClassifier, NoisyRegressor

__version__ = "0.1.0"

__all__ = [
    "Bernoulli",
    "Categorical",
    "FactorisationError",
    "Gaussian",
    "HeteroscedasticGaussian",
    "Likelihood",
    "NoisyAdam",
    "NoisyBlockTridiagonal",
    "NoisyClassifier",
    "NoisyEKFAC",
    "NoisyFull",
    "NoisyKFAC",
    "NoisyOptimizer",
    "NoisyRegressor",
    "NonFiniteError",
    "Poisson",
    "Posterior",
    "Prediction",
    "active",
    "load_posterior",
    "metrics",
    "networks",
    "register_layer",
    "register_likelihood",
    "train",
]


def __getattr__(name: str) -> Any:
    """The estimators, when they are first asked for: scikit-learn takes a while to import."""
    if name in {"NoisyClassifier", "NoisyRegressor"}:
        from noisygrad.estimators import estimators

        return getattr(estimators, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
