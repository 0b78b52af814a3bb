"""Which losses are of one batch, and which of several."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import noisygrad as ng


def test_two_batches_inside_one_region_of_autocast_are_two_batches() -> None:
    """Autocast keeps its copies of the weights from one forward pass to the next: they are no common trunk."""
    torch.manual_seed(0)
    x, y, gradients = torch.randn(16, 3), torch.randn(16, 1), []
    for once in (True, False):
        torch.manual_seed(1)
        model = ng.networks.MLP(3, (4,), 1)
        optimizer = ng.NoisyKFAC(model, ng.Gaussian(noise_variance=1.0), num_data=50, noise=False, lr=0.1, damping=1.0)
        with optimizer.sampled() as draw:
            if once:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = draw.nll(model(x[:8]), y[:8]) + draw.nll(model(x[8:]), y[8:])
                loss.backward()
            else:
                for part in (slice(0, 8), slice(8, 16)):
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        loss = draw.nll(model(x[part]), y[part])
                    loss.backward()
        optimizer.step()
        gradients.append(optimizer.weights.mean.flat.clone())
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)


def test_heads_on_a_frozen_trunk_are_told_of() -> None:
    """They share nothing that is trained, like two batches; features that ask for a gradient show that they do."""
    torch.manual_seed(0)
    x, y = torch.randn(8, 3), torch.randn(8, 1)
    weights = []
    for shows in (False, True):
        torch.manual_seed(1)
        trunk, heads = nn.Linear(3, 4).requires_grad_(False), nn.ModuleList([nn.Linear(4, 1), nn.Linear(4, 1)])
        optimizer = ng.NoisyAdam(
            nn.ModuleList([trunk, heads]), ng.Gaussian(noise_variance=1.0), num_data=9, noise=False
        )
        features = trunk(x)
        with optimizer.sampled() as draw:
            if shows:
                features.requires_grad_()
                loss = sum(draw.nll(head(features), y) for head in heads)
            else:
                with pytest.warns(UserWarning, match="no parameter in common.*heads of one batch on a frozen trunk"):
                    loss = sum(draw.nll(head(features), y) for head in heads)
            loss.backward()
        weights.append(float(optimizer.accumulated.weight))
        optimizer.step()
    assert weights == [2.0, 1.0]
