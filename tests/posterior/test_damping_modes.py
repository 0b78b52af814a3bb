"""The posterior adds the prior as the optimiser does: approximately (equation 11), or exactly."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import noisygrad as ng
from support.truth import normal

N, VARIANCE = 30, 0.7


def fitted(mode: str) -> ng.Posterior:
    torch.manual_seed(0)
    model = nn.Linear(3, 2).double()
    options = {"num_data": N, "kl_weight": 0.6, "prior_variance": VARIANCE, "stats_every": 1, "factor_every": 1}
    optimizer = ng.NoisyKFAC(model, ng.Gaussian(0.5), damping_mode=mode, seed=0, **options)
    for _ in range(4):
        optimizer.step(lambda: (model(normal(6, 3)), normal(6, 2, seed=2)))
    return optimizer.posterior()


def exact_precision(posterior: ng.Posterior) -> Tensor:
    """(N/λ) S ⊗ A + 1/η, in the order of the parameters: the weights row by row, then the biases."""
    (statistics,) = (each.tensors() for each in posterior.statistics.values())
    rows = torch.kron(statistics["outputs"], statistics["inputs"]) * (N / posterior.kl_weight) + torch.eye(8) / VARIANCE
    order = torch.tensor([0, 1, 2, 4, 5, 6, 3, 7])
    return rows[order][:, order]


def test_exact_damping_is_exact_in_the_posterior_too() -> None:
    posterior = fitted("exact")
    torch.testing.assert_close(posterior.precision(), exact_precision(posterior))


def test_factored_damping_is_an_approximation_in_the_posterior_too() -> None:
    posterior = fitted("factored")
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(posterior.precision(), exact_precision(posterior), rtol=1e-3, atol=1e-3)
