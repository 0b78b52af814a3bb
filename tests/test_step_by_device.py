"""The way a step takes on a GPU, walked on a CPU: its numbers are tensors, its pieces are handed to `Replays`."""

import types

import pytest
import torch
from torch import nn

import noisygrad as ng

STEPS = 12
X, Y = torch.randn(8, 2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3)), torch.arange(8) % 3


class Recorder:
    """Does the work, as `Replays` does before it records, and remembers what it was asked for."""

    def __init__(self):
        self.names, self.keys = [], set()

    def run(self, name, key, work):
        self.names.append(name)
        self.keys.add(key)
        work()


def made(family, monkeypatch, *, gpu, **options):
    torch.manual_seed(0)
    body = [nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 3)]
    model = nn.Sequential(*body).double()
    settings = {"lr": 1e-2, "kl_clip": 1e-3, "damping": 1e-3, "momentum_mode": "heavy_ball", **options}
    optimizer = family(model, ng.Categorical(), num_data=100, stats_every=2, factor_every=4, seed=1, **settings)
    if gpu:
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        optimizer.device = optimizer.guard._device = types.SimpleNamespace(type="cuda")
        optimizer._replays = Recorder()
    return model, optimizer


def weights(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("options", [{}, {"mc_samples": 2}, {"momentum_mode": "average", "kl_clip": None}], ids=str)
@pytest.mark.parametrize("family", [ng.NoisyAdam, ng.NoisyKFAC])
def test_both_ways_end_at_the_same_place(family, options, monkeypatch):
    found = []
    for gpu in (False, True):
        model, optimizer = made(family, monkeypatch, gpu=gpu, **options)
        for _ in range(STEPS):
            optimizer.step(lambda model=model: (model(X), Y))
        found.append(weights(model))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=1e-12)


def test_what_is_replayed(monkeypatch):
    model, optimizer = made(ng.NoisyKFAC, monkeypatch, gpu=True)
    replays = optimizer._replays
    for _ in range(STEPS):
        optimizer.step(lambda: (model(X), Y))
    # Of a step with statistics only the move of the mean; every piece is recorded once.
    assert [name for name in replays.names if name != "draw"] == ["move", "move", *["step", "move"] * 5]
    assert replays.names.count("draw") == STEPS
    assert len(replays.keys) == 2


@pytest.mark.parametrize("family", [ng.NoisyAdam, ng.NoisyKFAC])
def test_a_bad_step_with_statistics_is_masked(family, monkeypatch):
    model, optimizer = made(family, monkeypatch, gpu=True)
    for _ in range(5):
        optimizer.step(lambda: (model(X), Y))
    before = weights(model)
    fisher = {name: statistics.clone() for name, statistics in optimizer.factors.statistics.items()}
    optimizer.step(lambda: (model(X * torch.nan), Y))
    assert optimizer._replays.names[-1] == "move"
    assert torch.equal(weights(model), before)
    for name, kept in fisher.items():
        for part, tensor in kept.tensors().items():
            assert torch.equal(optimizer.factors.statistics[name].tensors()[part], tensor)
    optimizer.step(lambda: (model(X), Y))
    with pytest.raises(ng.NonFiniteError):  # the eighth refreshes the factors
        optimizer.step(lambda: (model(X), Y))
