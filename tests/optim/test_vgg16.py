"""The paper's VGG16 at its full width: total coverage, and ten steps that lower the loss."""

from __future__ import annotations

import pytest
import torch

import noisygrad as ng
from noisygrad_paper.networks import VGG16


@pytest.mark.parametrize("optimizer", [ng.NoisyAdam, ng.NoisyKFAC])
def test_ten_steps_on_the_papers_vgg16(optimizer: type[ng.NoisyOptimizer]) -> None:
    torch.manual_seed(0)
    model = VGG16()
    x, y = torch.randn(16, 3, 32, 32), torch.arange(16) % 10
    fit = optimizer(
        model,
        ng.Categorical(),
        num_data=50_000,
        lr=0.1,
        kl_weight=0.5,
        prior_variance=0.1,
        damping=1e-3,
        kl_clip=1e-2,
        stats_every=10,
        factor_every=200,
        stats_batch=8,
        seed=0,
    )
    covered = sum(unit.size for unit in fit.structure.units)
    assert covered == sum(parameter.numel() for parameter in model.parameters())
    assert str(fit.coverage()).count("\n") == 1 + len(list(model.parameters()))

    def loss_of_the_mean() -> float:
        with torch.no_grad():
            return float(torch.nn.functional.cross_entropy(model(x), y))

    before = loss_of_the_mean()
    for _ in range(10):
        fit.step(lambda: (model(x), y))
    assert loss_of_the_mean() < before - 0.01
