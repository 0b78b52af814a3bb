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


def test_an_elbo_by_the_draws_own_statistics():
    _, posterior, x, y = fitted()
    own = posterior.outputs(x, 5, norm_data=x, generator=torch.Generator().manual_seed(0))
    nll = F.cross_entropy(own.flatten(0, 1), y.repeat(5))
    loader = [(x[:100], y[:100]), (x[100:], y[100:])]
    found, usual = (posterior.elbo(loader, 5, torch.Generator().manual_seed(0), norm_data=data) for data in (x, None))
    torch.testing.assert_close(found, -len(x) * nll - posterior.kl(), rtol=1e-5, atol=1e-3)
    assert float(found) > float(usual)


def convolutional(norm=nn.BatchNorm2d):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3),
        norm(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3),
        norm(4, affine=False),
        nn.Flatten(),
        nn.Linear(16, 3),
    )
    x, y = torch.randn(40, 2, 6, 6) + 1.0, torch.randint(3, (40,))
    optimizer = ng.NoisyKFAC(model, ng.Categorical(), num_data=40, lr=0.01, seed=0)
    for _ in range(3):
        optimizer.step(lambda: (model(x), y))
    return model, optimizer.posterior(), x


def test_batches_of_images_are_averaged_layer_by_layer(tmp_path):
    """Each layer's statistics are the mean over batches, whose examples are every third one: data may be sorted."""
    model, posterior, x = convolutional()
    (found,) = posterior.outputs(x[:5], 1, norm_data=x, batch_size=16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        for name, tensor in posterior.sample(torch.Generator().manual_seed(1)).items():
            model.get_parameter(name).copy_(tensor)
        for norm in (model[1], model[4]):
            norm.reset_running_stats()
            norm.momentum = None
        for part in (x[0::3], x[1::3], x[2::3]):
            model.train()(part)
        torch.testing.assert_close(found, model.eval()(x[:5]), rtol=1e-4, atol=1e-5)
    posterior.save(tmp_path / "p.safetensors")
    loaded = ng.load_posterior(tmp_path / "p.safetensors", convolutional()[0])
    again = loaded.outputs(x[:5], 1, norm_data=x, batch_size=16, generator=torch.Generator().manual_seed(1))
    assert torch.equal(again[0], found)


def test_after_an_error_the_layers_are_as_before():
    model, posterior, x = convolutional()
    with pytest.raises(RuntimeError):
        posterior.predict(x, 2, norm_data=x[:, :1])
    assert [norm.momentum for norm in (model[1], model[4])] == [0.1, 0.1]
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(("count", "batch_size"), [(2, 1), (3, 2), (5, 1), (7, 3)])
def test_no_batch_is_of_one_example(count: int, batch_size: int):
    _, posterior, x, _ = fitted(steps=1)
    outputs = posterior.outputs(x[:4], 2, norm_data=x[:count], batch_size=batch_size)
    assert outputs.isfinite().all()


def test_what_has_no_statistics_is_refused():
    frozen = nn.BatchNorm1d(3)
    frozen.track_running_stats = False
    for norm in (nn.LayerNorm(3), nn.BatchNorm1d(3, track_running_stats=False), frozen):
        model = nn.Sequential(nn.Linear(2, 3), norm, nn.Linear(3, 2))
        posterior = ng.NoisyAdam(model, ng.Categorical(), num_data=4, seed=0).posterior()
        with pytest.raises(ValueError, match="norm_data is for batch normalisation"):
            posterior.predict(torch.zeros(4, 2), 2, norm_data=torch.zeros(4, 2))
    _, posterior, x, _ = fitted(steps=1)
    for data in (x[:0], x[:1]):
        with pytest.raises(ValueError, match=f"at least two examples to have statistics, got {len(data)}"):
            posterior.predict(x, 2, norm_data=data, batch_size=10)
    with pytest.raises(TypeError, match="data must be tensors"):
        posterior.predict(x, 2, norm_data=[[0.0] * 4])
