"""Squared per-example gradients in another basis, for every kind of matrix pass, against their dense definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from noisygrad.curvature.convolution import ConvolutionPass, PatchedPass
from noisygrad.curvature.network import find_units
from noisygrad.curvature.passes import Batch, MatrixPass
from noisygrad.curvature.registry import find_layer
from noisygrad.kernels import squared_products
from noisygrad.networks import ReplicatedLinear

CASES = {
    "linear": (lambda bias: nn.Linear(4, 3, bias=bias), (5, 4)),
    "short sequence": (lambda bias: nn.Linear(4, 3, bias=bias), (5, 2, 4)),
    "long sequence": (lambda bias: nn.Linear(4, 3, bias=bias), (5, 11, 4)),
    "replicas": (lambda bias: ReplicatedLinear((2,), 4, 3, bias=bias), (2, 5, 4)),
    "convolution": (lambda bias: nn.Conv2d(2, 3, 3, padding=1, bias=bias), (5, 2, 4, 6)),
    "one axis": (lambda bias: nn.Conv1d(2, 3, 3, bias=bias), (5, 2, 9)),
    "three axes": (lambda bias: nn.Conv3d(2, 3, 2, bias=bias), (3, 2, 4, 3, 3)),
    "stride": (lambda bias: nn.Conv2d(2, 3, 3, stride=2, bias=bias), (5, 2, 7, 6)),
    "one position": (lambda bias: nn.Conv2d(2, 3, 3, bias=bias), (5, 2, 3, 3)),
    "groups": (lambda bias: nn.Conv2d(4, 6, 3, padding=1, groups=2, bias=bias), (5, 4, 4, 4)),
}


def seen_by(module: nn.Module, shape: tuple[int, ...]) -> MatrixPass:
    """The pass that the registry makes of random images and output gradients."""
    inputs = torch.randn(*shape, dtype=torch.float64)
    (units,) = find_units(module)[1].values()
    size = shape[len(units[0].replicas)]
    layer = find_layer(module)
    with torch.no_grad():
        output = module(inputs)
        return layer.observe(units[0], module, inputs, torch.randn_like(output), Batch(size, size, torch.float64))


def dense(seen: MatrixPass, left: Tensor, right: Tensor) -> Tensor:
    """One example's matrix after another."""
    a, g = seen.activations, seen.gradients
    if seen.constant:
        a = torch.cat([a, a.new_ones(*a.shape[:-1], 1)], dim=-1)
    matrices = [left.mT @ (g[..., b, :, :].mT @ a[..., b, :, :]) @ right for b in range(seen.examples)]
    return torch.stack(matrices).square().sum(0)


@pytest.mark.parametrize("chunk", [None, 1, 200])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_they_are_those_of_the_definition(name, bias, chunk, monkeypatch):
    torch.manual_seed(0)
    make, shape = CASES[name]
    seen = seen_by(make(bias).double(), shape)
    if chunk is not None:
        monkeypatch.setitem(squared_products.CHUNK, "cpu", chunk)
        monkeypatch.setattr(squared_products, "CACHE", chunk)
    lead, p, q = seen.gradients.shape[:-3], seen.gradients.shape[-1], seen.activations.shape[-1] + bias
    left, right = torch.randn(*lead, p, p, dtype=torch.float64), torch.randn(*lead, q, q, dtype=torch.float64)
    found = seen.squares_in_basis(left, right)
    assert found.shape == (*lead, p, q)
    torch.testing.assert_close(found, dense(seen, left, right), rtol=1e-10, atol=1e-10)


def test_in_the_usual_basis_they_are_the_squares():
    torch.manual_seed(0)
    seen = seen_by(nn.Conv2d(2, 3, 3, padding=1).double(), (5, 2, 4, 6))
    found = seen.squares_in_basis(torch.eye(3, dtype=torch.float64), torch.eye(19, dtype=torch.float64))
    weight, bias = seen.square_sums()
    torch.testing.assert_close(found[:, :-1].flatten(), weight, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(found[:, -1], bias, rtol=1e-10, atol=1e-10)


def test_of_a_convolution_with_a_frozen_weight_the_bias_is_left():
    torch.manual_seed(0)
    module = nn.Conv2d(2, 3, 3).double()
    module.weight.requires_grad_(False)
    seen = seen_by(module, (5, 2, 4, 6))
    left, right = torch.randn(3, 3, dtype=torch.float64), torch.full((1, 1), 2.0, dtype=torch.float64)
    torch.testing.assert_close(seen.squares_in_basis(left, right), dense(seen, left, right), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("kind", [PatchedPass, ConvolutionPass])
def test_patches_are_made_of_some_examples_at_a_time(kind, monkeypatch):
    module, images = nn.Conv2d(2, 3, 3, padding=1).double(), torch.randn(64, 2, 6, 6, dtype=torch.float64)
    seen = kind(module, images, torch.randn(64, 3, 6, 6, dtype=torch.float64), True)
    made = []
    usual = squared_products.sum_of_squares_in_basis
    monkeypatch.setattr(
        "noisygrad.curvature.passes.sum_of_squares_in_basis",
        lambda g, a, *rest: made.append(a.shape[0]) or usual(g, a, *rest),
    )
    monkeypatch.setitem(squared_products.CHUNK, "cpu", 10 * 2 * 19 * 36)
    seen.squares_in_basis(torch.eye(3).double(), torch.eye(19).double())
    assert sum(made) == 64
    assert max(made) == 10


def test_small_gradients_keep_their_digits():
    torch.manual_seed(0)
    module, images = nn.Conv2d(2, 3, 3, padding=1), torch.randn(5, 2, 6, 6)
    gradients, left, right = torch.randn(5, 3, 6, 6), torch.randn(3, 3), torch.randn(19, 19)
    usual = ConvolutionPass(module, images, gradients, True).squares_in_basis(left, right)
    small = ConvolutionPass(module, images, gradients * 1e-18, True).squares_in_basis(left, right)
    torch.testing.assert_close(small * 1e36, usual, rtol=1e-4, atol=1e-4)
