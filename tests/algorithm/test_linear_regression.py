"""Level 4: Bayesian linear regression, where the posterior is known."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

import noisygrad as ng
from support.truth import FAMILIES, OPTIMIZERS, close, normal

NOISE, ETA = 0.3, 2.0


def regression(seed: int = 0, inputs: int = 20, points: int = 200) -> tuple[Tensor, Tensor]:
    mixing = torch.eye(inputs, dtype=torch.float64) + 0.35 * normal(inputs, inputs, seed=seed + 1) / inputs**0.5 * 2
    x = normal(points, inputs, seed=seed + 2) @ mixing
    y = x @ normal(inputs, 1, seed=seed + 3) + 0.7 + math.sqrt(NOISE) * normal(points, 1, seed=seed + 4)
    return x, y


def exact_posterior(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and precision with a bias."""
    design = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
    precision = design.mT @ design / NOISE + torch.eye(design.shape[1], dtype=x.dtype) / ETA
    return torch.linalg.solve(precision, design.mT @ y / NOISE).flatten(), precision


def fit(
    optimizer: ng.NoisyOptimizer, x: Tensor, y: Tensor, steps: int, first: float = 0.1, last: float = 1e-3
) -> ng.Posterior:
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = first * (last / first) ** max(0.0, 2 * step / steps - 1)
        optimizer.step(lambda: (optimizer.model(x), y))
    return optimizer.posterior()


def start(family: str, **options: object) -> ng.NoisyOptimizer:
    torch.manual_seed(0)
    model = nn.Linear(20, 1).double()
    settings = {
        "num_data": 200,
        "prior_variance": ETA,
        "seed": 5,
        "momentum": 0.0,
        "stats_every": 1,
        "factor_every": 10,
    }
    return OPTIMIZERS[family](model, ng.Gaussian(noise_variance=NOISE), **settings | options)


@pytest.mark.parametrize("family", ["diagonal", "full", "kronecker"])
def test_a_floor_is_added_to_the_fisher(family: str) -> None:
    """εI; for Kronecker factors ε I ⊗ A/a, whose mean diagonal is ε and which rescaled inputs do not change."""
    x, y = regression()
    plain, raised = (start(family, fisher_decay=0.0, fisher_floor=floor) for floor in (0.0, 0.3))
    for optimizer in (plain, raised):
        optimizer.model.load_state_dict(plain.model.state_dict())
        optimizer.step(lambda optimizer=optimizer: (optimizer.model(x), y))
    difference = raised.posterior().precision() - plain.posterior().precision()
    fisher = plain.posterior().precision() - torch.eye(21, dtype=torch.float64) / ETA
    expected = 0.3 * (fisher / fisher.diagonal().mean() if family == "kronecker" else torch.eye(21)).double()
    torch.testing.assert_close(difference / 200, expected, rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="fisher_floor must be at least 0"):
        start(family, fisher_floor=-1.0)


def mean_error(posterior: ng.Posterior, mean: Tensor, precision: Tensor) -> float:
    """In posterior standard deviations, on average."""
    found = torch.cat([tensor.flatten() for tensor in posterior.mean.values()])
    return float(((found - mean) / torch.linalg.inv(precision).diagonal().sqrt()).abs().mean())


def relative(found: Tensor, truth: Tensor) -> float:
    return float((found - truth).norm() / truth.norm())


@pytest.mark.parametrize("decay", [0.99, 0.999])
def test_full_converges_to_the_exact_posterior(decay: float) -> None:
    x, y = regression()
    mean, precision = exact_posterior(x, y)
    posterior = fit(start("full", fisher_decay=decay), x, y, 3000)
    assert mean_error(posterior, mean, precision) < 0.05
    assert relative(posterior.covariance(), torch.linalg.inv(precision)) < 0.05
    assert relative(posterior.covariance(), torch.diag(1 / precision.diagonal())) > 0.2


@pytest.mark.parametrize("decay", [0.99, 0.999])
def test_diagonal_converges_to_the_mean_field_optimum(decay: float) -> None:
    x, y = regression()
    mean, precision = exact_posterior(x, y)
    posterior = fit(start("diagonal", fisher_decay=decay), x, y, 3000, first=0.5)
    assert mean_error(posterior, mean, precision) < 0.1
    found = posterior.covariance().diagonal()
    assert ((found * precision.diagonal() - 1).abs() < 0.05).all()


def test_half_the_data_and_then_the_other_half_is_all_of_it() -> None:
    x, y = regression()
    mean, precision = exact_posterior(x, y)
    first = fit(start("full", num_data=100, fisher_decay=0.999), x[:100], y[:100], 1500)
    assert relative(first.covariance(), torch.linalg.inv(precision)) > 0.5
    again = start("full", num_data=100, fisher_decay=0.999, prior=first.as_prior(), prior_variance=None)
    second = fit(again, x[100:], y[100:], 1500)
    assert mean_error(second, mean, precision) < 0.15
    assert relative(second.covariance(), torch.linalg.inv(precision)) < 0.08


@pytest.mark.parametrize("family", FAMILIES)
def test_a_fitted_prior_is_given_back_by_no_data(family: str) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.LayerNorm(4), nn.Linear(4, 2)).double()
    options = {"num_data": 40, "kl_weight": 0.7, "stats_every": 1, "factor_every": 1, "seed": 2}
    optimizer = OPTIMIZERS[family](
        model, ng.Gaussian(noise_variance=0.2), prior_variance={"0.*": 0.5, "*": 1.0}, **options
    )
    x, y = normal(40, 3), normal(40, 2, seed=2)
    for _ in range(30):
        optimizer.step(lambda: (model(x), y))
    first = optimizer.posterior()
    # Another N and λ: a prior is in absolute units.
    again = OPTIMIZERS[family](
        model, ng.Gaussian(noise_variance=0.2), prior=first.as_prior(), **options | {"num_data": 90, "kl_weight": 0.2}
    )
    for statistics in again.covariance.statistics.values():
        for tensor in statistics.tensors().values():
            tensor.zero_()
    unchanged = again.posterior()
    close(unchanged.precision(), first.precision(), rtol=1e-8, atol=1e-8)
    assert abs(float(unchanged.kl())) < 1e-8
    for _ in range(30):
        again.step(lambda: (model(x), y))
    second = again.posterior()
    assert 0 < float(second.kl()) < 1e4
    assert torch.linalg.eigvalsh(second.precision() - 0.5 * first.precision()).min() > 0
    assert second.precision().logdet() > first.precision().logdet()


@pytest.mark.parametrize("kl_weight", [1.0, 0.5])
def test_learned_noise_is_at_its_coordinate_optimum(kl_weight: float) -> None:
    x, y = regression()
    model = nn.Linear(20, 2).double()
    y = torch.cat([y, -y], dim=1)
    likelihood = ng.Gaussian(noise_prior=(3.0, 2.0))
    optimizer = ng.NoisyFull(model, likelihood, num_data=200, kl_weight=kl_weight, prior_variance=ETA, seed=5)
    posterior = fit(optimizer, x, y, 1200)
    design = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
    covariance = posterior.covariance()  # weight [2, 20], then bias [2]
    spread = torch.zeros((), dtype=torch.float64)
    for output in range(2):
        mine = [*range(20 * output, 20 * output + 20), 40 + output]
        spread += torch.einsum("ni,ij,nj->", design, covariance[mine][:, mine], design)
    errors = (model(x) - y).detach().square().sum() + spread
    assert spread > 0.01 * errors
    shape, rate = (float(t) for t in (likelihood.noise_shape, likelihood.noise_rate))
    assert shape == pytest.approx(3.0 + 200 * 2 / (2 * kl_weight), rel=1e-6)
    assert rate == pytest.approx(2.0 + float(errors) / (2 * kl_weight), rel=0.02)
