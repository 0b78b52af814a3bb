"""Layers of a user's own: what registering them gives, and the check of what they compute."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import noisygrad as ng
from noisygrad.curvature import (
    Layer,
    MatrixPass,
    Slot,
    Unit,
    arrange,
    verification,
)
from noisygrad.curvature.capture import Capture
from noisygrad.curvature.network import find_units
from noisygrad.networks import ReplicatedLinear
from support.truth import close, exact_fisher, measured_fisher, normal, random_weights

pytestmark = pytest.mark.usefixtures("own_registry")


class Own(nn.Linear):
    """A Linear with a forward of its own that counts how often, and with how many rows, it was called."""

    def __init__(self, *args: int, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.sizes: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.sizes.append(len(x))
        return x @ self.weight.mT + (0.0 if self.bias is None else self.bias)


class Bare(nn.Module):
    """Only a weight and a bias."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.bias = nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight) + self.bias


def gaussian() -> ng.Gaussian:
    return ng.Gaussian(noise_variance=0.7)


def trained(model: nn.Module, x: Tensor, family: type = ng.NoisyKFAC, steps: int = 2) -> ng.NoisyOptimizer:
    optimizer = family(model, gaussian(), num_data=20, stats_every=1, seed=0)
    with torch.no_grad():
        y = torch.zeros_like(model(x))
    for _ in range(steps):
        optimizer.step(lambda: (model(x), y))
    return optimizer


@pytest.mark.parametrize("family", ["diagonal", "kronecker", "full"])
@pytest.mark.parametrize("kind", [Own, Bare])
@pytest.mark.parametrize("shape", [(5, 3), (5, 2, 3)], ids=["vectors", "sequences"])
def test_like_linear_is_a_linear(kind: type, family: str, shape: tuple[int, ...]) -> None:
    ng.register_layer(kind, like=nn.Linear)
    own = random_weights(nn.Sequential(kind(3, 4), nn.Tanh(), nn.Linear(4, 2)).double())
    usual = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    usual.load_state_dict(own.state_dict())
    x = normal(*shape)
    close(measured_fisher(own, gaussian(), x, family), measured_fisher(usual, gaussian(), x, family))


class OwnConv(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight, self.bias)


class OwnConv1d(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight, self.bias)


class OwnLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, eps=self.eps) * self.weight + self.bias


class OwnBatchNorm(nn.BatchNorm1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clone())


class OwnEmbedding(nn.Embedding):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight[x]


class OwnReplicated(ReplicatedLinear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.clone())


ALIKE = {
    "convolution": (OwnConv, nn.Conv2d, lambda: OwnConv(2, 4, 3, padding=1, groups=2), normal(5, 2, 4, 4).float()),
    "no bias": (OwnConv, nn.Conv2d, lambda: OwnConv(2, 4, 3, bias=False), normal(5, 2, 4, 4).float()),
    "layer norm": (OwnLayerNorm, nn.LayerNorm, lambda: OwnLayerNorm(4), normal(5, 3, 4).float()),
    "batch norm": (OwnBatchNorm, nn.BatchNorm1d, lambda: OwnBatchNorm(3), normal(5, 3).float()),
    "embedding": (OwnEmbedding, nn.Embedding, lambda: OwnEmbedding(9, 3), torch.arange(10).view(5, 2) % 7),
    "tokens": (OwnEmbedding, nn.Embedding, lambda: OwnEmbedding(9, 3), torch.arange(5)),
}


@pytest.mark.parametrize("name", ALIKE)
def test_other_layers_have_their_like(name: str) -> None:
    kind, like, make, x = ALIKE[name]
    ng.register_layer(kind, like=like)
    model = random_weights(make())
    usual = copy.deepcopy(model)
    usual.__class__ = like
    found, expected = (trained(each, x, ng.NoisyAdam).covariance.statistics for each in (model, usual))
    assert list(found) == list(expected)
    for block in found:
        for key, tensor in expected[block].tensors().items():
            torch.testing.assert_close(found[block].tensors()[key], tensor)


def test_replicas_have_their_like() -> None:
    ng.register_layer(OwnReplicated, like=ReplicatedLinear)
    layer = OwnReplicated((2,), 3, 4)
    _, layers = find_units(layer)
    with Capture(layers) as capture:
        layer(torch.randn(2, 5, 3))
        layer(torch.randn(5, 3))
        assert [record.unit.replicas for record in capture.take()] == [(2,), (2,)]


def wrong(name: str) -> nn.Module:
    class Wrong(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 4)
            self.scale = nn.Parameter(torch.ones(()))  # now it makes no difference

        def forward(self, x: Tensor) -> Tensor:
            usual = super().forward
            return {
                "an activation": lambda: torch.relu(usual(x)),
                "another parameter": lambda: usual(x) * self.scale,
                "a square": lambda: F.linear(x, self.weight.square(), self.bias),
                "another input": lambda: usual(torch.tanh(x)),
                "a shifted bias": lambda: F.linear(x, self.weight, 2.0 * self.bias),
                "half the weight": lambda: F.linear(x, self.weight.detach() * 0.5 + self.weight * 0.5, self.bias),
                "dropout": lambda: F.dropout(usual(x), 0.5),
                "a weight that is not used": lambda: F.linear(x, self.weight.detach(), self.bias),
                "examples mixed": lambda: usual(x) + usual(x.flip(0)),
            }[name]()

    ng.register_layer(Wrong, like=nn.Linear)
    return nn.Sequential(nn.Linear(3, 3), Wrong(), nn.Linear(4, 2))


@pytest.mark.parametrize(
    "name",
    [
        "an activation",
        "another parameter",
        "a square",
        "another input",
        "a shifted bias",
        "half the weight",
        "dropout",
        "a weight that is not used",
        "examples mixed",
    ],
)
def test_a_forward_that_is_not_like_it_is_refused_at_the_first_statistics(name: str) -> None:
    model = wrong(name)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"layer '1' \(Wrong\).*'1\.(weight|bias)'.*like=.*Layer\(units, observe\)"):
        trained(model, torch.randn(5, 3))
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    assert not any("forward" in vars(module) for module in model.modules())


def test_the_check_changes_nothing_of_the_network() -> None:
    class Noisy(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            torch.rand(3)
            return super().forward(x)

    found = []
    for kind in (Noisy, nn.BatchNorm1d):
        torch.manual_seed(3)
        if kind is Noisy:
            ng.register_layer(Noisy, like=nn.BatchNorm1d)
        model = nn.Sequential(nn.Linear(3, 4), kind(4), nn.Linear(4, 2))
        names = {name: id(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        trained(model, torch.randn(6, 3))
        assert names == {name: id(tensor) for name, tensor in (*model.named_parameters(), *model.named_buffers())}
        found.append((model.state_dict(), torch.rand(9 if kind is Noisy else 18)[-9:]))
    for key, tensor in found[0][0].items():
        torch.testing.assert_close(tensor, found[1][0][key])


def test_the_check_draws_no_numbers_of_the_users() -> None:
    class Noisy(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            torch.rand(3)
            return super().forward(x)

    ng.register_layer(Noisy, like=nn.Linear)
    model = nn.Sequential(Noisy(3, 2))
    optimizer, x = ng.NoisyKFAC(model, gaussian(), num_data=20, stats_every=1, seed=0), torch.randn(6, 3)
    torch.manual_seed(5)
    optimizer.step(lambda: (model(x), torch.zeros(6, 2)))
    found = torch.rand(4)
    torch.manual_seed(5)
    torch.rand(3)  # by the one call of the network
    assert torch.equal(found, torch.rand(4))


def test_it_is_made_once_for_each_module_of_a_few_examples() -> None:
    ng.register_layer(Own, like=nn.Linear)
    model = nn.Sequential(Own(3, 4), nn.Tanh(), nn.Linear(4, 2))
    trained(model, torch.randn(8, 3), steps=3)
    assert model[0].sizes == [8, 8, 2, 2, 8, 8]  # near its weights, and far from them
    other = copy.deepcopy(model)
    trained(other, torch.randn(8, 3))
    assert other[0].sizes[6:] == [8, 8, 2, 2, 8]


def test_an_input_of_zeros_says_nothing() -> None:
    layer = wrong("an activation")[1]
    layer.bias = None
    _, layers = find_units(layer)
    with Capture(layers):
        layer(torch.zeros(5, 3))
    with Capture(layers), pytest.raises(ValueError, match="by its registered layer"):
        layer(torch.randn(5, 3))


class Whole(nn.Linear):
    """Works for a batch of eight only."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.view(8, 3))


class Chosen(Own):
    """Has more arguments than its input, some of which have a batch."""

    def forward(self, x: Tensor, factor: float, shift: Tensor, mask: Tensor) -> Tensor:
        return super().forward(x) + mask * factor + shift


def test_layers_that_need_the_whole_batch_get_it() -> None:
    ng.register_layer(Whole, like=nn.Linear)
    ng.register_layer(Chosen, like=nn.Linear)
    x = torch.randn(8, 3)
    assert trained(nn.Sequential(Whole(3, 2)), x).covariance.statistics

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = Chosen(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x, 1.0, torch.ones(4), mask=torch.ones(8, 1))

    trained(model := Model(), x)
    assert model.layer.sizes == [8, 8, 2, 2, 8]


def test_examples_without_a_batch_and_other_orders() -> None:
    ng.register_layer(OwnConv1d, like=nn.Conv1d)
    ng.register_layer(Own, like=nn.Linear)

    class Single(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.last = OwnConv1d(3, 4, 2), Own(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.conv(x[0]).mean(-1)).unsqueeze(0)

    assert trained(Single(), torch.randn(1, 3, 6)).covariance.statistics
    encoder = nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=False)
    encoder.linear1 = Own(4, 8)

    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.last = encoder, nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.encoder(x.transpose(0, 1)).mean(0))

    assert trained(Text(), torch.randn(2, 3, 4)).covariance.statistics


def test_narrow_types_have_their_tolerance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verification, "TOLERANCES", {torch.float32: 1e-9})
    ng.register_layer(Own, like=nn.Linear)
    model, x = nn.Sequential(Own(3, 4)), torch.randn(6, 3)
    with Capture(find_units(model)[1]), torch.autocast("cpu", dtype=torch.bfloat16):
        model(x)
    assert model[0].sizes == [6, 2, 2]
    model = copy.deepcopy(model).bfloat16()
    with Capture(find_units(model)[1]):
        model(x.bfloat16())
    assert model[0].sizes == [6, 2, 2, 6, 2, 2]
    with Capture(find_units(model.float())[1]):
        model(x)
    assert model[0].sizes == [6, 2, 2, 6, 2, 2, 6]


def test_a_factor_that_is_1_where_it_starts_is_found() -> None:
    model = wrong("another parameter")
    with Capture(find_units(model)[1]), pytest.raises(ValueError, match=r"'1\.weight'"):
        model(torch.randn(5, 3))


class LowRank(nn.Module):
    """A product of two matrices: the gradient of each depends on the other."""

    def __init__(self, inputs: int, rank: int, outputs: int) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, inputs))
        self.up = nn.Parameter(torch.randn(outputs, rank))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.down.mT @ self.up.mT


def low_rank_units(name: str, module: LowRank, trainable: frozenset[str]) -> list[Unit]:
    shapes = {f"{name}.{own}": getattr(module, own).shape for own in ("down", "up") if own in trainable}
    return [Unit(own, "matrix", *shape, (Slot(own, 0, shape[1]),), "LowRank") for own, shape in shapes.items()]


def observe_low_rank(unit: Unit, module: LowRank, inputs: Tensor, gradient: Tensor, batch: object) -> MatrixPass:
    a, g = arrange(inputs, batch, unit), arrange(gradient, batch, unit)
    is_down = unit.name.endswith("down")
    return MatrixPass(a, g @ module.up, constant=False) if is_down else MatrixPass(a @ module.down.mT, g, False)


def test_the_gradient_of_a_unit_may_depend_on_another() -> None:
    ng.register_layer(LowRank, Layer(low_rank_units, observe_low_rank))
    model = random_weights(nn.Sequential(LowRank(3, 2, 4), nn.Tanh(), nn.Linear(4, 2)).double())
    close(measured_fisher(model, gaussian(), normal(5, 3), "full"), exact_fisher(model, gaussian(), normal(5, 3)))
