"""Products and inverse roots of float64 matrices that are more accurate than float64's rounding."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch

from noisygrad.kernels.refinement import accurate_product, refined_inverse_root
from support.families import normal


@pytest.mark.parametrize("size", [1, 3, 20])
def test_a_product_has_twice_the_digits_of_its_type(size: int) -> None:
    """Of rows and columns whose sizes differ by many orders of magnitude."""
    left, right = (normal(seed, size, size) for seed in (1, 2))
    left, right = left * (12 * normal(3, size, 1)).exp(), right * (12 * normal(4, 1, size)).exp()
    high, low = accurate_product(left, right)
    bounds = left.abs().amax(1, keepdim=True) * right.abs().amax(0, keepdim=True)
    for i in range(size):
        for j in range(size):
            pairs = zip(left[i].tolist(), right[:, j].tolist(), strict=True)
            exact = sum(Fraction(a) * Fraction(b) for a, b in pairs)
            error = abs(exact - Fraction(float(high[i, j])) - Fraction(float(low[i, j])))
            assert error <= Fraction(float(bounds[i, j])) / 2**90


@pytest.mark.parametrize("times", [0.1, 1.0, 1e3])
def test_a_ridge_of_the_size_of_rounding_keeps_its_digits(times: float) -> None:
    """(a 11ᵀ + r I)⁻¹ = (I − 11ᵀ/(d + r/a)) / r, of which a sum in float64 has no correct digit."""
    size, a = 200, 1021.0
    r = times * torch.finfo(torch.float64).eps * a
    factor, ridge = torch.full((1, size, size), a).double(), torch.full((1, size), r).double()
    root, logdet, squares, info = refined_inverse_root(factor, ridge)
    expected = (torch.eye(size).double() - 1 / (size + r / a)) / r
    assert int(info) == 0
    assert (root[0] @ root[0].mT - expected).norm() < 1e-7 * expected.norm()
    torch.testing.assert_close(squares.log().sum(-1), logdet)
    exact = (size - 1) * torch.tensor(r).double().log() + torch.tensor(size * a + r).double().log()
    torch.testing.assert_close(logdet, exact[None], rtol=1e-12, atol=1e-8)


def test_what_is_not_positive_definite_has_failed() -> None:
    factor = torch.diag_embed(torch.tensor([[1.0, -2e-16], [1.0, 3e-17]], dtype=torch.float64))
    _, _, _, info = refined_inverse_root(factor, torch.full((2, 2), 1e-16, dtype=torch.float64))
    assert info.tolist() == [1, 0]
