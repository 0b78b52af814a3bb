"""Slips that were made once: each has a test of its own."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

import noisygrad as ng
from support.truth import Model, close, exact_fisher, measured_fisher, normal, random_weights


@pytest.mark.parametrize("positions", [3, 4])
def test_a_sequence_first_transformer_knows_its_batch_even_when_both_dimensions_are_equal(positions: int) -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 3, dropout=0.0, batch_first=False)
    model = random_weights(Model(lambda m, x: m.layer(x.transpose(0, 1)).mean(0), layer=layer).double())
    likelihood = ng.Gaussian(noise_variance=0.7)
    likelihood.bind((), "cpu", torch.float64)
    x = normal(4, positions, 4)
    exact = exact_fisher(model, likelihood, x)
    close(measured_fisher(model, likelihood, x, "full"), exact)
    close(measured_fisher(model, likelihood, x, "diagonal").diagonal(), exact.diagonal())


@pytest.mark.parametrize("optimizer", [ng.NoisyAdam, ng.NoisyKFAC, ng.NoisyBlockTridiagonal, ng.NoisyFull])
def test_a_layer_that_is_never_used_returns_to_its_prior(optimizer: type[ng.NoisyOptimizer]) -> None:
    torch.manual_seed(0)
    model = Model(lambda m, x: m.used(x), used=nn.Linear(3, 1), unused=nn.Linear(3, 3)).double()
    x, y = normal(20, 3), normal(20, 1)
    fit = optimizer(
        model,
        ng.Gaussian(noise_variance=1.0),
        num_data=100,
        lr=1e-2,
        prior_variance=0.5,
        stats_every=1,
        factor_every=10,
    )
    for _ in range(600):
        fit.step(lambda: (model(x), y))
    std = fit.posterior().std()
    close(std["unused.weight"], torch.full_like(std["unused.weight"], 0.5**0.5), rtol=0.12)
    assert bool((std["used.weight"] < 0.2).all())


def test_a_prior_pattern_that_matches_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"haed\.\*.*matches no trainable parameter"):
        ng.NoisyKFAC(nn.Linear(2, 1), ng.Gaussian(), num_data=10, prior_variance={"haed.*": 1e-3, "*": 1.0})


def test_draws_do_not_hang_on_the_choice_of_eigenvectors() -> None:
    """Equal eigenvalues leave eigenvectors open; a square root through them must not change with a rounding error."""
    draws = []
    for jitter in (0.0, 1e-13):
        torch.manual_seed(0)
        model = ng.networks.MLP(3, (6,), 2).double()
        fit = ng.NoisyBlockTridiagonal(
            model, ng.Gaussian(noise_variance=1.0), num_data=50, stats_every=1, factor_every=1, seed=1
        )
        x, y = normal(4, 3) + jitter, normal(4, 2)
        for _ in range(3):
            fit.step(lambda x=x, y=y, model=model: (model(x), y))
        draws.append(fit.posterior().sample(torch.Generator().manual_seed(2)))
    for name, value in draws[0].items():
        close(value, draws[1][name], rtol=1e-6, atol=1e-7)


def test_a_layer_used_by_half_of_the_data_has_half_of_its_fisher() -> None:
    torch.manual_seed(0)
    model = Model(lambda m, x: m.a(x) if m.use else m.b(x), a=nn.Linear(3, 2), b=nn.Linear(3, 2)).double()
    likelihood = ng.Gaussian(noise_variance=1.0)
    found = []
    for uses in ([True, True], [True, False]):
        fit = ng.NoisyKFAC(model, likelihood, num_data=100, fisher="exact", noise=False, stats_every=1, seed=0)
        with fit.sampled() as draw:
            for use in uses:
                model.use = use
                draw.nll(model(normal(8, 3)), normal(8, 2)).backward()
        fit.step()
        statistics = fit.covariance.statistics["a"]
        found.append((statistics.inputs, statistics.outputs))
    (inputs, outputs), (half_inputs, half_outputs) = found
    close(half_outputs, outputs / 2)
    close(half_inputs, inputs)


@pytest.mark.parametrize("way", ["closure", "explicit"])
def test_a_weight_that_is_used_behind_its_layers_back_is_told_once(way) -> None:
    """Its Fisher would be 0 and its posterior the prior, without a word."""
    torch.manual_seed(0)
    model = Model(
        lambda m, x: m.b(torch.nn.functional.linear(x, m.a.weight, m.a.bias).tanh()),
        a=nn.Linear(3, 4),
        b=nn.Linear(4, 1),
    ).double()
    fit = ng.NoisyKFAC(model, ng.Gaussian(noise_variance=1.0), num_data=100, stats_every=1, seed=0)

    def step() -> None:
        x, y = normal(8, 3), normal(8, 1)
        if way == "closure":
            fit.step(lambda: (model(x), y))
            return
        with fit.sampled() as draw:
            draw.nll(model(x), y).backward()
        fit.step()

    with pytest.warns(UserWarning, match="'a'.*not by calling the layer") as told:
        step()
    assert [each.filename for each in told] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step()


def test_a_layer_that_takes_no_part_is_not_told_of() -> None:
    torch.manual_seed(0)
    model = Model(lambda m, x: m.a(x), a=nn.Linear(3, 1), b=nn.Linear(3, 1)).double()
    fit = ng.NoisyKFAC(model, ng.Gaussian(noise_variance=1.0), num_data=100, stats_every=1, mc_samples=2, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit.step(lambda: (model(normal(8, 3)), normal(8, 1)))


class Folded(nn.Module):
    """The first layer has positions in front of it, folded with the batch or before it."""

    def __init__(self, swapped: bool) -> None:
        super().__init__()
        self.swapped = swapped
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.swapped:
            return self.last(torch.tanh(self.first(x.transpose(0, 1))).mean(0))
        return self.last(torch.tanh(self.first(x.flatten(0, 1))).unflatten(0, x.shape[:2]).mean(1))


@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.filterwarnings("ignore:the closure returned a loss")
def test_a_closure_that_returns_a_loss_is_asked_for_the_batch_at_its_end(swapped: bool) -> None:
    torch.manual_seed(0)
    model, x, y = Folded(swapped).double(), torch.randn(4, 6, 4).double(), torch.randn(4, 2).double()

    def plain() -> torch.Tensor:
        loss = 0.5 * (model(x) - y).square().sum(-1).mean()
        loss.backward()
        return loss

    found = []
    for closure in (plain, lambda: (model(x), y)):
        likelihood = ng.Gaussian(noise_variance=1.0)
        optimizer = ng.NoisyKFAC(model, likelihood, num_data=100, lr=1e-9, fisher="empirical", seed=0)
        model.zero_grad()
        optimizer.step(closure)
        found.append(optimizer.posterior().precision())
    torch.testing.assert_close(*found, rtol=1e-6, atol=1e-6)


@pytest.mark.filterwarnings("ignore:the closure returned a loss")
def test_a_closure_that_returns_a_loss_may_fold_the_batch_at_its_end_and_call_the_model_for_other_ends() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 4), nn.Flatten(0, 1), nn.Linear(4, 5)).double()
    x, y = torch.randint(7, (4, 6)), torch.randint(5, (24,))

    def closure() -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        model(x[:3])
        return loss

    optimizer = ng.NoisyKFAC(model, ng.Categorical(), num_data=100)
    optimizer.step(closure)
    assert optimizer.steps == 1


def test_a_fresh_pass_of_a_narrow_network_with_batch_norm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)).bfloat16()
    optimizer = ng.NoisyKFAC(model, ng.Gaussian(noise_variance=1.0), num_data=100, fisher_pass="fresh")
    x = torch.randn(6, 3).bfloat16()
    optimizer.step(lambda: (model(x), torch.ones(6, 2)))
    assert bool(torch.isfinite(optimizer.posterior().kl()))


def test_a_loss_of_a_detached_output_and_of_a_checkpoint_called_again() -> None:
    torch.manual_seed(0)
    first, last, x, y = nn.Linear(3, 4), nn.Linear(4, 2), torch.randn(6, 3), torch.randn(6, 2)
    model = nn.Sequential(first, last)
    optimizer = ng.NoisyKFAC(model, ng.Gaussian(noise_variance=1.0), num_data=100)
    with optimizer.sampled() as draw:
        for _ in range(3):
            hidden = torch.utils.checkpoint.checkpoint(first, x, use_reentrant=False)
            output = last(torch.tanh(hidden))
            draw.nll(output, y).backward()
            assert not draw.nll(output.detach(), y).requires_grad
        assert optimizer.transaction._capture.take() == []
