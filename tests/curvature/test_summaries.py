"""Statistics taken while the backward pass is under way are those taken after it."""

import gc
import weakref

import pytest
import torch
from torch import nn

import noisygrad as ng
from noisygrad.curvature import fisher, summaries
from noisygrad.curvature.capture import Capture
from noisygrad.curvature.network import find_units
from noisygrad.posterior.blocks import Block


class Residual(nn.Module):
    """A branch, a layer that is called twice, a norm, and an activation in place."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 3, 3, padding=1)
        self.side = nn.Conv2d(2, 3, 1)
        self.twice = nn.Conv2d(3, 3, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(3)
        self.last = nn.Linear(3, 3)
        self.unused = nn.Linear(2, 2)

    def forward(self, x):
        hidden = nn.functional.relu_(self.first(x)) + self.side(x)
        hidden = self.norm(self.twice(torch.tanh(self.twice(hidden))))
        return self.last(hidden.mean((-2, -1)))


class Words(nn.Module):
    """An embedding, attention, and a parameter of its own."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 8)
        self.scale = nn.Parameter(torch.ones(8))
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        return self.last(self.encoder(self.table(x) * self.scale).mean(1))


def chain():
    layers = [nn.Conv2d(2, 3, 3), nn.ReLU(inplace=True), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3)]
    return nn.Sequential(*layers)


MODELS = {
    "chain": (chain, torch.randn(6, 2, 5, 5)),
    "branches": (Residual, torch.randn(6, 2, 5, 5)),
    "words": (Words, torch.randint(7, (6, 5))),
}
FAMILIES = [ng.NoisyAdam, ng.NoisyKFAC, ng.NoisyBlockTridiagonal]


def statistics(name, family, **options):
    torch.manual_seed(0)
    made, x = MODELS[name]
    model = made()
    optimizer = family(model, ng.Categorical(), num_data=50, stats_every=1, seed=0, **options)
    y = torch.arange(len(x)) % 3
    for _ in range(2):
        optimizer.step(lambda: (model(x), y))
    found = {block: s.tensors() for block, s in optimizer.covariance.statistics.items()}
    return {f"{block} {part}": tensor for block, tensors in found.items() for part, tensor in tensors.items()}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, {"fisher": "exact"}, {"fisher": "empirical"}, {"stats_batch": 4}], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_they_are_the_same(name, options, family, monkeypatch):
    usual = statistics(name, family, **options)
    monkeypatch.setattr(summaries, "DEVICES", {"cpu"})
    found = statistics(name, family, **options)
    assert found.keys() == usual.keys()
    for key, tensor in usual.items():
        torch.testing.assert_close(found[key], tensor, rtol=2e-5, atol=2e-6)


def test_only_the_first_layers_and_those_called_twice_are_asked_for():
    model = Residual()
    units, layers = find_units(model)
    with Capture(layers) as capture:
        model(torch.randn(6, 2, 5, 5))
        records = capture.take()
    asked = [r.unit.name for r, hookable in zip(records, summaries.hookable(records), strict=True) if not hookable]
    assert asked == ["first", "side", "twice", "twice"]
    assert {unit.name for unit in units} - set(asked) == {"norm", "last", "unused"}


def test_an_output_gradient_is_gone_before_the_next_is_there(monkeypatch):
    monkeypatch.setattr(summaries, "DEVICES", {"cpu"})
    seen, alive = [], []
    real = Block.summarise

    def summarise(self, unit, one, current):
        alive.append(sum(reference() is not None for reference in seen))
        seen.append(weakref.ref(one.gradients))
        return real(self, unit, one, current)

    monkeypatch.setattr(Block, "summarise", summarise)
    gc.disable()
    try:
        statistics("chain", ng.NoisyAdam)
    finally:
        gc.enable()
    assert alive == [0] * 6


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_the_passes_of_an_exact_fisher_are_not_kept(family, monkeypatch):
    monkeypatch.setattr(summaries, "DEVICES", {"cpu"})
    made, alive, walks = [], [], []
    real, explored = Block.summarise, summaries.hookable

    def summarise(self, unit, one, current):
        alive.append(sum(reference() is not None for reference in made))
        made.append(weakref.ref(found := real(self, unit, one, current)))
        return found

    monkeypatch.setattr(Block, "summarise", summarise)
    monkeypatch.setattr(fisher, "hookable", lambda records: walks.append(0) or explored(records))
    statistics("chain", family, fisher="exact")
    assert len(alive) == 2 * 3 * 3  # steps, classes, layers
    assert max(alive) < 3
    assert len(walks) == 2


@pytest.mark.parametrize("family", FAMILIES[:2])
def test_the_layer_that_went_bad_is_named(family, monkeypatch):
    monkeypatch.setattr(summaries, "DEVICES", {"cpu"})
    model = chain()
    optimizer = family(model, ng.Categorical(), num_data=50, stats_every=1, seed=0)
    with torch.no_grad():
        model[2].weight[0, 0, 0, 0] = torch.nan
    before = {name: s.clone() for name, s in optimizer.covariance.statistics.items()}
    with pytest.raises(ng.NonFiniteError, match=r"the statistics of '?2'? went bad"):
        optimizer.step(lambda: (model(torch.randn(6, 2, 5, 5)), torch.arange(6) % 3))
    for name, kept in before.items():
        for part, tensor in kept.tensors().items():
            assert torch.equal(optimizer.covariance.statistics[name].tensors()[part], tensor)


def test_nothing_is_left_on_the_graph(monkeypatch):
    monkeypatch.setattr(summaries, "DEVICES", {"cpu"})
    model, calls = chain(), []
    optimizer = ng.NoisyAdam(model, ng.Categorical(), num_data=50, stats_every=1, seed=0)
    real = Block.summarise
    monkeypatch.setattr(
        Block, "summarise", lambda self, unit, one, current: calls.append(one) or real(self, unit, one, current)
    )
    with optimizer.sampled() as draw:
        loss = draw.nll(model(torch.randn(6, 2, 5, 5)), torch.arange(6) % 3)
        taken = len(calls)
        loss.backward()
    assert taken == len(calls) == 3
