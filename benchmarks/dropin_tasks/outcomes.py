"""What outputs mean, for methods with a posterior and without: loss, noise, predictive, baseline."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

import noisygrad as ng
from noisygrad.predictions import (
    BernoulliPrediction,
    CategoricalPrediction,
    PoissonPrediction,
    Prediction,
    RegressionPrediction,
)

from .task import Part


def mixture(log_probs: Tensor) -> Tensor:
    """The log of the mean over samples, the first dimension."""
    return torch.logsumexp(log_probs, 0) - math.log(log_probs.shape[0])


class Outcome(Protocol):
    """One kind of target."""

    classes: bool
    """Whether targets are labels, for accuracy and calibration."""

    def likelihood(self) -> ng.Likelihood:
        """Ours."""

    def loss(self, output: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
        """What somebody would write with torch alone: a mean."""

    def noise(self, output: Tensor, target: Tensor) -> Tensor | None:
        """The noise variance that a point estimate's residuals show, where there is any."""

    def prediction(self, outputs: Tensor, noise: Tensor | None) -> Prediction:
        """The equal mixture of outputs `[samples, batch, ...]`."""

    def log_prob(self, prediction: Prediction, target: Tensor) -> Tensor:
        """Of each target by itself: `[batch]`, or `[batch, positions]` where they have positions."""

    def marginal(self, train: Part) -> tuple[Tensor, Tensor | None]:
        """Output, of one row and position, and noise of what knows the training targets and no inputs."""


class CategoricalOutcome:
    """Labels, perhaps one for each position."""

    classes = True

    def likelihood(self) -> ng.Likelihood:
        return ng.Categorical()

    def loss(self, output: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
        if mask is None:
            return F.cross_entropy(output.flatten(0, -2), target.flatten())
        return F.cross_entropy(output[mask], target[mask])

    def noise(self, output: Tensor, target: Tensor) -> Tensor | None:
        return None

    def prediction(self, outputs: Tensor, noise: Tensor | None) -> Prediction:
        return CategoricalPrediction(outputs, outputs.dim() - 3)

    def log_prob(self, prediction: Prediction, target: Tensor) -> Tensor:
        assert isinstance(prediction, CategoricalPrediction)
        index = target.expand(prediction.log_probs.shape[:-1]).unsqueeze(-1)
        return mixture(prediction.log_probs.gather(-1, index).squeeze(-1))

    def marginal(self, train: Part) -> tuple[Tensor, Tensor | None]:
        targets = train.targets if train.mask is None else train.targets[train.mask]
        return (torch.bincount(targets.flatten(), minlength=128).float() + 0.01).log(), None


class BernoulliOutcome:
    """One or several yes-or-no answers."""

    classes = True

    def likelihood(self) -> ng.Likelihood:
        return ng.Bernoulli()

    def loss(self, output: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
        return F.binary_cross_entropy_with_logits(output, target)

    def noise(self, output: Tensor, target: Tensor) -> Tensor | None:
        return None

    def prediction(self, outputs: Tensor, noise: Tensor | None) -> Prediction:
        return BernoulliPrediction(outputs)

    def log_prob(self, prediction: Prediction, target: Tensor) -> Tensor:
        return prediction.log_prob(target)

    def marginal(self, train: Part) -> tuple[Tensor, Tensor | None]:
        return train.targets.mean(0).clamp(1e-4, 1 - 1e-4).logit(), None


class GaussianOutcome:
    """Numbers; the noise is one for all outputs, or one for each."""

    classes = False

    def __init__(self, *, per_output: bool) -> None:
        self.per_output = per_output

    def likelihood(self) -> ng.Likelihood:
        return ng.Gaussian(per_output=self.per_output)

    def loss(self, output: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
        return F.mse_loss(output, target)

    def noise(self, output: Tensor, target: Tensor) -> Tensor | None:
        squares = (output - target).square()
        variance = squares.mean(0) if self.per_output else squares.mean().expand(target.shape[1])
        return variance.clamp(min=1e-12)

    def prediction(self, outputs: Tensor, noise: Tensor | None) -> Prediction:
        assert noise is not None
        return RegressionPrediction(outputs, noise.sqrt())

    def log_prob(self, prediction: Prediction, target: Tensor) -> Tensor:
        return prediction.log_prob(target)

    def marginal(self, train: Part) -> tuple[Tensor, Tensor | None]:
        mean = train.targets.mean(0)
        return mean, self.noise(mean.expand_as(train.targets), train.targets)


class PoissonOutcome:
    """Counts."""

    classes = False

    def likelihood(self) -> ng.Likelihood:
        return ng.Poisson()

    def loss(self, output: Tensor, target: Tensor, mask: Tensor | None) -> Tensor:
        return F.poisson_nll_loss(output, target.to(output.dtype))

    def noise(self, output: Tensor, target: Tensor) -> Tensor | None:
        return None

    def prediction(self, outputs: Tensor, noise: Tensor | None) -> Prediction:
        return PoissonPrediction(outputs)

    def log_prob(self, prediction: Prediction, target: Tensor) -> Tensor:
        return prediction.log_prob(target)

    def marginal(self, train: Part) -> tuple[Tensor, Tensor | None]:
        return train.targets.float().mean(0).clamp(min=1e-3).log(), None


OUTCOMES: Mapping[str, Outcome] = {
    "categorical": CategoricalOutcome(),
    "bernoulli": BernoulliOutcome(),
    "gaussian": GaussianOutcome(per_output=False),
    "gaussian-per-output": GaussianOutcome(per_output=True),
    "poisson": PoissonOutcome(),
}
"""By the names that tasks have for them."""
