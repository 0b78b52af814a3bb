"""Bayes by Backprop for any network: where it converges to, what it remembers, what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import noisygrad as ng
from noisygrad_paper.baselines.bbb_network import BayesByBackprop


def linear_problem() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 5, generator=generator)
    x[:, 1] += 0.7 * x[:, 0]
    y = x @ torch.tensor([1.0, -0.5, 0.3, 0.0, 2.0]).unsqueeze(1)
    return x, y + 0.3 * torch.randn(200, 1, generator=generator)


def make(model: nn.Module, **settings: object) -> BayesByBackprop:
    options = {"num_data": 200, "lr": 0.01, "initial_std": 0.05, "seed": 1} | settings
    return BayesByBackprop(model, ng.Gaussian(noise_variance=0.09), **options)


def test_linear_regression_converges_to_the_mean_field_optimum():
    x, y = linear_problem()
    torch.manual_seed(0)
    model = nn.Linear(5, 1, bias=False)
    optimizer = make(model, prior_variance=2.0)
    for step in range(6000):
        optimizer.param_groups[0]["lr"] = 0.01 if step < 3000 else 0.001
        optimizer.step(lambda: (model(x), y))
    precision = x.T @ x / 0.09 + torch.eye(5) / 2.0
    exact = torch.linalg.solve(precision, x.T @ y / 0.09).squeeze(-1)
    posterior = optimizer.posterior()
    torch.testing.assert_close(posterior.std()["weight"].squeeze(0), precision.diagonal().rsqrt(), rtol=0.05, atol=0.0)
    worst = ((posterior.mean["weight"].squeeze(0) - exact) * precision.diagonal().sqrt()).abs().max()
    assert worst < 0.3, "in posterior standard deviations"


def test_a_saved_state_goes_on_as_if_nothing_had_happened():
    x, y = linear_problem()
    found = []
    for stop in (False, True):
        torch.manual_seed(0)
        model = ng.networks.MLP(5, (8,), 1)
        optimizer = make(model)
        for step in range(20):
            if stop and step == 7:
                state, weights = optimizer.state_dict(), model.state_dict()
                torch.manual_seed(99)
                model = ng.networks.MLP(5, (8,), 1)
                optimizer = make(model, seed=5)
                model.load_state_dict(weights)
                optimizer.load_state_dict(state)
            optimizer.step(lambda model=model: (model(x), y))
        found.append(optimizer.posterior())
    for name in found[0].mean:
        assert torch.equal(found[0].mean[name], found[1].mean[name])
        assert torch.equal(found[0].std()[name], found[1].std()[name])


def test_the_mean_comes_back_after_a_failure():
    model = nn.Linear(5, 1)
    optimizer = make(model)
    before = model.weight.detach().clone()

    def closure() -> tuple[Tensor, Tensor]:
        raise KeyError("the loader broke")

    with pytest.raises(KeyError):
        optimizer.step(closure)
    assert torch.equal(model.weight, before)


def test_noise_that_would_have_to_be_learned_is_refused():
    x, y = linear_problem()
    model = nn.Linear(5, 1)
    optimizer = BayesByBackprop(model, ng.Gaussian(), num_data=200)
    with pytest.raises(ValueError, match="noise_variance"):
        optimizer.step(lambda: (model(x), y))


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_data", 0), ("lr", -1.0), ("kl_weight", 0.0), ("initial_std", 0.0), ("prior_variance", -1.0)],
)
def test_wrong_numbers_are_named(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        make(nn.Linear(2, 1), **{name: value})


def test_the_state_of_another_network_is_refused():
    optimizer, other = make(nn.Linear(5, 1)), make(nn.Linear(4, 1))
    with pytest.raises(ValueError, match="another network"):
        optimizer.load_state_dict(other.state_dict())
