"""Posteriors of two small networks, for the tests of what a posterior does and of its files."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

import noisygrad as ng
from support.truth import OPTIMIZERS, normal

PRIORS = {"*bias": 0.4, "*": 1.3}


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 3), nn.LayerNorm(3), nn.Tanh(), nn.Linear(3, 2))


def convolutions() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 2, groups=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 2, bias=False)
    )


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (mlp, (2,)),
    "convolutions": (convolutions, (2, 3, 3)),
}


def fitted(family: str, name: str = "mlp", steps: int = 4, **options: object) -> tuple[ng.Posterior, Tensor, Tensor]:
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make().double()
    likelihood = options.pop("likelihood", None) or ng.Gaussian(noise_variance=0.5)
    settings = {"num_data": 30, "kl_weight": 0.6, "prior_variance": PRIORS, "stats_every": 1, "factor_every": 1}
    optimizer = OPTIMIZERS[family](model, likelihood, seed=1, lr=0.05, **settings | options)
    x = normal(6, *shape)
    y = normal(6, 2, seed=2)
    for _ in range(steps):
        optimizer.step(lambda: (model(x), y))
    return optimizer.posterior(), x, y


def generator(seed: int = 4) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def vector(weights: dict[str, Tensor]) -> Tensor:
    return parameters_to_vector(weights.values())
