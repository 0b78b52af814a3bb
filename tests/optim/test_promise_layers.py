"""Networks of all shapes train: every parameter is covered, whatever the layers do to one another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import noisygrad as ng
from noisygrad.networks import MLP
from noisygrad_paper.networks import VGG16
from support.compare import batches, compare_optimizers, differences, each_optimizer, make, mlp, snapshot, train


class Residual(nn.Module):
    """Two convolutions with BatchNorm around a shortcut."""

    def __init__(self, channels: int, inplace: bool) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=inplace)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.second(self.relu(self.norm1(self.first(x)))))
        if self.relu.inplace:
            out += x
        else:
            out = out + x
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, inplace: bool = True) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=inplace))
        self.blocks = nn.Sequential(Residual(4, inplace), Residual(4, inplace))
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean(dim=(-2, -1)))


class Transformer(nn.Module):
    """Tokens to classes; the loss has the batch in front, the encoder may have it second."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 8)
        self.position = nn.Parameter(torch.zeros(5, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=batch_first)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(8, 3)
        self.batch_first = batch_first

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.position
        if self.batch_first:
            return self.head(self.encoder(x).mean(dim=1))
        return self.head(self.encoder(x.transpose(0, 1)).mean(dim=0))


def images(count, side=8):
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(3, (count,), generator=generator)
    return torch.randn(count, 3, side, side, generator=generator) + y.view(-1, 1, 1, 1), y


def tokens(count):
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(7, (count, 5), generator=generator)
    return x, x[:, 0] % 3


def flat(count):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(count, 4, generator=generator)
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


NETWORKS = {
    "mlp": (lambda: MLP(4, [10, 6], 3), lambda: flat(32), {}),
    "vgg": (lambda: VGG16(3, width=0.125), lambda: images(6, 32), {"kl_clip": 1e-2, "safeguard": "fading"}),
    "vgg with norm": (lambda: VGG16(3, batch_norm=True, width=0.125), lambda: images(6, 32), {"kl_clip": 1e-2}),
    "resnet": (ResNet, lambda: images(16), {}),
    "transformer": (Transformer, lambda: tokens(32), {}),
    "transformer, sequence first": (lambda: Transformer(False), lambda: tokens(32), {}),
}
SMALL = ("mlp", "resnet")
RUNS = [
    *((kind, name) for kind in (ng.NoisyAdam, ng.NoisyKFAC, ng.NoisyBlockTridiagonal) for name in NETWORKS),
    *((ng.NoisyFull, name) for name in SMALL),
]


def assert_covered(optimizer, model):
    """Every trainable weight lies in the flat vector exactly once."""
    names = {name for name, _ in model.named_parameters()}
    assert {row[0].partition("[")[0] for row in optimizer.coverage().rows} == names
    assert optimizer.structure.size == sum(p.numel() for p in model.parameters())
    optimizer.weights.sample.flat.copy_(torch.arange(optimizer.structure.size))
    back = torch.cat([t.flatten() for t in optimizer.weights.sample.as_dict().values()])
    assert torch.equal(back.sort().values, torch.arange(len(back), dtype=back.dtype))


@pytest.mark.parametrize(("kind", "name"), RUNS, ids=lambda value: getattr(value, "__name__", value))
def test_every_network_trains_in_every_parameter(kind, name):
    torch.manual_seed(0)
    build, data, options = NETWORKS[name]
    model, batch = build(), data()
    optimizer = make(kind, model, ng.Categorical(), num_data=2000, factor_every=3, damping=1e-2, lr=0.02, **options)
    assert_covered(optimizer, model)
    start = {n: p.detach().clone() for n, p in model.named_parameters()}
    losses = train(optimizer, model, [batch])
    assert [n for n, p in model.named_parameters() if torch.equal(p, start[n])] == []
    assert optimizer.covariance.fisher.updates == 1
    losses += train(optimizer, model, [batch] * 10)
    assert sum(losses[-3:]) < sum(losses[:3])
    assert all(p.isfinite().all() for p in model.parameters())


@each_optimizer
def test_in_place_activations_change_nothing(kind):
    torch.manual_seed(0)
    models = [ResNet(inplace).double() for inplace in (True, False)]
    models[1].load_state_dict(models[0].state_dict())
    x, y = images(8)
    optimizers = [make(kind, model, ng.Categorical()) for model in models]
    for optimizer, model in zip(optimizers, models, strict=True):
        train(optimizer, model, [(x.double(), y)] * 3)
    compare_optimizers(*optimizers, 1e-10)


def test_an_input_overwritten_in_place_is_refused():
    class Overwrites(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x):
            with torch.no_grad():
                x = x.clone()
            out = self.first(x)
            x.zero_()
            return self.second(out)

    model = Overwrites()
    model.first.weight.requires_grad_(False)  # so that autograd itself does not need the input
    optimizer = make(ng.NoisyKFAC, model)
    x, y = batches(1, dtype=torch.float32)[0]
    with pytest.raises(RuntimeError, match=r"first.*changed in place"):
        optimizer.step(lambda: (model(x), y))


def test_a_forward_that_was_patched_before_is_put_back():
    torch.manual_seed(0)
    model = Transformer()
    attention = model.encoder.layers[0].self_attn
    attention.forward = patched = lambda *args, **kwargs: nn.MultiheadAttention.forward(attention, *args, **kwargs)
    train(make(ng.NoisyKFAC, model, ng.Categorical()), model, [tokens(8)])
    assert attention.forward is patched
    assert "forward" not in vars(model.encoder.layers[1].self_attn)


class Tied(nn.Module):
    """A table used as input and output weights, and a layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 6)
        self.twice = nn.Linear(6, 6)
        self.out = nn.Linear(6, 7, bias=False)
        self.out.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = torch.tanh(self.twice(torch.tanh(self.twice(self.table(tokens)))))
        return self.out(hidden.mean(dim=1))


@each_optimizer
def test_tied_layers_train(kind):
    torch.manual_seed(0)
    model, (x, y) = Tied(), tokens(32)
    optimizer = make(kind, model, ng.Categorical(), num_data=2000, lr=0.02, damping=1e-2)
    rows = {row[0]: row for row in optimizer.coverage().rows}
    assert set(rows) == {"table.weight", "twice.weight", "twice.bias"}
    assert "shared by table.weight, out.weight" in rows["table.weight"][3]
    losses = train(optimizer, model, [(x, y)] * 15)
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])
    assert model.out.weight is model.table.weight


@pytest.mark.parametrize("kind", [ng.NoisyAdam, ng.NoisyKFAC], ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("how", ["torch.compile", "model.compile", "a part of it", "compiled later"])
def test_compiled_equals_eager(kind, how):
    torch._dynamo.reset()
    data = batches(7)
    eager, inner = mlp(), mlp()
    options = {"stats_every": 3, "factor_every": 3}
    if how == "torch.compile":
        model = torch.compile(inner, backend="aot_eager")
    elif how == "a part of it":
        inner[2] = torch.compile(inner[2], backend="aot_eager")
        model = inner
    else:
        model = inner
        if how == "model.compile":
            inner.compile(backend="aot_eager")
    a, b = make(kind, eager, **options), make(kind, model, **options)
    if how == "compiled later":
        inner.compile(backend="aot_eager")
    train(a, eager, data)
    train(b, model, data)
    if how == "a part of it":  # its names have a prefix
        torch.testing.assert_close(b.weights.mean.flat, a.weights.mean.flat, rtol=1e-10, atol=1e-12)
    else:
        compare_optimizers(a, b, 1e-10)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.rare, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.use = True

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.rare(x)) if self.use else x)


@each_optimizer
def test_a_layer_may_be_unused_in_a_pass(kind):
    torch.manual_seed(0)
    model = Branching().double()
    optimizer = make(kind, model, momentum=0.0)
    data = batches(4)
    train(optimizer, model, data[:2])
    model.use = False
    start = model.rare.weight.detach().clone()
    fisher = {n: s.clone() for n, s in optimizer.covariance.statistics.items()}
    train(optimizer, model, data[2:3])
    if kind is ng.NoisyKFAC:
        mine, before = (f["rare"].tensors() for f in (optimizer.covariance.statistics, fisher))
        # Its Fisher is 0 in this pass, the third of the moving average; of its inputs nothing new is known.
        decay = optimizer.options.decay_at(3)
        torch.testing.assert_close(mine["outputs"], (1 - (1 - decay) / (1 - decay**3)) * before["outputs"])
        torch.testing.assert_close(mine["inputs"], before["inputs"])
        moved = (model.rare.weight - start).detach()
        assert (moved * start).sum() < 0  # only the prior pulls
        assert moved.abs().max() < 0.05
    model.use = True
    train(optimizer, model, data[3:])
    assert optimizer.weights.mean.flat.isfinite().all()


@each_optimizer
@pytest.mark.parametrize("form", ["two draws", "skipped"])
def test_a_layer_that_is_unused_meanwhile_keeps_its_averages(kind, form):
    """Until the step is made, and where a GradScaler skips it."""
    torch.manual_seed(0)
    model, data = Branching().double(), batches(4)
    optimizer = make(kind, model, factor_every=5)
    train(optimizer, model, data[:2])
    before, skipped = snapshot(optimizer), form == "skipped"
    for (x, y), model.use in zip(data[2:3] if skipped else data[2:], (False, True), strict=False):
        with optimizer.sampled() as draw:
            draw.nll(model(x), y).backward()
    if skipped:
        optimizer.found_inf = torch.ones(1)
        optimizer.step()
        before["/optimizer/steps"] += 1
    assert not differences(before, snapshot(optimizer), but=("generators",))
    if not skipped:
        optimizer.step()
        assert differences(before, snapshot(optimizer), but=("generators", "/model", "mean", "momentum", "steps"))
