"""A layer type of a user's own from its units to its posterior, and what is said where a part of it is wrong."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import noisygrad as ng
from noisygrad.curvature import (
    Batch,
    ElementwisePass,
    Layer,
    MatrixPass,
    Pass,
    Slot,
    Unit,
    arrange,
    linear_units,
    observe_linear,
)
from noisygrad.curvature.capture import Capture
from noisygrad.curvature.network import find_units
from noisygrad.curvature.registry import REGISTRY
from support.truth import close, measured_fisher, normal


@pytest.fixture(autouse=True)
def _own_registry() -> Iterator[None]:
    before = dict(REGISTRY)
    torch.manual_seed(0)
    yield
    REGISTRY.clear()
    REGISTRY.update(before)


def gaussian() -> ng.Gaussian:
    return ng.Gaussian(noise_variance=0.7)


# As in GPT-2 the weight is [in, out], so its bias is no column of the matrix.


class Turned(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.randn(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


def turned_units(name: str, module: Turned, trainable: frozenset[str]) -> list[Unit]:
    inputs, outputs = module.weight.shape
    weight, bias = Slot(f"{name}.weight", 0, outputs), Slot(f"{name}.bias", 0, 1)
    return [
        Unit(f"{name}.weight", "matrix", inputs, outputs, (weight,), "Turned"),
        Unit(f"{name}.bias", "elementwise", outputs, 1, (bias,), "Turned"),
    ]


def observe_turned(unit: Unit, module: Turned, inputs: Tensor, gradient: Tensor, batch: Batch) -> Pass:
    a, g = arrange(inputs, batch, unit), arrange(gradient, batch, unit)
    if unit.kind == "matrix":
        return MatrixPass(g, a, constant=False)
    return ElementwisePass(g, g, scale=False, shift=True)


def with_statistics(model: nn.Module) -> None:
    with Capture(find_units(model)[1]):
        model(torch.randn(5, 3))


@pytest.mark.parametrize("family", ["diagonal", "kronecker"])
def test_a_layer_of_another_shape(family: str) -> None:
    ng.register_layer(Turned, Layer(turned_units, observe_turned))
    own = nn.Sequential(Turned(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    usual = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    usual.load_state_dict(own.state_dict() | {"0.weight": own[0].weight.detach().mT})
    x = normal(5, 2, 3)
    found, expected = (measured_fisher(model, gaussian(), x, family).diagonal() for model in (own, usual))
    if family == "diagonal":
        close(found[:12].view(3, 4).mT.flatten(), expected[:12])
        close(found[12:], expected[12:])
    else:
        close(found[:12].view(3, 4).mT.flatten(), expected[:12])


def no_units(name, module, trainable):
    return turned_units("elsewhere", module, trainable)


def few_columns(name, module, trainable):
    return [Unit(f"{name}.weight", "matrix", 3, 4, (Slot(f"{name}.weight", 0, 3),), "Turned")]


def wrong_shape(name, module, trainable):
    return [Unit(f"{name}.weight", "matrix", 4, 4, (Slot(f"{name}.weight", 0, 4),), "Turned")]


def too_few(unit, module, inputs, gradient, batch):
    return MatrixPass(arrange(gradient, batch, unit)[..., 1:], arrange(inputs, batch, unit), constant=False)


def all_in_one(unit, module, inputs, gradient, batch):
    seen = observe_turned(unit, module, inputs, gradient, batch)
    if unit.kind != "matrix":
        return seen
    return MatrixPass(seen.activations.transpose(0, 1), seen.gradients.transpose(0, 1), constant=False)


def summed(unit, module, inputs, gradient, batch):
    """The sum over examples, which is right."""
    seen = observe_turned(unit, module, inputs, gradient, batch)
    if unit.kind != "matrix":
        return seen
    return MatrixPass(seen.activations.flatten(0, 1)[None], seen.gradients.flatten(0, 1)[None], constant=False)


def other_examples(unit, module, inputs, gradient, batch):
    seen = observe_turned(unit, module, inputs, gradient, batch)
    return MatrixPass(seen.activations.flip(0), seen.gradients.flip(0), False) if unit.kind == "matrix" else seen


def grouped(unit, module, inputs, gradient, batch):
    seen = observe_turned(unit, module, inputs, gradient, batch)
    if unit.kind != "matrix":
        return seen
    return MatrixPass(seen.activations[None], seen.gradients[None], constant=False, grouped=True)


def swapped(unit, module, inputs, gradient, batch):
    seen = observe_turned(unit, module, inputs, gradient, batch)
    return MatrixPass(seen.activations, 2 * seen.gradients, False) if unit.kind == "matrix" else seen


@pytest.mark.parametrize(
    ("units", "observe", "message"),
    [
        (no_units, observe_turned, r"'elsewhere\.weight', which is not a trainable.*0\.weight, 0\.bias"),
        (few_columns, observe_turned, r"columns 0 to 4.*got 0\.weight \[0, 3\)"),
        (wrong_shape, observe_turned, r"'0\.weight' has 4 × 4 numbers.*\(3, 4\)"),
        (turned_units, too_few, r"2 examples with 9 numbers each, but .* keeps 2, and `units` says 12"),
        (turned_units, all_in_one, r"1 examples with 12 numbers each"),
        (turned_units, grouped, r"'0\.weight' has groups=1, so the pass .* must not be grouped"),
        (turned_units, summed, r"1 examples with 12 numbers each"),
        (turned_units, other_examples, r"'0\.weight'.*correct `units` or `observe`"),
        (turned_units, swapped, r"'0\.weight'.*correct `units` or `observe`"),
    ],
)
def test_a_layer_that_is_wrong_says_where(units, observe, message) -> None:
    ng.register_layer(Turned, Layer(units, observe))
    with pytest.raises(ValueError, match=message):
        with_statistics(nn.Sequential(Turned(3, 4)))


class Paired(Turned):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x[0]), x[1]


def test_what_is_no_tensor_is_refused() -> None:
    ng.register_layer(Turned, Layer(turned_units, observe_turned))
    ng.register_layer(Paired, Layer(turned_units, observe_turned))
    model = nn.Sequential(Paired(3, 4))
    with (
        Capture(find_units(model)[1]),
        pytest.raises(TypeError, match=r"'0\.weight' \(Paired\).*first argument.*tuple"),
    ):
        model((torch.randn(5, 3), torch.zeros(1)))
    model[0].forward = lambda x: (x,)
    with Capture(find_units(model)[1]), pytest.raises(TypeError, match="return a tensor; got tuple"):
        model(torch.randn(5, 3))


def test_a_checkpoint_saves_what_it_would_save_without_the_check() -> None:
    ng.register_layer(Turned, Layer(turned_units, observe_turned))
    model, x = nn.Sequential(Turned(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(5, 3)
    with Capture(find_units(model)[1]):
        output = checkpoint(model, x, use_reentrant=False)
        output.sum().backward()
    expected = torch.autograd.grad(model(x).sum(), model[0].weight)
    torch.testing.assert_close(model[0].weight.grad, expected[0])


class Clamped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(-3.0, 3.0)


class Rectified(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) + 100.0).relu()


class Picky(nn.Linear):
    """Cannot be called with parameters far from where they are."""

    def forward(self, x: Tensor) -> Tensor:
        if float(self.weight.detach().abs().max()) > 3.0:
            raise RuntimeError("such weights are impossible")
        return super().forward(x)


@pytest.mark.parametrize("kind", [Clamped, Rectified])
def test_what_is_linear_here_alone_is_found(kind: type[nn.Linear]) -> None:
    ng.register_layer(kind, like=nn.Linear)
    with pytest.raises(ValueError, match=r"differs from autograd's"):
        with_statistics(nn.Sequential(kind(3, 4)))


def test_a_layer_is_not_refused_for_parameters_that_it_cannot_have() -> None:
    ng.register_layer(Picky, like=nn.Linear)
    with_statistics(nn.Sequential(Picky(3, 4)))


class Squashed(nn.Linear):
    """Saturates far from its weights, where its gradients are all rounding."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def observe_squashed(unit, module, inputs, gradient, batch):
    slope = 1.0 / torch.cosh(nn.functional.linear(inputs, module.weight, module.bias)).square()
    return observe_linear(unit, module, inputs, gradient * slope, batch)


@pytest.mark.parametrize("size", [2, 5, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_layer_that_saturates_far_away_is_right(size: int, dtype: torch.dtype) -> None:
    ng.register_layer(Squashed, Layer(linear_units, observe_squashed))
    model = nn.Sequential(Squashed(size, 4)).to(dtype)
    with Capture(find_units(model)[1]):
        model(torch.randn(5, size, dtype=dtype))
