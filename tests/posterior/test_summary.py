"""The summary of a posterior, against dense matrices."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import noisygrad as ng
from noisygrad.posterior.summary import PieceSummary
from support.compare import each_optimizer

VARIANCE, LAMBDA, DATA = 0.3, 0.5, 40


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()


def fitted(kind: type[ng.optim.NoisyOptimizer], model: nn.Module, steps: int = 20, **more: object) -> ng.Posterior:
    settings = {"num_data": DATA, "kl_weight": LAMBDA, "prior_variance": VARIANCE, "lr": 0.05, "seed": 0} | more
    optimizer = kind(model, ng.Gaussian(noise_variance=0.1), stats_every=1, factor_every=1, **settings)
    x = torch.randn(DATA, 3, dtype=torch.float64)
    for _ in range(steps):
        optimizer.step(lambda: (model(x), x[:, :2]))
    return optimizer.posterior()


@each_optimizer
def test_the_summary_is_that_of_the_dense_gaussian(kind: type[ng.optim.NoisyOptimizer]) -> None:
    posterior = fitted(kind, network())
    summary, deviations = posterior.summary(), posterior.std()
    names = {unit.name: unit for block in posterior.structure.blocks for unit in block.units}
    units = {block.name: [unit.name for unit in block.units] for block in posterior.structure.blocks}
    assert sum(piece.weights for piece in summary.pieces) == sum(p.numel() for p in posterior.model.parameters())
    assert summary.kl == pytest.approx(float(posterior.kl()))
    for piece in summary.pieces:
        layers = units.get(piece.name, [piece.name])
        parameters = [slot.parameter for layer in layers for slot in names[layer].slots]
        means, widths = (
            torch.cat([values[name].flatten() for name in parameters]) for values in (posterior.mean, deviations)
        )
        assert piece.weights == len(means)
        assert piece.mean == pytest.approx(float(means.square().mean().sqrt()))
        assert piece.width == pytest.approx(float(widths.square().mean().sqrt()))
        narrower = float((1.0 - widths.square() / VARIANCE).sum())
        if kind in {ng.NoisyKFAC, ng.NoisyBlockTridiagonal}:  # factored damping narrows beyond what data determine
            assert 0.0 < piece.determined <= narrower * (1 + 1e-9)
        else:
            assert piece.determined == pytest.approx(narrower)
        assert 0.0 < piece.determined < piece.weights
    if posterior.family == "diagonal":
        assert [piece.name for piece in summary.pieces] == ["0", "2", "3", "4"]


def test_groups_of_a_convolution_add_up() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv1d(4, 6, 2, groups=2), nn.Flatten(), nn.Linear(12, 1)).double()
    optimizer = ng.NoisyKFAC(model, ng.Gaussian(noise_variance=0.1), num_data=DATA, prior_variance=VARIANCE, seed=0)
    x = torch.randn(5, 4, 3, dtype=torch.float64)
    optimizer.step(lambda: (model(x), x[:, :1, 0]))
    posterior = optimizer.posterior()
    summary, deviations = posterior.summary(), posterior.std()
    widths = torch.cat([deviations[f"0.{name}"].flatten() for name in ("weight", "bias")])
    piece = summary.pieces[0]
    assert piece.weights == len(widths)
    assert piece.width == pytest.approx(float(widths.square().mean().sqrt()))
    assert 0.0 < piece.determined < float((1.0 - widths.square() / VARIANCE).sum())
    assert summary.kl == pytest.approx(float(posterior.kl()))


def test_it_is_printed_as_a_table() -> None:
    summary = fitted(ng.NoisyKFAC, network()).summary()
    lines = str(summary).splitlines()
    assert lines[0].split() == ["block", "weights", "mean", "width", "width/mean", "KL", "KL/weight", "determined"]
    assert [line.split()[:2] for line in lines[2:6]] == [["0", "16"], ["2", "20"], ["4", "10"], ["3", "8"]]
    assert lines[-1].startswith("54 noisy weights, of which the data determine ")
    assert lines[-1].endswith("data (N/λ).")
    assert "each of 80 data" in lines[-1]
    assert repr(summary) == str(summary)


def test_what_strikes_is_said() -> None:
    numbers = {"name": "0", "weights": 100, "kl": 3.0, "mean": 0.1}
    assert PieceSummary(width=0.2, determined=50.0, **numbers).note == "noise above signal"
    assert PieceSummary(width=0.2, determined=0.9, **numbers).note == "as before the data"
    assert PieceSummary(width=0.09, determined=50.0, **numbers).note == ""
    tight = fitted(ng.NoisyAdam, network(), prior_variance=1e-12, groups={"2.*": {"noise": False}}).summary()
    assert [(piece.name, piece.note) for piece in tight.pieces] == [(name, "as before the data") for name in "034"]
    assert "as before the data" in str(tight)


def test_without_a_prior_the_data_determine_all() -> None:
    summary = fitted(ng.NoisyKFAC, network(), prior_variance=math.inf, damping=0.1, fisher_floor=1e-3).summary()
    assert all(0.5 * piece.weights < piece.determined < 1.001 * piece.weights for piece in summary.pieces)
    assert math.isinf(summary.kl)
    assert "inf nats" in str(summary)


def test_a_fisher_that_was_measured_seldom_is_not_trusted() -> None:
    assert "too seldom to be trusted: in training it had 11.1% of the identity" in str(
        fitted(ng.NoisyKFAC, network(), 2).summary()
    )
    assert "too seldom" not in str(fitted(ng.NoisyKFAC, network(), 12).summary())


def test_replicas_are_averaged() -> None:
    model = ng.networks.ReplicatedMLP((3,), 2, (4,), 1)
    optimizer = ng.NoisyKFAC(model, ng.Gaussian(noise_variance=0.1), num_data=DATA, lr=0.05)
    x = torch.randn(3, 10, 2)
    optimizer.step(lambda: (model(x), x[..., :1]))
    posterior = optimizer.posterior()
    assert posterior.summary().kl == pytest.approx(float(posterior.kl().mean()), rel=1e-5)


def test_a_point_estimate_has_none() -> None:
    with pytest.raises(ValueError, match="point estimate"):
        fitted(ng.NoisyKFAC, network(), noise=False).summary()
