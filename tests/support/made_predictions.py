"""Predictions made by hand, and posteriors that give them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import noisygrad as ng
from noisygrad.active import suggest
from noisygrad.predictions import CategoricalPrediction, Prediction, RegressionPrediction
from support.truth import normal


class Fixed:
    """A posterior that says what it is told; it takes neither batch size nor generator."""

    def __init__(self, prediction: Prediction) -> None:
        self.prediction, self.calls = prediction, 0

    def predict(self, x: Tensor, num_samples: int | None = None) -> Prediction:
        self.calls += 1
        return self.prediction


def chosen(prediction: Prediction, n: int, strategy: str | None = None, **options: object) -> list[int]:
    posterior = Fixed(prediction)
    found = suggest(posterior, torch.zeros(prediction.target_shape[0], 1), n, strategy=strategy, **options)
    assert posterior.calls == 1
    assert found.dtype == torch.long
    assert found.shape == (n,)
    return found.tolist()


def gaussian(outputs: int = 1, draws: int = 40, points: int = 12) -> RegressionPrediction:
    """Correlated functions under noise that differs from point to point."""
    features, weights = normal(points, 5), normal(draws, 5, outputs, seed=2)
    location = 7 + torch.einsum("pf,sfo->spo", features, weights) + 0.3 * normal(draws, points, outputs, seed=3)
    return RegressionPrediction(location, normal(points, outputs, seed=4).mul(0.4).exp())


def classes(count: int = 3, draws: int = 20, points: int = 9, scale: float = 1.5) -> CategoricalPrediction:
    return CategoricalPrediction(
        scale * torch.einsum("pf,sfc->spc", normal(points, 4), normal(draws, 4, count, seed=2))
    )


def exact_draws(covariance: Tensor, count: int = 30) -> Tensor:
    """Draws `[count, n]` whose mean is 0 and whose covariance is the given one, exactly."""
    white = normal(count, len(covariance), seed=9)
    white = white - white.mean(0)
    root = torch.linalg.cholesky(white.T @ white / count)
    return torch.linalg.solve_triangular(root, white.T, upper=False).T @ torch.linalg.cholesky(covariance).T


def fitted(likelihood: ng.Likelihood, outputs: int, **options: object) -> ng.Posterior:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, outputs)).double()
    x = normal(40, 2)
    optimizer = ng.NoisyKFAC(model, likelihood, num_data=40, stats_every=1, factor_every=1, seed=0, **options)
    target = x[:, :1] if isinstance(likelihood, ng.Gaussian) else (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
    for _ in range(60):
        optimizer.step(lambda: (model(x), target))
    return optimizer.posterior()
