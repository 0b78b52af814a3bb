"""Sums of squared per-example matrices are those of the matrices themselves, however many are made at a time."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from noisygrad.kernels import squared_products
from noisygrad.kernels.squared_products import sum_of_squared_products, sum_of_squares_in_basis
from support.truth import close

LEADS = [(), (2,), (2, 3)]


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


@pytest.fixture(params=[None, 1, 40, 300], ids=lambda numbers: f"chunks of {numbers}")
def _chunks(request, monkeypatch):
    if request.param is not None:
        monkeypatch.setitem(squared_products.CHUNK, "cpu", request.param)
        monkeypatch.setattr(squared_products, "CACHE", request.param)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("positions", [1, 3, 9])
@pytest.mark.parametrize("lead", LEADS)
def test_sums_of_squared_products(positions, lead):
    g, a = normal(*lead, 5, positions, 3), normal(*lead, 5, positions, 4)
    naive = torch.einsum("...btp,...btq->...bpq", g, a).square().sum(-3)
    close(sum_of_squared_products(g, a), naive)


@pytest.mark.usefixtures("_chunks")
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("inputs", [0, 4])
@pytest.mark.parametrize("positions", [1, 3, 6, 40])  # vectors are turned up to 3 or so, then matrices
@pytest.mark.parametrize("lead", LEADS)
def test_sums_of_squares_in_a_basis(positions, lead, inputs, constant):
    if not inputs and not constant:
        return
    g, a = normal(*lead, 5, positions, 3), normal(*lead, 5, positions, inputs)
    left, right = normal(*lead, 3, 3), normal(*lead, inputs + constant, inputs + constant)
    whole = torch.cat([a, torch.ones_like(g[..., :1])], -1) if constant else a
    matrices = torch.einsum("...btp,...btq->...bpq", g, whole)
    naive = (left.mT.unsqueeze(-3) @ matrices @ right.unsqueeze(-3)).square().sum(-3)
    found = sum_of_squares_in_basis(g, a, left, right, constant)
    torch.testing.assert_close(found, naive, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("positions", [1, 7, 200])
def test_per_example_matrices_are_made_in_parts(positions, monkeypatch):
    """Nothing as large as all of them is ever made; of one position, not even the matrix of one example."""
    batch, p, q = 64, 12, 10
    monkeypatch.setitem(squared_products.CHUNK, "cpu", 3 * p * q)
    monkeypatch.setattr(squared_products, "CACHE", 3 * p * q)
    g, a = normal(batch, positions, p), normal(batch, positions, q)
    most = Largest()
    with most:
        sum_of_squares_in_basis(g, a, normal(p, p), normal(q + 1, q + 1), True)
    vectors = batch * positions * max(p, q + 1)
    assert most.numbers <= (vectors if positions < 10 else 3 * p * (q + 1))
    if positions == 1:
        assert most.numbers < batch * p * q


class Largest(torch.overrides.TorchFunctionMode):
    """The most numbers that any tensor made inside has memory for."""

    numbers = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        found = func(*args, **kwargs or {})
        if isinstance(found, Tensor) and found._base is None and not any(found is arg for arg in args):
            self.numbers = max(self.numbers, math.prod(found.shape))
        return found
