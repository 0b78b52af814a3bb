"""The ELBO is a bound of the evidence whatever λ is; what training climbs has another name."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import noisygrad as ng
from support.truth import close, normal

NOISE, ETA, N = 0.3, 2.0, 60


def data() -> tuple[Tensor, Tensor]:
    x = normal(N, 4, seed=1)
    return x, x @ normal(4, 1, seed=2) + math.sqrt(NOISE) * normal(N, 1, seed=3)


def best(kl_weight: float) -> tuple[ng.Posterior, Tensor, Tensor]:
    """The Gaussian with the highest objective for this λ, in closed form."""
    x, y = data()
    precision = x.mT @ x / NOISE + kl_weight * torch.eye(4, dtype=x.dtype) / ETA
    mean, covariance = torch.linalg.solve(precision, x.mT @ y / NOISE), kl_weight * torch.linalg.inv(precision)
    model = nn.Linear(4, 1, bias=False).double()
    model.weight.data.copy_(mean.mT)
    # One measurement of all data is the Fisher; the step itself goes nowhere.
    optimizer = ng.NoisyFull(
        model, ng.Gaussian(noise_variance=NOISE), num_data=N, kl_weight=kl_weight, prior_variance=ETA, lr=1e-300,
        fisher="exact", fisher_decay=0.0, stats_every=1, factor_every=1, momentum=0.0, seed=0,
    )  # fmt: skip
    optimizer.step(lambda: (model(x), y))
    posterior = optimizer.posterior()
    close(posterior.covariance(), covariance, rtol=1e-8)
    return posterior, mean, covariance


@pytest.mark.parametrize("kl_weight", [0.05, 0.3, 1.0, 3.0])
def test_elbo_is_a_bound_of_the_evidence_for_every_kl_weight(kl_weight: float) -> None:
    x, y = data()
    posterior, mean, covariance = best(kl_weight)
    noise = NOISE * torch.eye(N, dtype=x.dtype)
    evidence = MultivariateNormal(torch.zeros(N).to(x), ETA * x @ x.mT + noise).log_prob(y.flatten())
    squares = (y - x @ mean).square().sum() + (x @ covariance * x).sum()
    fit = -0.5 * squares / NOISE - 0.5 * N * math.log(2 * math.pi * NOISE)
    elbo = fit - posterior.kl()
    assert elbo <= evidence + 1e-9
    assert (elbo > evidence - 1e-9) == (kl_weight == 1.0)
    seed = torch.Generator().manual_seed(4)
    found, objective = (each([(x, y)], 4000, seed) for each in (posterior.elbo, posterior.objective))
    # A draw's log-likelihood scatters by √(λ² · 4 / 2) and by what the mean misses, 4000 draws by a 63rd of that.
    torch.testing.assert_close(found, elbo, rtol=0, atol=0.2 * kl_weight)
    torch.testing.assert_close(objective, fit - kl_weight * posterior.kl(), rtol=0, atol=0.2 * kl_weight)


def test_a_small_kl_weight_does_not_look_better() -> None:
    batch = [data()]
    narrow, bayes = (best(kl_weight)[0] for kl_weight in (0.05, 1.0))
    seed = torch.Generator().manual_seed(4)
    assert narrow.elbo(batch, 500, seed) < bayes.elbo(batch, 500, seed) - 1
    assert narrow.objective(batch, 500, seed) > bayes.objective(batch, 500, seed) + 1


@pytest.mark.parametrize("kl_weight", [0.1, 1.0])
def test_an_estimators_elbo_is_the_bound(kl_weight: float) -> None:
    x, y = (tensor.numpy() for tensor in data())
    model = ng.NoisyRegressor(hidden=(), epochs=5, kl_weight=kl_weight, random_state=0).fit(x, y.ravel())
    likelihood, kl = model.posterior_.likelihood, model.posterior_.kl()
    standardised = ((x - x.mean(0)) / x.std(0), (y - y.mean()) / y.std())
    batch = [tuple(torch.from_numpy(part).float() for part in standardised)]
    nll = model.posterior_.expected_nll(batch, 400, torch.Generator().manual_seed(0))
    bound = -N * (float(nll) + math.log(y.std())) - float(kl + likelihood.kl())
    assert model.elbo_ == pytest.approx(bound, abs=4.0)
    assert float(kl + likelihood.kl()) > 8.0  # a tenth of it would be seen
