"""HMC against posteriors that are known: linear models, a noise integrated out, logistic regression on a grid."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy import stats
from torch import Tensor, nn

import noisygrad as ng
from noisygrad.networks import MLP
from noisygrad_paper.baselines import hmc
from noisygrad_paper.baselines.hmc import HMC, HMCPosterior, HMCSettings
from noisygrad_paper.networks import ConvNet
from support.truth import normal

pytest.importorskip("numpyro")
QUICK = HMCSettings(chains=8, warmup=300, samples=400, thin=2, leapfrog_steps=12)


class Skipping(nn.Module):
    """Functions, methods and a sum, none of which is a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x)) + x
        return self.second(F.relu(hidden)).sigmoid() * 2.0


@pytest.mark.parametrize(
    "model",
    [
        MLP(3, (4, 5), 2, "gelu"),
        nn.Sequential(nn.Linear(3, 4, bias=False), nn.ELU(0.7), nn.Dropout(0.5), nn.Linear(4, 1), nn.Softplus(2.0)),
        nn.Sequential(nn.Flatten(), nn.Linear(3, 4), nn.SiLU(), nn.LeakyReLU(0.2), nn.Linear(4, 1), nn.Identity()),
        Skipping(),
    ],
    ids=["mlp", "sequence", "flat", "functions"],
)
def test_a_translated_network_is_the_network(model: nn.Module) -> None:
    import jax

    from noisygrad_paper.baselines.jax_networks import as_jax

    model, x = model.double().eval(), normal(6, 3, seed=1)
    weights = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    with jax.enable_x64(True):
        found = np.asarray(as_jax(model)(weights, x.numpy()))
    np.testing.assert_allclose(found, model(x).detach().numpy(), rtol=1e-12, atol=1e-12)


def test_a_linear_model_has_its_exact_posterior() -> None:
    x, noise, eta = normal(30, 3, seed=2), 0.4, 1.5
    y = x @ normal(3, 1, seed=3) + 0.3 + math.sqrt(noise) * normal(30, 1, seed=4)
    found = hmc.fit(nn.Linear(3, 1), ng.Gaussian(noise_variance=noise), (x, y), prior_variance=eta, settings=QUICK)
    design = torch.cat([x, torch.ones(30, 1, dtype=x.dtype)], 1)
    precision = design.mT @ design / noise + torch.eye(4, dtype=x.dtype) / eta
    covariance = torch.linalg.inv(precision)
    mean = (covariance @ design.mT @ y / noise).flatten()
    draws = torch.cat([found.weights["weight"].flatten(0, 1).flatten(1), found.weights["bias"].flatten(0, 1)], 1)
    assert found.converged
    assert found.ess > 500
    assert ((draws.mean(0) - mean) / covariance.diagonal().sqrt()).abs().max() < 0.1
    assert (draws.T.cov() - covariance).norm() / covariance.norm() < 0.1
    # And so has the function, also in batches.
    epistemic = found.predict(x, batch_size=7).epistemic.flatten()
    torch.testing.assert_close(epistemic, (design @ covariance * design).sum(1), rtol=0.15, atol=1e-3)


def test_the_noise_is_integrated_out() -> None:
    """Energies differ as the logarithm of a multivariate Student-t does, and a draw's noise has its Gamma posterior."""
    import jax

    model, likelihood, eta = nn.Linear(2, 1), ng.Gaussian(noise_prior=(3.0, 2.0)), 0.8
    x, y = normal(7, 2, seed=5), normal(7, 1, seed=6)
    sampler = HMC(model, likelihood, prior_variance=eta, settings=QUICK)
    from noisygrad_paper.baselines.jax_networks import as_jax

    def energy(weights: np.ndarray, count: int) -> float:
        padded = (np.concatenate([part.numpy(), np.ones((3, part.shape[1]))]) for part in (x, y))
        with jax.enable_x64(True):
            data = (*padded, np.array([1.0] * count + [0.0] * (10 - count)))
            return float(sampler._potential(as_jax(model))(data)(weights))

    def truth(weights: np.ndarray) -> float:
        mean = x.numpy() @ weights[:2] + weights[2]
        density = stats.multivariate_t(mean, 2.0 / 3.0 * np.eye(7), df=6.0)
        return -float(density.logpdf(y.numpy().ravel())) + 0.5 * float(weights @ weights) / eta

    one, other = np.array([0.3, -0.2, 0.1]), np.array([-0.7, 0.4, 0.9])
    assert energy(one, 7) - energy(other, 7) == pytest.approx(truth(one) - truth(other), rel=1e-10)
    found = sampler.fit(x[None], y[None])[0]
    prediction = found.predict(x, 50)
    errors = (y - found.outputs(x, 50)).square().sum((1, 2))
    torch.testing.assert_close(prediction.degrees_of_freedom[:, 0, 0], torch.full((50,), 13.0, dtype=x.dtype))
    torch.testing.assert_close(prediction.scale[:, 0, 0].square(), (2.0 + errors / 2) / 6.5)


def test_logistic_regression_is_that_of_a_grid() -> None:
    x = normal(25, 1, seed=7)
    y = (x + 0.5 * normal(25, 1, seed=8) > 0.2).double()
    found = hmc.fit(nn.Linear(1, 1, bias=False), ng.Bernoulli(), (x, y), prior_variance=2.0, settings=QUICK)
    grid = torch.linspace(-10, 15, 5001, dtype=x.dtype)
    logits = x * grid
    log_density = (y * logits - F.softplus(logits)).sum(0) - grid.square() / 4.0
    density = torch.softmax(log_density, 0)
    mean = (density * grid).sum()
    spread = (density * (grid - mean).square()).sum().sqrt()
    draws = found.weights["weight"].flatten()
    assert abs(draws.mean() - mean) / spread < 0.1
    assert draws.std() / spread == pytest.approx(1.0, abs=0.08)
    # Two classes are the same model in twice as many outputs, of which only the difference matters.
    classes = nn.Linear(1, 2, bias=False)
    pair = hmc.fit(classes, ng.Categorical(), (x, y.long().squeeze(-1)), prior_variance=1.0, settings=QUICK)
    difference = (pair.weights["weight"][:, :, 1] - pair.weights["weight"][:, :, 0]).flatten()
    assert abs(difference.mean() - mean) / spread < 0.1
    torch.testing.assert_close(pair.predict(x).probs[:, 1], found.predict(x).probs.squeeze(-1), atol=0.03, rtol=0)


@pytest.mark.parametrize("likelihood", [ng.Poisson(), ng.HeteroscedasticGaussian()], ids=["poisson", "own noise"])
def test_energies_are_those_of_the_likelihood(likelihood: ng.Likelihood) -> None:
    import jax

    model = nn.Linear(2, 2).double()
    x = normal(6, 2, seed=9)
    y = normal(6, 2, seed=10).abs().floor() if isinstance(likelihood, ng.Poisson) else normal(6, 1, seed=10)
    from noisygrad_paper.baselines.jax_networks import as_jax

    def energy(sampler: HMC) -> tuple[float, float]:
        flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).numpy()
        with jax.enable_x64(True):
            ours = float(sampler._potential(as_jax(model))((x.numpy(), y.numpy(), np.ones(6)))(flat))
        return ours, -float(likelihood.log_prob(model(x), y).sum()) + 0.5 * float(flat @ flat) / 3.0

    sampler = HMC(model, likelihood, prior_variance=3.0, settings=QUICK)
    first = energy(sampler)
    with torch.no_grad():
        model.weight.add_(0.3)
    second = energy(sampler)
    assert second[0] - first[0] == pytest.approx(second[1] - first[1], rel=1e-9)


def test_several_sets_at_once_and_padding() -> None:
    x, y = normal(2, 8, 1, seed=11), normal(2, 8, 1, seed=12)
    weight = torch.ones(2, 8)
    weight[1, 5:] = 0.0
    sampler = HMC(nn.Linear(1, 1), ng.Gaussian(noise_variance=0.5), settings=QUICK)
    both = sampler.fit(x, y, weight=weight, seeds=[3, 4])
    assert [len(posterior.data[0]) for posterior in both] == [8, 5]
    # Padding changes nothing but rounding, which chains magnify.
    alone = hmc.fit(nn.Linear(1, 1), ng.Gaussian(noise_variance=0.5), (x[1, :5], y[1, :5]), settings=QUICK)
    for name, draws in both[1].weights.items():
        assert abs(draws.mean() - alone.weights[name].mean()) / draws.std() < 0.15
        assert draws.std() / alone.weights[name].std() == pytest.approx(1.0, abs=0.1)
    # A set has its own chains, with whatever others it runs.
    single = sampler.fit(x[1:], y[1:], weight=weight[1:], seeds=[4])[0]
    assert torch.equal(both[1].weights["weight"], single.weights["weight"])
    assert both[1].acceptance == single.acceptance != both[0].acceptance
    again = sampler.fit(x, y, weight=weight, seeds=[3, 4])
    assert torch.equal(both[0].weights["weight"], again[0].weights["weight"])
    with pytest.raises(ValueError, match="2 data sets and 1 seeds"):
        sampler.fit(x, y, seeds=[3])


def test_only_the_sets_whose_chains_disagree_are_extended() -> None:
    x, y = normal(3, 8, 2, seed=21), normal(3, 8, 1, seed=22)
    short = HMCSettings(chains=4, warmup=50, samples=20, thin=1, leapfrog_steps=4, extensions=0)
    model, likelihood = nn.Linear(2, 1), ng.Gaussian(noise_variance=0.5)
    first = HMC(model, likelihood, settings=short).fit(x, y)
    best, worst = sorted(range(3), key=lambda index: first[index].rhat)[::2]
    between = sum(sorted(posterior.rhat for posterior in first)[:2]) / 2
    longer = replace(short, extensions=1, largest_rhat=between)
    found = HMC(model, likelihood, settings=longer).fit(x, y)
    assert torch.equal(found[best].weights["weight"], first[best].weights["weight"])
    assert found[worst].num_draws == 2 * first[worst].num_draws
    assert torch.equal(found[worst].weights["weight"][:, :20], first[worst].weights["weight"])
    assert not torch.equal(found[worst].weights["weight"][:, 20:], first[worst].weights["weight"])


def test_diagnostics_are_of_means_and_variances() -> None:
    """Two chains of one mean and two widths agree about the mean alone."""
    narrow, wide = normal(1, 400, 1, 1, seed=23), 3.0 * normal(1, 400, 1, 1, seed=24)
    posterior = HMCPosterior(
        nn.Linear(1, 1, bias=False),
        ng.Gaussian(noise_variance=1.0),
        {"weight": torch.cat([narrow, wide])},
        (x := normal(1, 1), x),
    )
    assert posterior.with_rhat(torch.ones(1, 1)).rhat > 1.1


def test_a_device_that_jax_has_not_is_named() -> None:
    with pytest.raises(ValueError, match="JAX has no device cuda:77"):
        HMC(nn.Linear(1, 1), ng.Gaussian(), device="cuda:77")


def test_chains_that_disagree_are_extended_and_then_say_so() -> None:
    said: list[str] = []
    short = HMCSettings(chains=4, warmup=2, samples=4, thin=1, leapfrog_steps=1, extensions=2, largest_rhat=1.0001)
    x, y = normal(20, 2, seed=13), normal(20, 1, seed=14)
    found = hmc.fit(MLP(2, (3,), 1), ng.Gaussian(), (x, y), settings=short, report=lambda done, word: said.append(word))
    assert not found.converged
    assert found.num_draws == 4 * 4 * 4  # twice as many again
    assert any("extension 2" in word for word in said)


def test_the_model_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 1)).train()
    before = [parameter.clone() for parameter in model.parameters()]
    settings = HMCSettings(chains=2, warmup=5, samples=4, thin=1, extensions=0)
    found = hmc.fit(model, ng.Gaussian(), (normal(5, 2), normal(5, 1)), settings=settings)
    assert found.predict(normal(3, 2), 4).mean.shape == (3, 1)
    assert all(module.training for module in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_bad_input_is_named() -> None:
    x, y = normal(5, 2), normal(5, 1)
    good = (nn.Linear(2, 1), ng.Gaussian(), (x, y))
    images = normal(5, 1, 4, 4), torch.zeros(5).long()
    with pytest.raises(ValueError, match=r"layer '0' is a Conv2d.*supported are .*Linear"):
        hmc.fit(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)), ng.Categorical(), images)
    with pytest.raises(ValueError, match="ConvNet cannot be traced"):
        hmc.fit(ConvNet(1, 10, 8), ng.Categorical(), images)
    odd = type("Odd", (nn.Linear,), {"forward": lambda self, x: torch.exp(F.linear(x, self.weight))})
    with pytest.raises(ValueError, match="calls exp"):
        hmc.fit(odd(2, 1), *good[1:])
    with pytest.raises(ValueError, match="no trainable parameters"):
        hmc.fit(nn.ReLU(), *good[1:])
    with pytest.raises(ValueError, match="proper prior"):
        hmc.fit(*good, prior_variance=math.inf)
    with pytest.raises(ValueError, match="matches no trainable"):
        hmc.fit(*good, prior_variance={"conv*": 1.0, "*": 1.0})
    with pytest.raises(ValueError, match="frozen parameters or buffers"):
        hmc.fit(nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1)), *good[1:])
    with pytest.raises(ValueError, match="noise_prior"):
        hmc.fit(good[0], ng.Gaussian(noise_prior=None), good[2])
    with pytest.raises(ValueError, match="as many examples"):
        hmc.fit(*good[:2], (x, y[:4]))
    with pytest.raises(ValueError, match="shape"):
        hmc.fit(*good[:2], (x, y[:, 0]))  # would be compared with every output
    with pytest.raises(ValueError, match="cannot take such inputs"):
        hmc.fit(*good[:2], (x[:, :1], y))
    with pytest.raises(ValueError, match="labels"):
        hmc.fit(nn.Linear(2, 3), ng.Categorical(), (x, torch.tensor([0, 1, 2, 3, 1])))
    with pytest.raises(TypeError, match="must be tensors"):
        hmc.HMC(*good[:2]).fit(x[None].numpy(), y[None])
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1))
    tied[1].bias = tied[0].bias
    with pytest.raises(ValueError, match="not supported"):
        hmc.fit(tied, *good[1:])
    with pytest.raises(ValueError, match="targets have NaN"):
        hmc.fit(*good[:2], (x, y * math.nan))
    with pytest.raises(ValueError, match="2 chains"):
        HMCSettings(chains=1)
    with pytest.raises(ValueError, match="warmup must be"):
        HMCSettings(warmup=0)
    short = HMCSettings(chains=2, warmup=5, samples=4, thin=1, extensions=0)
    with pytest.raises(ValueError, match="from 1 to 8"):
        hmc.fit(*good, settings=short).predict(x, 9)


def test_the_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"HMC needs jax, numpyro: pip install 'noisygrad\[paper\]'"):
        HMC(nn.Linear(2, 1), ng.Gaussian())
