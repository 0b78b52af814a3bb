"""Every method of every family is one identity: each is checked against the dense matrix."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from noisygrad.families import base, dense, diagonal, eigen, kronecker
from noisygrad.kernels.triangles import times_large_lower
from support.eigen_cases import PRIORS
from support.eigen_cases import fitted as eigen_fitted
from support.families import (
    CASES,
    chain_prior,
    chain_statistics,
    close,
    columns,
    few,
    for_every_case,
    for_every_prior_like_case,
    kronecker_statistics,
    normal,
    positive,
    seeds,
)


@for_every_case
@few
@given(seed=seeds, damping=st.sampled_from([0.0, 0.3]))
def test_precision_agrees_with_its_dense_matrix(
    name: str, batch: tuple[int, ...], fitted: bool, seed: int, damping: float
) -> None:
    prior, precision = CASES[name](seed, batch, fitted, damping)
    matrix = precision.to_dense()
    size = matrix.shape[-1]
    inverse = torch.linalg.inv(matrix)
    vector = normal(seed + 3, *batch, size)
    close(matrix, matrix.mT)
    close(columns(precision.solve, size, batch), inverse)
    close(precision.solve((matrix @ vector[..., None])[..., 0]), vector, 1e-9)
    root = columns(precision.sample, size, batch)
    close(root @ root.mT, inverse)
    close(precision.quad(vector), torch.einsum("...i,...ij,...j", vector, matrix, vector))
    close(precision.logdet(), torch.logdet(matrix))
    gamma = columns(prior.times, size, batch)
    close(precision.trace(prior), torch.einsum("...ij,...ji", gamma, inverse))


@for_every_case
@few
@given(seed=seeds)
def test_prior_agrees_with_its_dense_matrix(name: str, batch: tuple[int, ...], fitted: bool, seed: int) -> None:
    prior, precision = CASES[name](seed, batch, fitted, 0.0)
    size = precision.to_dense().shape[-1]
    gamma = columns(prior.times, size, batch)
    vector = normal(seed + 4, *batch, size)
    close(gamma, gamma.mT)
    close(prior.quad(vector), torch.einsum("...i,...ij,...j", vector, gamma, vector))
    close(prior.logdet(), torch.logdet(gamma))
    close(columns(prior.scaled(2.5).times, size, batch), 2.5 * gamma)


@for_every_prior_like_case
def test_as_prior_is_the_same_matrix(name: str, batch: tuple[int, ...], fitted: bool) -> None:
    _, precision = CASES[name](1, batch, fitted, 0.0)
    matrix = precision.to_dense()
    close(columns(precision.as_prior().times, matrix.shape[-1], batch), matrix)


def test_exact_as_prior() -> None:
    prior, precision = CASES["kronecker-exact"](1, (2,), False, 0.0)
    zero = kronecker.Statistics(torch.zeros(2, 5, 5).double(), torch.zeros(2, 4, 4).double())
    unchanged = zero.factorise(prior, mode="exact").as_prior()
    close(columns(unchanged.times, 20, (2,)), columns(prior.times, 20, (2,)))
    # Otherwise it is an approximation, but one that keeps the mean of the whitened spectrum.
    white = precision.as_prior()
    recovered = precision.left.mT @ white.outputs @ precision.left
    close(recovered.diagonal(dim1=-2, dim2=-1), precision.spectrum.mean(-1))
    recovered = precision.right.mT @ white.inputs @ precision.right
    share = precision.spectrum.mean(-2) / precision.spectrum.mean((-2, -1))[..., None]
    close(recovered.diagonal(dim1=-2, dim2=-1), share)


def test_a_draw_does_not_depend_on_the_signs_of_eigenvectors() -> None:
    """Those follow the last digit; the same noise must give the same weights on another machine."""
    _, precision = CASES["kronecker-exact"](1, (2,), False, 0.1)
    noise = normal(2, 2, precision.to_dense().shape[-1])
    flip = torch.ones(precision.left.shape[-1]).double().index_fill(0, torch.tensor([0, 2]), -1.0)
    other = dataclasses.replace(precision, left=precision.left * flip, left_basis=precision.left_basis * flip)
    close(other.solve(noise), precision.solve(noise))
    close(other.sample(noise), precision.sample(noise))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("fitted", [False, True])
def test_batched_equals_a_loop(name: str, fitted: bool) -> None:
    prior, precision = CASES[name](5, (3,), fitted, 0.1)
    noise = normal(6, 3, precision.to_dense().shape[-1])
    together = precision.sample(noise), precision.logdet(), precision.trace(prior)
    for i in range(3):
        alone = precision.map(lambda tensor, i=i: tensor[i])
        one = prior.map(lambda tensor, i=i: tensor[i])
        for batched, single in zip(together, (alone.sample(noise[i]), alone.logdet(), alone.trace(one)), strict=True):
            close(batched[i], single, 1e-12)


@pytest.mark.parametrize("name", ["kronecker-factored", "kronecker-exact", "kronecker-scalar-output"])
def test_factorising_a_batch_equals_factorising_each(name: str) -> None:
    mode = "exact" if "exact" in name else "factored"
    statistics = kronecker_statistics(3, (3,), 1 if "scalar" in name else 4, 5)
    prior = kronecker.Prior.from_columns(positive(4, 3, 5), statistics.outputs.shape[-1])
    together = statistics.factorise(prior, 0.1, mode).to_dense()
    for i in range(3):
        one = statistics.map(lambda tensor, i=i: tensor[i]).factorise(prior.map(lambda t, i=i: t[i]), 0.1, mode)
        close(together[i], one.to_dense(), 1e-12)


def test_factorising_a_batched_chain_equals_factorising_each() -> None:
    shapes = [(3, 4), (2, 3), (1, 4)]
    statistics, prior = chain_statistics(3, (3,), shapes), chain_prior(4, (3,), shapes)
    together = statistics.factorise(prior, 0.1).to_dense()
    for i in range(3):
        one = statistics.map(lambda tensor, i=i: tensor[i]).factorise(prior.map(lambda t, i=i: t[i]), 0.1)
        close(together[i], one.to_dense(), 1e-12)


@pytest.mark.parametrize("name", ["kronecker-factored", "tridiagonal-3"])
def test_without_terms_still_samples_and_says_what_it_cannot(name: str) -> None:
    prior, precision = CASES[name](1, (2,), False, 0.0)
    noise = normal(2, 2, precision.to_dense().shape[-1])
    stripped = precision.drop_terms()
    assert len(stripped.tensors()) < len(precision.tensors())
    close(stripped.sample(noise), precision.sample(noise))
    close(stripped.solve(noise), precision.solve(noise))
    close(stripped.trace(prior), precision.trace(prior))
    for unavailable in (lambda: stripped.quad(noise), stripped.to_dense, stripped.as_prior):
        with pytest.raises(RuntimeError, match="drop_terms"):
            unavailable()


def test_a_prior_of_another_family_is_refused() -> None:
    _, precision = CASES["kronecker-factored"](1, (), False, 0.0)
    with pytest.raises(TypeError, match="Kronecker"):
        precision.trace(dense.Prior(torch.ones(20), diagonal=True))


def test_fitted_chain_prior_forgets_its_factors_when_overwritten() -> None:
    prior, other = (CASES["tridiagonal-2"](seed, (), False, 0.0)[1].as_prior().clone() for seed in (1, 2))
    vector = normal(2, 23)
    before = prior.times(vector)
    prior.copy_(other)
    close(prior.times(vector), other.times(vector))
    close(prior.logdet(), other.logdet())
    assert (prior.times(vector) - before).norm() > 1e-3


def test_products_with_a_triangle_leave_out_only_zeros() -> None:
    lower = torch.randn(2, 600, 600, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).tril()
    matrix = torch.randn(2, 5, 600, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(times_large_lower(matrix, lower), matrix @ lower)


def test_a_floor_is_added_or_refused() -> None:
    """Moments of other names than the base class knows have to say how it is done."""

    @dataclasses.dataclass
    class Squares(base.Statistics):
        squares: Tensor

        def determined(self, precision: base.Precision) -> NoReturn:
            raise NotImplementedError

        def factorise(self, prior: base.Prior, damping: float = 0.0, mode: base.DampingMode = "factored") -> NoReturn:
            raise NotImplementedError

    with pytest.raises(TypeError, match="has squares, of which none is called fisher or outputs: define add_floor_"):
        Squares(torch.ones(3)).add_floor_(0.1)


# ---------------------------------------------------------------- how much the data determine


def dense_fisher(statistics: Any) -> Tensor:
    """F̄ of a block without batch dimensions, from its definition."""
    if isinstance(statistics, diagonal.Statistics):
        return torch.diag(statistics.fisher)
    if isinstance(statistics, dense.Statistics):
        return statistics.fisher
    if isinstance(statistics, eigen.Statistics):
        dual = torch.linalg.inv(torch.kron(statistics.left, statistics.right))
        return dual.mT @ torch.diag(statistics.fisher.flatten()) @ dual
    if isinstance(statistics, kronecker.Statistics):
        return torch.kron(statistics.outputs.contiguous(), statistics.inputs.contiguous())
    own = [
        torch.kron(s.contiguous(), a.contiguous()) for s, a in zip(statistics.outputs, statistics.inputs, strict=True)
    ]
    found, start = torch.block_diag(*own), 0
    for block, after, s, a in zip(own, own[1:], statistics.cross_outputs, statistics.cross_inputs, strict=False):
        end = start + len(block)
        found[start:end, end : end + len(after)] = torch.kron(s.contiguous(), a.contiguous())
        found[end : end + len(after), start:end] = torch.kron(s.contiguous(), a.contiguous()).mT
        start = end
    return found


SHAPES = [(3, 4), (4, 3), (2, 5)]
DETERMINED: dict[str, Callable[[int, tuple[int, ...]], tuple[Any, Any]]] = {
    "diagonal": lambda seed, batch: (
        diagonal.Prior(positive(seed, *batch, 7)),
        diagonal.Statistics(normal(seed + 1, *batch, 4, 7).square().mean(-2)),
    ),
    "dense": lambda seed, batch: (
        dense.Prior(positive(seed, *batch, 7), diagonal=True),
        dense.Statistics.measure(normal(seed + 1, *batch, 4, 7)),
    ),
    "kronecker": lambda seed, batch: (
        kronecker.Prior.from_columns(positive(seed, *batch, 5), 4),
        kronecker_statistics(seed + 7, batch, 4, 5),
    ),
    "tridiagonal": lambda seed, batch: (chain_prior(seed, batch, SHAPES), chain_statistics(seed, batch, SHAPES)),
    **{f"eigen-{kind}": partial(eigen_fitted, kind) for kind in PRIORS},
}


@pytest.mark.parametrize("mode", ["factored", "exact"])
@pytest.mark.parametrize("family", DETERMINED)
@pytest.mark.parametrize("batch", [(), (3,)], ids=str)
@few
@given(seed=seeds)
def test_determined_is_the_trace_of_the_fisher_by_the_covariance(
    mode: base.DampingMode, family: str, batch: tuple[int, ...], seed: int
) -> None:
    """Of all weights at most, and of none without a Fisher; as it is with inverses and without terms."""
    if mode == "exact" and family == "tridiagonal":
        pytest.skip("a chain is never damped exactly")
    prior, statistics = DETERMINED[family](seed, batch)
    precision = statistics.factorise(prior, 0.0, mode)
    matrices = precision.to_dense()
    each = [statistics.map(lambda tensor, i=i: tensor[i]) for i in range(batch[0])] if batch else [statistics]
    flat = matrices.reshape(-1, *matrices.shape[-2:])
    traces = [torch.linalg.solve(p, dense_fisher(one)).trace() for p, one in zip(flat, each, strict=True)]
    expected = torch.stack(traces).reshape(batch)
    for same in (precision, precision.drop_terms(), precision.drop_terms().with_inverses()):
        close(statistics.determined(same), expected, 1e-8)
    assert (expected < matrices.shape[-1]).all()
    nothing = statistics.map_averages(torch.zeros_like)
    assert (nothing.determined(nothing.factorise(prior, 0.0, mode)).abs() < 1e-12).all()


@pytest.mark.parametrize("family", DETERMINED)
def test_a_share_of_the_identity_is_of_each_moment(family: str) -> None:
    """Couplings between layers only lose; what is not an average stays; nothing is changed in place."""
    _, statistics = DETERMINED[family](3, (2,))
    before = statistics.clone().tensors()
    mixed = statistics.with_identity(torch.tensor(0.3, dtype=torch.float64)).tensors()
    for name, tensor in statistics.tensors().items():
        assert torch.equal(tensor, before[name])
        expected = tensor
        if family.startswith("eigen") and name == "fisher":
            basis = torch.stack([torch.kron(a, b) for a, b in zip(statistics.left, statistics.right, strict=True)])
            lengths = basis.square().sum(-2).unflatten(-1, tensor.shape[-2:])
            expected = 0.7 * tensor + 0.3 * lengths
        elif name in {"left", "right"} or (family.startswith("eigen") and name != "fisher"):
            expected = tensor
        elif name.startswith("cross"):
            expected = 0.7 * tensor
        elif family == "diagonal":
            expected = 0.7 * tensor + 0.3
        else:
            expected = 0.7 * tensor + 0.3 * torch.eye(tensor.shape[-1], dtype=torch.float64)
        close(mixed[name], expected)


def test_averages_with_a_layer_that_was_not_used_yet_are_of_the_other() -> None:
    """A moment of inputs that is 0 has seen nothing; one that has is averaged, and outputs always are."""
    one, other = kronecker_statistics(1, (), 4, 5), kronecker_statistics(2, (), 4, 5)
    nothing = one.map(torch.zeros_like)
    for first, second, inputs in (
        (one, nothing, one.inputs),
        (nothing, one, one.inputs),
        (one, other, 0.25 * one.inputs + 0.75 * other.inputs),
        (nothing, nothing, nothing.inputs),
    ):
        found = first.clone().average_with_(second.clone(), 0.25)
        close(found.outputs, 0.25 * first.outputs + 0.75 * second.outputs)
        close(found.inputs, inputs)
