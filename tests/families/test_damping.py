"""Equation (11) against 60-digit arithmetic, for factors of any size; what float32 cannot hold is reported."""

from __future__ import annotations

import itertools
import math
import warnings

import mpmath
import pytest
import torch
from torch import Tensor

from noisygrad.families import kronecker, tridiagonal
from noisygrad.kernels.factorisation import NEAR_ROUNDING, unchecked
from support.families import close, kronecker_statistics, normal

SIZES = [1e-12, 1e-6, 1.0, 1e6, 1e12]
GAMMAS = [1e-10, 1e-4, 1.0]
ALLOWED = {torch.float64: 1e-6, torch.float32: 1e-3}
"""The relative error of P⁻¹."""


def factor(seed: int, size: int, rank: int, scale: float, dtype: torch.dtype) -> Tensor:
    rows = normal(seed, 4 * size, rank) @ normal(seed + 1, rank, size) + 0.5
    moment = (scale * rows.mT @ rows / len(rows)).to(dtype)
    return moment.tril() + moment.tril(-1).mT  # products need not be symmetric in their last digit


def exact_inverse(matrix: Tensor, ridge: mpmath.mpf) -> mpmath.matrix:
    """(matrix + ridge I)⁻¹ of the numbers as they are stored."""
    found = mpmath.matrix(matrix.double().tolist())
    return (found + ridge * mpmath.eye(len(matrix))) ** -1


def relative_error(roots: tuple[Tensor, Tensor], inverses: tuple[mpmath.matrix, mpmath.matrix]) -> float:
    """Of P⁻¹ = UUᵀ ⊗ VVᵀ in Frobenius norm, entry by entry."""
    found = [mpmath.matrix((root.double() @ root.double().mT).tolist()) for root in roots]
    difference = norm = mpmath.mpf(0)
    entries = [list(itertools.chain.from_iterable(m.tolist())) for m in (*found, *inverses)]
    for (x, s), (y, a) in itertools.product(
        zip(entries[0], entries[2], strict=True), zip(entries[1], entries[3], strict=True)
    ):
        difference += (x * y - s * a) ** 2
        norm += (s * a) ** 2
    return float(mpmath.sqrt(difference / norm))


def ridges(inputs: Tensor, outputs: Tensor, gamma: float) -> tuple[mpmath.mpf, mpmath.mpf]:
    """(√γ/π, π√γ) with π² = (tr A / dim A) / (tr S / dim S)."""
    a, s = (mpmath.fsum(m.double().diagonal().tolist()) / len(m) for m in (inputs, outputs))
    pi, root = mpmath.sqrt(a / s), mpmath.sqrt(gamma)
    return root / pi, pi * root


def nearness(matrix: Tensor, ridge: mpmath.mpf) -> tuple[float, float]:
    """The ridge over ε times the mean of the diagonal, and over ε times the Frobenius norm."""
    eps, double = torch.finfo(matrix.dtype).eps, matrix.double()
    return float(ridge / (eps * float(double.diagonal().mean()))), float(ridge / (eps * float(double.norm())))


def singular(kind: str, size: int, dtype: torch.dtype) -> Tensor:
    """A factor with directions that no input has; of integers, which no rounding has touched, or of rank 2."""
    whole = torch.arange(size, dtype=torch.float64)
    if kind == "constant":
        return torch.full((size, size), 1021.0, dtype=dtype)
    if kind == "twins":  # two equal columns, far larger than the others
        matrix = torch.diag(whole + 1)
        matrix[:2, :2] = 3.0 * 2**20 + 1
        return matrix.to(dtype)
    if kind == "random":
        return factor(size, size, 2, 1.0, dtype)
    return torch.outer(37 + 5 * whole, 37 + 5 * whole).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("rank", [5, 2], ids=["full rank", "rank deficient"])
@pytest.mark.parametrize("gamma", GAMMAS)
def test_factors_of_any_size_are_damped_by_equation_11(gamma: float, rank: int, dtype: torch.dtype) -> None:
    seen = {"above": 0, "below": 0}
    with mpmath.workdps(60):
        for size_a, size_s in itertools.product(SIZES, SIZES):
            inputs, outputs = factor(1, 5, rank, size_a, dtype), factor(7, 4, min(rank, 4), size_s, dtype)
            statistics = kronecker.Statistics(inputs, outputs)
            prior = kronecker.Prior.from_columns(torch.full((5,), gamma, dtype=dtype), 4)
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                precision = statistics.factorise(prior)
            ridge_s, ridge_a = ridges(inputs, outputs, float(torch.tensor(gamma, dtype=dtype)))
            near = [nearness(outputs, ridge_s), nearness(inputs, ridge_a)]
            inverses = exact_inverse(outputs, ridge_s), exact_inverse(inputs, ridge_a)
            error = relative_error((precision.left, precision.right), inverses)
            if all(to_mean >= 8 for to_mean, _ in near):
                seen["above"] += 1
                assert error < ALLOWED[dtype], (size_a, size_s, error)
                assert not told, (size_a, size_s, str(told[0].message))
            elif rank == 2 and any(to_mean < 1 for to_mean, _ in near):
                seen["below"] += 1
                assert told, (size_a, size_s, error)
            assert precision.logdet().isfinite()
    assert seen["above"] >= 15
    assert (seen["below"] > 0) == (rank == 2 and (dtype == torch.float32 or gamma == min(GAMMAS)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["constant", "integer", "twins", "random"])
@pytest.mark.parametrize("sizes", [(2, 3), (5, 4), (12, 2)], ids=str)
def test_near_rounding_damping_is_equation_11_or_is_reported(
    sizes: tuple[int, int], kind: str, dtype: torch.dtype
) -> None:
    """Ridges from a part of ε of the mean of the diagonal to where every algorithm is right."""
    inputs, outputs = (singular(kind, size, dtype) for size in sizes)
    equal = 0
    with mpmath.workdps(60):
        for times in (0.3, 1.1, 2.5, 9, 46, 150, 700, 3e3, 2e4, 2e5, 3e6, 4e7, 1e9):
            # Of every factor the ridge is √(γ / (tr A / dim A · tr S / dim S)) of the mean of its diagonal.
            means = [float(f.double().diagonal().mean()) for f in (inputs, outputs)]
            gamma = (times * torch.finfo(dtype).eps) ** 2 * math.prod(means)
            prior = kronecker.Prior.from_columns(torch.full((len(inputs),), gamma, dtype=dtype), len(outputs))
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                precision = kronecker.Statistics(inputs, outputs).factorise(prior)
            ridge_s, ridge_a = ridges(inputs, outputs, float(prior.inputs[0]))
            inverses = exact_inverse(outputs, ridge_s), exact_inverse(inputs, ridge_a)
            error = relative_error((precision.left, precision.right), inverses)
            equal += error < ALLOWED[dtype]
            assert told or error < ALLOWED[dtype], (times, error)
            least = 8 * max(sizes) if kind == "random" else 8  # its own rounding makes it indefinite
            assert not told or times < least, (times, str(told[0].message))
    assert equal >= 9


def test_a_confident_network_with_unscaled_inputs_has_the_damping_of_equation_11() -> None:
    """Eight thousand times less than where π was bounded."""
    inputs, outputs = factor(1, 5, 2, 1e6, torch.float64), factor(7, 4, 2, 1e-20, torch.float64)
    precision = kronecker.Statistics(inputs, outputs).factorise(
        kronecker.Prior.from_columns(torch.full((5,), 1e-6, dtype=torch.float64), 4)
    )
    pi = math.sqrt(inputs.diagonal().mean() / outputs.diagonal().mean())
    eye = torch.eye(5, dtype=torch.float64)
    expected = torch.kron(outputs + 1e-3 / pi * eye[:4, :4], inputs + pi * 1e-3 * eye)
    torch.testing.assert_close(precision.to_dense(), expected, rtol=1e-9, atol=1e-12 * float(expected.max()))


def test_nothing_is_told_where_a_factor_is_far_from_singular() -> None:
    """Then it does not matter that its damping is lost in rounding."""
    eye = torch.eye(6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        precision = kronecker.Statistics(1e12 * eye, eye).factorise(
            kronecker.Prior.from_columns(torch.full((6,), 1e-8), 6)
        )
    close(precision.solve(torch.ones(36)), torch.full((36,), 1e-12), 1e-5)


@pytest.mark.parametrize("size_a", [1e-12, 1e12])
def test_what_may_not_be_checked_is_damped_alike(size_a: float) -> None:
    """As where replicas are compiled."""
    inputs, outputs = factor(1, 5, 2, size_a, torch.float32), factor(7, 4, 2, 1 / size_a, torch.float32)
    prior = kronecker.Prior.from_columns(torch.full((5,), 1e-4), 4)
    seen = kronecker.Statistics(inputs, outputs).factorise(prior)
    with unchecked():
        found = kronecker.Statistics(inputs, outputs).factorise(prior)
    assert torch.equal(found.left, seen.left)
    assert torch.equal(found.right, seen.right)


def test_one_replica_near_rounding_leaves_the_others_digits() -> None:
    plain = kronecker_statistics(3, (2,), 4, 5).map(lambda tensor: tensor.float())
    spoilt = plain.clone()
    spoilt.inputs[1] = factor(1, 5, 2, 1e8, torch.float32)
    prior = kronecker.Prior.from_columns(torch.full((2, 5), 1e-3), 4)
    one, other = plain.factorise(prior), spoilt.factorise(prior)
    for name, tensor in one.tensors().items():
        assert torch.equal(tensor[0], other.tensors()[name][0]), name
    with mpmath.workdps(60):
        ridge_s, ridge_a = ridges(spoilt.inputs[1], spoilt.outputs[1], float(torch.tensor(1e-3)))
        assert nearness(spoilt.inputs[1], ridge_a)[1] < NEAR_ROUNDING[torch.float32]  # float64 was needed
        inverses = exact_inverse(spoilt.outputs[1], ridge_s), exact_inverse(spoilt.inputs[1], ridge_a)
        assert relative_error((other.left[1], other.right[1]), inverses) < 1e-3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_a_chains_layers_are_damped_as_kronecker_blocks_are(dtype: torch.dtype) -> None:
    inputs = (factor(1, 5, 2, 1e10, dtype), factor(3, 4, 2, 1e-12, dtype))
    outputs = (factor(5, 4, 2, 1e-12, dtype), factor(7, 3, 2, 1e12, dtype))
    crosses = torch.zeros(5, 4, dtype=dtype), torch.zeros(4, 3, dtype=dtype)
    chain = tridiagonal.Statistics(inputs, outputs, (crosses[0],), (crosses[1],))
    columns = [torch.full((n,), 1e-4, dtype=dtype) for n in (5, 4)]
    precision = chain.factorise(tridiagonal.Prior.from_columns(columns, [4, 3]))
    for i, prior in enumerate(columns):
        alone = kronecker.Statistics(inputs[i], outputs[i]).factorise(
            kronecker.Prior.from_columns(prior, len(outputs[i]))
        )
        for found, expected in ((precision.left[i], alone.left), (precision.right[i], alone.right)):
            inverse = expected @ expected.mT
            assert (found @ found.mT - inverse).norm() < 1e-5 * inverse.norm()
