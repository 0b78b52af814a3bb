"""Registering a layer: what it finds afterwards, and every way in which it is refused."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

import noisygrad as ng
from noisygrad.curvature import Layer, Unit, matrix_units, observe_linear
from noisygrad.curvature.network import find_units
from noisygrad.curvature.registry import REGISTRY, find_layer

pytestmark = pytest.mark.usefixtures("own_registry")


class Own(nn.Linear):
    """A Linear with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.mT + self.bias


class Bare(nn.Module):
    """Only a weight and a bias: nothing asks what it computes."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs))
        self.bias = nn.Parameter(torch.randn(outputs))


def test_without_registration_there_is_no_structure_and_with_it_there_is() -> None:
    model = nn.Sequential(Own(3, 4))
    assert find_layer(model[0]) is None
    assert {unit.note for unit in find_units(model)[0]} == {
        "Own has a forward of its own: register it to give it structure"
    }
    assert ng.register_layer(Own, like=nn.Linear) is Own
    assert [unit.kind for unit in find_units(model)[0]] == ["matrix"]

    class Below(Own):
        def forward(self, x: Tensor) -> Tensor:
            return 2.0 * super().forward(x)

    assert find_layer(Below(3, 4)) is None


def linear_like_units(name: str, module: nn.Module, trainable: frozenset[str]) -> list[Unit]:
    return matrix_units(name, module, trainable, *module.weight.shape)


@pytest.mark.parametrize(
    ("kind", "arguments", "error", "message"),
    [
        (nn.Linear(2, 2), {"like": nn.Linear}, TypeError, "subclass of torch.nn.Module; got Linear"),
        (int, {"like": nn.Linear}, TypeError, "subclass of torch.nn.Module; got <class 'int'>"),
        (Bare, {}, TypeError, "either a Layer"),
        (Bare, {"layer": Layer(linear_like_units, observe_linear), "like": nn.Linear}, TypeError, "either a Layer"),
        (nn.Linear, {"like": nn.Linear}, ValueError, "Linear is registered already"),
        (Bare, {"like": nn.Bilinear}, ValueError, "like=Bilinear is not a registered layer; there are Linear"),
        (Bare, {"like": 3}, ValueError, "like=3 is not a registered"),
        (nn.Identity, {"like": nn.MultiheadAttention}, ValueError, "cannot be like MultiheadAttention"),
        (Bare, {"layer": SimpleNamespace(observe=observe_linear)}, TypeError, "no function `units`; got None"),
        (Bare, {"layer": Layer(linear_like_units, None)}, TypeError, "no function `observe`; got None"),
        (
            Bare,
            {"layer": Layer(lambda module: [], observe_linear)},
            TypeError,
            r"`units` is called as units\(name, mod",
        ),
        (Bare, {"layer": Layer(linear_like_units, lambda u, m, x: x)}, TypeError, r"`observe` .*\(u, m, x\)"),
        (
            Bare,
            {"layer": SimpleNamespace(units=linear_like_units, observe=observe_linear)},
            TypeError,
            "got a SimpleNamespace",
        ),
    ],
)
def test_registration_refuses(kind, arguments, error, message) -> None:
    before = dict(REGISTRY)
    with pytest.raises(error, match=message):
        ng.register_layer(kind, **arguments)
    assert before == REGISTRY


def test_a_class_is_registered_once() -> None:
    ng.register_layer(Bare, like=nn.Linear)
    with pytest.raises(ValueError, match="Bare is registered already"):
        ng.register_layer(Bare, Layer(linear_like_units, observe_linear))


def test_what_a_like_layer_lacks_is_named() -> None:
    ng.register_layer(Bare, like=nn.Conv2d)
    with pytest.raises(ValueError, match=r"'0' \(Bare\) was registered like Conv2d.*'(in|out)_channels'|'groups'"):
        find_units(nn.Sequential(Bare(3, 4)))
