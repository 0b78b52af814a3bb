"""Each draw of a network with batch normalisation can be normalised by its own statistics."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import noisygrad as ng


def fitted(steps: int = 20):
    """A small network with batch normalisation, trained on a question of signs, and its posterior."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 2))
    x = torch.randn(256, 4)
    y = (x[:, 0] * x[:, 1] > 0).long()
    x = x + 3.0  # like the outputs of a ReLU, which no draw can leave without a shift
    optimizer = ng.NoisyAdam(model, ng.Categorical(), num_data=len(x), lr=0.01, seed=0)
    for _ in range(steps):
        optimizer.step(lambda: (model(x), y))
    return model, optimizer.posterior(), x, y


def test_a_draw_is_normalised_by_what_it_makes_of_the_data():
    _, posterior, x, _ = fitted()
    found = posterior.outputs(x[:7], 3, norm_data=x, generator=torch.Generator().manual_seed(1))
    generator = torch.Generator().manual_seed(1)
    for one in found:
        weights = posterior.sample(generator)
        hidden, at = (F.linear(each, weights["0.weight"], weights["0.bias"]) for each in (x, x[:7]))
        scaled = (at - hidden.mean(0)) / (hidden.var(0) + 1e-5).sqrt() * weights["1.weight"] + weights["1.bias"]
        expected = F.linear(scaled.relu(), weights["3.weight"], weights["3.bias"])
        torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-5)


def test_batches_count_the_same_and_the_model_stays_as_it_was():
    model, posterior, x, _ = fitted()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    modes = [module.training for module in model.modules()]
    draws = [
        posterior.outputs(x, 2, norm_data=data, batch_size=size, generator=torch.Generator().manual_seed(0))
        for data, size in ((x, None), (x.repeat(3, 1), 256), (x, None))
    ]
    torch.testing.assert_close(draws[0], draws[1])
    assert torch.equal(draws[0], draws[2])  # nothing is left of an earlier call
    assert all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers())
    assert [module.training for module in model.modules()] == modes
    assert model[1].momentum == 0.1


def test_wide_draws_need_their_own_statistics():
    """In training a draw is normalised by its own batch; the running statistics are those of no draw at all."""
    model, posterior, x, y = fitted(steps=300)
    model.train()
    running, own = (
        posterior.outputs(x, 20, norm_data=data, generator=torch.Generator().manual_seed(0)) for data in (None, x)
    )

    def nll(outputs):
        return float(F.cross_entropy(outputs.flatten(0, 1), y.repeat(len(outputs))))

    assert nll(own) < 0.9 * nll(running)
    prediction = posterior.predict(x, 20, norm_data=x, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(prediction.probs, own.softmax(-1).mean(0))


def test_without_batch_normalisation_the_argument_is_refused():
    for norm in (nn.LayerNorm(3), nn.BatchNorm1d(3, track_running_stats=False)):
        model = nn.Sequential(nn.Linear(2, 3), norm, nn.Linear(3, 2))
        posterior = ng.NoisyAdam(model, ng.Categorical(), num_data=4, seed=0).posterior()
        with pytest.raises(ValueError, match="norm_data is for batch normalisation"):
            posterior.predict(torch.zeros(4, 2), 2, norm_data=torch.zeros(4, 2))
    with pytest.raises(TypeError, match="data must be tensors"):
        fitted(steps=1)[1].predict(torch.zeros(4, 4), 2, norm_data=[[0.0] * 4])
