"""Damping means what it says, and near-singular matrices are repaired or refused, never turned into NaN."""

from __future__ import annotations

import math
import pickle
import warnings
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from noisygrad.families import dense, diagonal, kronecker, tridiagonal
from noisygrad.kernels.factorisation import FactorisationError, condition_number, inverse_root, symmetric_eigh
from noisygrad.kernels.products import second_moment
from support.families import (
    CASES,
    chain_moments,
    chain_prior,
    chain_statistics,
    close,
    columns,
    few,
    kronecker_statistics,
    layer_moments,
    normal,
    positive,
    seeds,
)

SHAPES = [(3, 4), (4, 3), (2, 5)]


def kron(left: Tensor, right: Tensor) -> Tensor:
    return torch.kron(left.contiguous(), right.contiguous())


# What is measured


@few
@given(seed=seeds, p=st.integers(0, 3), q=st.integers(0, 3), borders=st.tuples(st.booleans(), st.booleans()))
def test_second_moment_is_that_of_rows_with_a_one(seed: int, p: int, q: int, borders: tuple[bool, bool]) -> None:
    left = normal(seed, 2, 3, p, 4).mT  # not contiguous, as unfolded convolutions are
    right = normal(seed + 1, 2, 3, 4, q)
    ones = torch.ones(2, 3, 4, 1, dtype=torch.float64)
    rows = [torch.cat([x, ones], -1) if c else x for x, c in zip((left, right), borders, strict=True)]
    expected = torch.einsum("nbtp,nbtq->npq", *rows) / 12
    torch.testing.assert_close(second_moment(left, right, *borders), expected, rtol=1e-12, atol=1e-12)


def test_one_datum_without_sharing_has_the_exact_fisher() -> None:
    a, g = normal(1, 1, 1, 3), normal(2, 1, 1, 2)
    gradient = torch.outer(g[0, 0], torch.cat([a[0, 0], torch.ones(1).double()])).flatten()
    statistics = layer_moments(a, g, constant=True)
    close(kron(statistics.outputs, statistics.inputs), torch.outer(gradient, gradient))
    close(dense.Statistics.measure(gradient[None]).fisher, torch.outer(gradient, gradient))


def test_positions_are_summed_in_the_outputs_and_averaged_in_the_inputs() -> None:
    a, g = normal(1, 5, 4, 3), normal(2, 5, 4, 2)
    statistics = layer_moments(a, g, constant=False)
    close(statistics.inputs, torch.einsum("bti,btj->ij", a, a) / 20)
    close(statistics.outputs, torch.einsum("bti,btj->ij", g, g) / 5)
    # A chain of a layer with itself: the coupling is counted as the layer is.
    chain = chain_moments([a, a], [g, g], [False, False])
    close(chain.cross_inputs[0], statistics.inputs)
    close(chain.cross_outputs[0], statistics.outputs)


def test_uncoupled_layers_make_a_block_diagonal_precision() -> None:
    a, g = [normal(1, 3, 4, 2), normal(2, 3, 1, 3)], [normal(3, 3, 4, 2), normal(4, 3, 1, 2)]
    chain = chain_moments(a, g, [True, False])
    matrix = chain.factorise(tridiagonal.Prior.from_columns([torch.ones(3).double()] * 2, [2, 2])).to_dense()
    assert (matrix[:6, 6:] == 0).all()
    for block, layer in ((matrix[:6, :6], 0), (matrix[6:, 6:], 1)):
        alone = kronecker.Statistics(chain.inputs[layer], chain.outputs[layer])
        close(block, alone.factorise(kronecker.Prior.from_columns(torch.ones(3).double(), 2)).to_dense())


# What damping does


@pytest.mark.parametrize("split", [1.0, 0.01, 300.0])
def test_isotropic_damping_is_equation_11_however_the_prior_is_split(split: float) -> None:
    statistics, gamma = kronecker_statistics(3, (), 4, 5), 0.07
    prior = kronecker.Prior(gamma * split * torch.ones(5).double(), torch.ones(4).double() / split, True)
    a, s = statistics.inputs, statistics.outputs
    pi = math.sqrt((a.trace() / 5) / (s.trace() / 4))
    eye = torch.eye(5, dtype=torch.float64)
    expected = kron(s + math.sqrt(gamma) / pi * eye[:4, :4], a + pi * math.sqrt(gamma) * eye)
    close(statistics.factorise(prior).to_dense(), expected)
    matrix_prior = kronecker.Prior(torch.diag(prior.inputs), torch.diag(prior.outputs), diagonal=False)
    close(statistics.factorise(matrix_prior).to_dense(), expected)


@pytest.mark.parametrize("mode", ["factored", "exact"])
def test_extra_damping_of_an_isotropic_prior_adds_to_it(mode: str) -> None:
    statistics, ones = kronecker_statistics(3, (2,), 4, 5), torch.ones(2, 5).double()
    apart = statistics.factorise(kronecker.Prior.from_columns(ones, 4).scaled(0.02), 0.3, mode)
    close(apart.to_dense(), statistics.factorise(kronecker.Prior.from_columns(0.32 * ones, 4), 0.0, mode).to_dense())
    improper = statistics.factorise(kronecker.Prior.from_columns(ones, 4).scaled(0.0), 0.3, mode)
    close(improper.to_dense(), statistics.factorise(kronecker.Prior.from_columns(0.3 * ones, 4), 0.0, mode).to_dense())


def test_exact_damping_adds_exactly() -> None:
    statistics, prior = kronecker_statistics(3, (), 4, 5), kronecker.Prior.from_columns(positive(4, 5), 4)
    fisher, gamma = kron(statistics.outputs, statistics.inputs), torch.diag(prior.inputs.repeat(4))
    eye = torch.eye(20, dtype=torch.float64)
    close(statistics.factorise(prior, 0.2, "exact").to_dense(), fisher + gamma + 0.2 * eye)
    rows = normal(8, 3, 20)
    full = dense.Statistics.measure(rows)
    close(
        full.factorise(dense.Prior(prior.inputs.repeat(4), diagonal=True), 0.2).to_dense(),
        full.fisher + gamma + 0.2 * eye,
    )
    flat = diagonal.Statistics(rows.square().mean(-2)).factorise(diagonal.Prior(prior.inputs.repeat(4)), 0.2)
    close(flat.to_dense(), torch.diag(full.fisher.diagonal()) + gamma + 0.2 * eye)


def test_null_directions_keep_the_prior_variance_under_exact_damping_only() -> None:
    statistics = kronecker_statistics(3, (), 4, 5)
    gamma = 0.05
    prior = kronecker.Prior.from_columns(gamma * torch.ones(5).double(), 4)
    null = torch.linalg.eigh(statistics.inputs).eigenvectors[:, 0]
    direction = torch.outer(normal(5, 4), null).flatten()
    direction = direction / direction.norm()
    close(statistics.factorise(prior, mode="exact").solve(direction), direction / gamma)
    factored = statistics.factorise(prior)
    assert direction @ factored.solve(direction) < 0.8 / gamma


@pytest.mark.parametrize(("outputs", "inputs"), [(1, 5), (4, 1), (1, 1)])
@pytest.mark.parametrize("fitted", [False, True])
def test_a_scalar_factor_is_damped_exactly(outputs: int, inputs: int, fitted: bool) -> None:
    prior = kronecker.Prior.from_columns(positive(2, inputs), outputs)
    if fitted:
        prior = kronecker_statistics(9, (), outputs, inputs).factorise(prior).as_prior().scaled(0.5)
    statistics = kronecker_statistics(3, (), outputs, inputs)
    fisher = kron(statistics.outputs, statistics.inputs)
    precision = statistics.factorise(prior, 0.3)
    gamma = columns(prior.times, outputs * inputs, ())
    close(precision.to_dense(), fisher + gamma + 0.3 * torch.eye(outputs * inputs, dtype=torch.float64))
    close(statistics.factorise(prior, 0.3, "exact").to_dense(), precision.to_dense())


@pytest.mark.parametrize("shapes", [SHAPES, [(3, 4), (3, 3), (1, 4)], [(3, 4), (2, 1)]], ids=str)
@pytest.mark.parametrize("fitted", [False, True])
def test_tridiagonal_blocks_are_the_damped_kronecker_blocks(shapes: list[tuple[int, int]], fitted: bool) -> None:
    statistics, prior = chain_statistics(3, (), shapes), chain_prior(4, (), shapes)
    if fitted:
        prior = chain_statistics(70, (), shapes).factorise(prior).as_prior()
    precision = statistics.factorise(prior)
    matrix = precision.to_dense()
    ends = torch.tensor([0] + [m * n for m, n in shapes]).cumsum(0).tolist()
    cuts = [slice(*pair) for pair in pairwise(ends)]
    for i, cut in enumerate(cuts):
        layer = kronecker.Statistics(statistics.inputs[i], statistics.outputs[i])
        close(matrix[cut, cut], layer.factorise(prior.layers()[i]).to_dense())
    for i, (cut, after) in enumerate(pairwise(cuts)):
        coupling = kron(precision.cross_outputs[i], precision.cross_inputs[i])
        close(matrix[cut, after], coupling)
        if not fitted:  # undamped: exactly the Fisher's, also next to a scalar factor
            close(coupling, kron(statistics.cross_outputs[i], statistics.cross_inputs[i]))
    inverse = torch.linalg.inv(matrix)
    if len(cuts) == 3:
        assert inverse[cuts[0], cuts[2]].abs().max() < 1e-9 * inverse.abs().max()
        assert matrix[cuts[0], cuts[2]].abs().max() > 1e-6


def test_tridiagonal_refuses_exact_damping() -> None:
    with pytest.raises(ValueError, match="NoisyKFAC"):
        chain_statistics(1, (), SHAPES).factorise(chain_prior(1, (), SHAPES), mode="exact")


@pytest.mark.parametrize("name", ["kronecker-factored", "kronecker-exact", "tridiagonal-scalar-output"])
@pytest.mark.parametrize("fitted", [False, True])
def test_scaling_fisher_and_prior_together_scales_the_precision(name: str, fitted: bool) -> None:
    """λ and N enter as one factor: the posterior may not depend on how the units are chosen."""
    prior, _ = CASES[name](5, (2,), fitted, 0.0)
    mode, factor = "exact" if "exact" in name else "factored", 0.037
    if isinstance(prior, tridiagonal.Prior):
        chain = chain_statistics(5, (2,), [(3, 4), (3, 3), (1, 4)])
        crosses = tuple(cross * factor for cross in chain.cross_outputs)
        outputs = tuple(output * factor for output in chain.outputs)
        scaled = tridiagonal.Statistics(chain.inputs, outputs, chain.cross_inputs, crosses).factorise(
            prior.scaled(factor)
        )
        close(scaled.to_dense(), factor * chain.factorise(prior).to_dense())
    else:
        layer = kronecker_statistics(5, (2,), 4, 5)
        scaled = kronecker.Statistics(layer.inputs, layer.outputs * factor).factorise(prior.scaled(factor), 0.0, mode)
        close(scaled.to_dense(), factor * layer.factorise(prior, 0.0, mode).to_dense())


@pytest.mark.parametrize("dead", ["inputs", "outputs", "both"])
@pytest.mark.parametrize("mode", ["factored", "exact"])
def test_a_dead_layer_has_the_prior(dead: str, mode: str) -> None:
    statistics = kronecker_statistics(5, (2,), 4, 5)
    if dead != "outputs":
        statistics.inputs[0] = 0.0
    if dead != "inputs":
        statistics.outputs[0] = 0.0
    prior = kronecker.Prior.from_columns(positive(6, 2, 5), 4)
    precision = statistics.factorise(prior, 0.0, mode)
    close(precision.to_dense()[0], columns(prior.times, 20, (2,))[0])
    assert (precision.to_dense()[1] - columns(prior.times, 20, (2,))[1]).norm() > 1e-2


def test_an_improper_prior_needs_damping() -> None:
    for mode in ("factored", "exact"):
        statistics, prior = kronecker_statistics(5, (), 4, 5), kronecker.Prior.from_columns(torch.zeros(5).double(), 4)
        assert torch.isfinite(statistics.factorise(prior, 0.1, mode).logdet())
        with pytest.raises(FactorisationError, match="prior_variance"):
            statistics.factorise(prior, 0.0, mode)
    with pytest.raises(FactorisationError):
        diagonal.Statistics(torch.zeros(3)).factorise(diagonal.Prior(torch.zeros(3)))


# What happens to bad matrices


def nearly_singular(dtype: torch.dtype, damping: float) -> Tensor:
    """Duplicate and constant columns, as in the naval data set, with less damping than float32 resolves."""
    x = normal(1, 400, 6)
    x = torch.cat([x, x, 30.0 * torch.ones(400, 3).double()], dim=-1).to(dtype)
    return x.mT @ x / 400 + damping * torch.eye(15, dtype=dtype)


def test_float32_rounding_is_repaired_with_a_warning() -> None:
    matrix = nearly_singular(torch.float32, 1e-7)
    with pytest.warns(RuntimeWarning, match="1e-07"):
        root, logdet = inverse_root(torch.stack([torch.eye(15), matrix]), 1e-7)
    assert torch.isfinite(root).all()
    assert torch.equal(root[0], torch.eye(15))
    assert root.dtype == logdet.dtype == torch.float32
    variances = torch.linalg.eigvalsh(root[1].double() @ root[1].double().mT)
    assert variances.max() <= 1.01e7
    expected = torch.logdet(nearly_singular(torch.float64, 1e-7))
    assert abs(float(logdet[1]) - float(expected)) < 0.2 * abs(float(expected))


@pytest.mark.parametrize("family", ["kronecker", "dense", "tridiagonal"])
def test_families_survive_near_singular_float32(family: str) -> None:
    matrix, columns_ = nearly_singular(torch.float32, 0.0), torch.full((15,), 1e-7)
    eye = torch.eye(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        if family == "kronecker":
            prior = kronecker.Prior.from_columns(columns_, 1)
            precision = kronecker.Statistics(matrix, torch.ones(1, 1)).factorise(prior)
        elif family == "dense":
            precision = dense.Statistics(matrix).factorise(dense.Prior(columns_, diagonal=True))
        else:
            prior = tridiagonal.Prior.from_columns([columns_, columns_], [2, 2])
            # Identical inputs in both layers: every canonical correlation is 1 but for the damping.
            blocks = tridiagonal.Statistics((matrix, matrix), (eye, eye), (matrix,), (eye,))
            precision = blocks.factorise(prior)
        again = precision.as_prior()
        size = again.times(torch.zeros(60 if family == "tridiagonal" else 15)).shape[-1]
    noise = torch.eye(size)
    for result in (precision.sample(noise), precision.solve(noise), precision.logdet(), precision.trace(again)):
        assert torch.isfinite(result).all()


def test_a_pivot_below_the_damping_is_rounding_even_if_cholesky_succeeds() -> None:
    with pytest.warns(RuntimeWarning, match="1e-06"):
        root, logdet = inverse_root(torch.diag(torch.tensor([1.0, 1e-9])), 1e-6)
    close(root @ root.mT, torch.diag(torch.tensor([1.0, 1e6])), 1e-5)
    close(logdet, torch.tensor(1e-6).log(), 1e-5)


@pytest.mark.parametrize("as_matrix", [False, True], ids=["columns", "matrix"])
def test_a_dense_pivot_below_prior_and_damping_is_rounding(as_matrix: bool) -> None:
    """Prior and damping guarantee it together: the repair lifts what is below their sum."""
    values = torch.full((2,), 1e-6)
    prior = dense.Prior(torch.diag(values), diagonal=False) if as_matrix else dense.Prior(values, diagonal=True)
    statistics = dense.Statistics(torch.diag(torch.tensor([1.0, -9.7e-5])))  # as far below 0 as rounding may lead
    with pytest.warns(RuntimeWarning, match="1e-04"):
        precision = statistics.factorise(prior, 1e-4)
    assert precision.sample(torch.eye(2)).square().sum(0)[1] <= 1.01e4


def test_factors_of_very_different_size_stay_finite() -> None:
    """π, which balances them, is bounded: times a strong prior it would overflow."""
    statistics = kronecker.Statistics(torch.eye(3) * 1e37, torch.eye(2) * 1e-37)
    precision = statistics.factorise(kronecker.Prior.from_columns(torch.full((3,), 1e5), 2))
    for result in (precision.sample(torch.eye(6)), precision.solve(torch.eye(6)), precision.logdet()):
        assert torch.isfinite(result).all()


def test_layers_that_are_perfectly_correlated_after_rounding_stay_finite() -> None:
    eye = torch.eye(3)
    prior = tridiagonal.Prior.from_columns([torch.full((3,), 1e-20)] * 2, [3, 3])
    precision = tridiagonal.Statistics((eye, eye), (eye, eye), (eye,), (eye,)).factorise(prior)
    for result in (precision.sample(torch.eye(18)), precision.solve(torch.eye(18)), precision.logdet()):
        assert torch.isfinite(result).all()


def test_singular_without_damping_raises_and_says_so() -> None:
    matrix = torch.diag(torch.tensor([1.0, 0.0, 2.0]).double())
    with pytest.raises(FactorisationError, match=r"3×3.*condition number inf.*damping 0") as caught:
        inverse_root(matrix, 0.0)
    assert caught.value.condition == math.inf
    assert pickle.loads(pickle.dumps(caught.value)).condition == math.inf
    with pytest.raises(FactorisationError):
        inverse_root(-torch.eye(2), 0.0)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_bad_entries_raise_in_every_family(poison: float) -> None:
    bad = torch.eye(3)
    bad[1, 1] = poison
    ones, eye = torch.ones(3), torch.eye(3)
    attempts = [
        lambda: inverse_root(torch.stack([eye, bad]), 1e-3),
        lambda: symmetric_eigh(bad),
        lambda: diagonal.Statistics(bad.diagonal()).factorise(diagonal.Prior(ones)),
        lambda: dense.Statistics(bad).factorise(dense.Prior(ones, diagonal=True)),
        lambda: kronecker.Statistics(bad, eye).factorise(kronecker.Prior.from_columns(ones, 3)),
        lambda: kronecker.Statistics(eye, bad).factorise(kronecker.Prior.from_columns(ones, 3)),
        lambda: kronecker.Statistics(eye, bad).factorise(kronecker.Prior.from_columns(ones, 3), mode="exact"),
        lambda: kronecker.Statistics(eye, bad[1:2, 1:2]).factorise(kronecker.Prior.from_columns(ones, 1)),
        lambda: tridiagonal.Statistics((eye, eye), (eye, eye), (bad,), (eye,)).factorise(
            tridiagonal.Prior.from_columns([ones, ones], [3, 3])
        ),
    ]
    for attempt in attempts:
        with pytest.raises(FactorisationError, match="NaN") as caught:
            attempt()
        assert math.isnan(caught.value.condition)


def test_inverse_root_and_eigh_of_a_good_matrix() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        matrix = nearly_singular(torch.float64, 1e-3)
        root, logdet = inverse_root(matrix.expand(2, 15, 15), torch.tensor([1e-3, 0.0]).double())
    close(root @ root.mT @ matrix, torch.eye(15).double().expand(2, 15, 15), 1e-8)
    close(logdet, torch.logdet(matrix).expand(2))
    values, vectors = symmetric_eigh(nearly_singular(torch.float64, 0.0))
    assert (values >= 0).all()
    close((vectors * values) @ vectors.mT, nearly_singular(torch.float64, 0.0))


def test_condition_number() -> None:
    stack = torch.stack([torch.diag(torch.tensor([4.0, 2.0])), torch.zeros(2, 2), torch.full((2, 2), math.nan)])
    assert condition_number(stack)[0] == 2.0
    assert condition_number(stack)[1] == math.inf
    assert condition_number(stack)[2].isnan()
