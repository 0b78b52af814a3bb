"""The eigenvalue-corrected family: every method is one identity, checked against the dense matrix."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import MultivariateNormal, kl_divergence

from noisygrad.families import dense, eigen, kl, kronecker
from noisygrad.kernels import factorisation, squared_products
from noisygrad.kernels.factorisation import FactorisationError, unchecked
from support.eigen_cases import (
    BATCHES,
    BETWEEN_TIES,
    CLOSE_BASES,
    IN,
    OUT,
    PRIORS,
    dense_prior,
    examples,
    fitted,
    make_prior,
    measure,
    one_basis,
    per_example,
    start,
)
from support.families import close, columns, few, layer_moments, normal, positive, seeds

for_every_prior = pytest.mark.parametrize("kind", PRIORS)
for_every_batch = pytest.mark.parametrize("batch", BATCHES, ids=str)


@for_every_prior
@for_every_batch
@pytest.mark.parametrize("shape", [(4, 5), (1, 5), (4, 1), (1, 1)], ids=str)
@few
@given(seed=seeds, damping=st.sampled_from([0.0, 0.3]))
def test_precision_agrees_with_its_dense_matrix(
    kind: str, batch: tuple[int, ...], shape: tuple[int, int], seed: int, damping: float
) -> None:
    prior, statistics = fitted(kind, seed, batch, *shape)
    precision = statistics.factorise(prior, damping)
    matrix = precision.to_dense()
    size = matrix.shape[-1]
    inverse = torch.linalg.inv(matrix)
    vector = normal(seed + 3, *batch, size)
    close(matrix, matrix.mT)
    close(columns(precision.solve, size, batch), inverse)
    root = columns(precision.sample, size, batch)
    close(root @ root.mT, inverse)
    close(precision.covariance(vector), inverse)
    close(precision.quad(vector), torch.einsum("...i,...ij,...j", vector, matrix, vector))
    several = normal(seed + 4, 3, *batch, size)
    close(precision.quad(several)[1], precision.quad(several[1]))
    close(precision.logdet(), torch.logdet(matrix))
    close(precision.trace(prior), torch.einsum("...ij,...ji", dense_prior(prior, batch), inverse))
    other = make_prior("diagonal", seed + 5, batch, *shape)
    close(precision.trace(other), torch.einsum("...ij,...ji", dense_prior(other, batch), inverse))


@for_every_prior
@for_every_batch
@few
@given(seed=seeds, scale=st.sampled_from([1.0, 37.0, 5e4]))
def test_kl_is_that_of_the_dense_gaussians(kind: str, batch: tuple[int, ...], seed: int, scale: float) -> None:
    prior, statistics = fitted(kind, seed, batch)
    precision = statistics.factorise(prior)
    difference = normal(seed + 5, *batch, OUT * IN)
    zero = torch.zeros_like(difference)
    posterior = MultivariateNormal(difference, precision_matrix=scale * precision.to_dense())
    reference = MultivariateNormal(zero, precision_matrix=scale * dense_prior(prior, batch))
    close(kl.kl_divergence(precision, prior, difference, scale), kl_divergence(posterior, reference))
    close(kl.log_prob(precision, difference, scale), posterior.log_prob(zero))


@for_every_prior
@for_every_batch
def test_precision_is_the_prior_plus_a_diagonal_in_the_basis(kind: str, batch: tuple[int, ...]) -> None:
    prior, statistics = fitted(kind, 3, batch)
    basis = kronecker.kronecker_product(statistics.left, statistics.right)
    matrix = statistics.factorise(prior).to_dense()
    eye = torch.eye(OUT * IN, dtype=torch.float64).expand_as(basis)
    close(basis.mT @ dense_prior(prior, batch) @ basis, eye)
    close(basis.mT @ (matrix - dense_prior(prior, batch)) @ basis, torch.diag_embed(statistics.fisher.flatten(-2)))


@for_every_prior
@for_every_batch
def test_starts_at_the_identity(kind: str, batch: tuple[int, ...]) -> None:
    prior = make_prior(kind, 2, batch)
    begun = start(prior)
    eye = torch.eye(OUT * IN, dtype=torch.float64).expand(*batch, OUT * IN, OUT * IN)
    close(begun.factorise(prior).to_dense(), eye + dense_prior(prior, batch))
    assert list(begun.averages()) == ["inputs", "outputs", "fisher"]


def test_no_fisher_leaves_the_prior() -> None:
    prior, statistics = fitted("matrices", 4, (2,))
    statistics.fisher.zero_()
    close(statistics.factorise(prior).to_dense(), dense_prior(prior, (2,)))


@for_every_prior
def test_floor_and_damping_add_the_identity_seen_in_the_basis(kind: str) -> None:
    prior, statistics = fitted(kind, 3, (2,))
    basis = kronecker.kronecker_product(statistics.left, statistics.right)
    before, damped = statistics.factorise(prior).to_dense(), statistics.factorise(prior, 0.3, "exact").to_dense()
    statistics.add_floor_(0.3)
    raised = statistics.factorise(prior).to_dense()
    close(raised, damped)
    added = basis.mT @ (raised - before) @ basis
    close(added.diagonal(dim1=-2, dim2=-1), 0.3 * (basis.mT @ basis).diagonal(dim1=-2, dim2=-1))
    if kind == "isotropic":
        close(raised - before, 0.3 * torch.eye(OUT * IN, dtype=torch.float64).expand_as(raised), 1e-9)


@for_every_prior
@for_every_batch
def test_draws_do_not_depend_on_the_choice_of_eigenvectors(kind: str, batch: tuple[int, ...]) -> None:
    prior, statistics = fitted(kind, 8, batch)
    flipped = statistics.clone()
    signs = torch.tensor([1.0, -1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    order = torch.tensor([2, 0, 3, 1])
    flipped.left = (statistics.left * signs[:OUT])[..., order]
    flipped.right = statistics.right * signs
    flipped.fisher = statistics.fisher[..., order, :]
    noise = normal(9, 7, *batch, OUT * IN)
    one, other = statistics.factorise(prior), flipped.factorise(prior)
    close(one.sample(noise), other.sample(noise))
    close(one.solve(noise), other.solve(noise))
    close(one.covariance(noise[0]), other.covariance(noise[0]))


def test_without_terms_still_samples_and_says_what_it_cannot() -> None:
    prior, statistics = fitted("diagonal", 1, (2,))
    precision = statistics.factorise(prior)
    noise = normal(2, 2, OUT * IN)
    stripped = precision.drop_terms().with_inverses()
    assert isinstance(stripped, eigen.Precision)
    assert len(stripped.tensors()) < len(precision.tensors())
    for name in ("sample", "solve"):
        close(getattr(stripped, name)(noise), getattr(precision, name)(noise))
    close(stripped.trace(prior), precision.trace(prior))
    for unavailable in (lambda: stripped.quad(noise), stripped.to_dense, stripped.as_prior):
        with pytest.raises(RuntimeError, match="drop_terms"):
            unavailable()


@for_every_prior
@for_every_batch
def test_as_prior_is_exact_where_the_spectrum_has_rank_one(kind: str, batch: tuple[int, ...]) -> None:
    prior, statistics = fitted(kind, 6, batch)
    statistics.fisher = (2.0 + positive(1, *batch, OUT, 1)) * (1.0 + positive(2, *batch, 1, IN)) - 1.0
    precision = statistics.factorise(prior)
    close(columns(precision.as_prior().times, OUT * IN, batch), precision.to_dense())
    _, scalar = fitted(kind, 6, batch, outputs=1)
    precision = scalar.factorise(make_prior(kind, 6, batch, outputs=1))
    close(columns(precision.as_prior().times, IN, batch), precision.to_dense())


def test_as_prior_keeps_the_means_of_the_spectrum() -> None:
    prior, statistics = fitted("matrices", 6, (2,))
    white = statistics.factorise(prior).as_prior()
    rows = torch.einsum("rij,rik,rkj->rj", statistics.left, white.outputs, statistics.left)
    inputs = torch.einsum("rij,rik,rkj->rj", statistics.right, white.inputs, statistics.right)
    for dim in (-1, -2):
        close((rows[..., :, None] * inputs[..., None, :]).mean(dim), (statistics.fisher + 1.0).mean(dim))


@for_every_prior
@for_every_batch
@pytest.mark.parametrize("positions", [1, 3, 40])
@pytest.mark.parametrize("constant", [False, True])
def test_measured_statistics_are_the_dense_definition(
    kind: str, batch: tuple[int, ...], positions: int, constant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(squared_products, "CHUNK", {"cpu": 50, "cuda": 50})  # a few examples at a time
    _, current = fitted(kind, 7, batch)
    activations, gradients = examples(8, (*batch, 5), positions, inputs=IN + 1 - constant)
    measured = measure(activations, gradients, constant, current)
    matrices = per_example(activations, gradients, constant)
    white = current.left.mT.unsqueeze(-3) @ matrices @ current.right.unsqueeze(-3)
    close(measured.fisher, white.square().mean(-3))
    plain = layer_moments(activations, gradients, constant)
    close(measured.inputs, plain.inputs)
    close(measured.outputs, plain.outputs)
    assert measured.left is current.left
    assert measured.right is current.right


def test_update_averages_all_but_the_bases() -> None:
    _, statistics = fitted("diagonal", 1, (2,))
    before = statistics.clone()
    measured = measure(*examples(3, (2, 4), 1), True, statistics)
    expected = {name: 0.9 * t + 0.1 * measured.averages()[name] for name, t in before.averages().items()}
    statistics.update_(measured, 0.9)
    for name, tensor in statistics.averages().items():
        close(tensor, expected[name], 1e-14)
    assert torch.equal(statistics.left, before.left)
    assert torch.equal(statistics.right, before.right)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("positions", [1, 4])
def test_never_farther_from_the_fisher_than_the_kronecker_product(seed: int, positions: int) -> None:
    activations, gradients = examples(50 * seed, (7,), positions)
    prior = make_prior("isotropic", 0, ())
    statistics = one_basis(prior, activations, gradients)
    fisher = dense.Statistics.measure(per_example(activations, gradients, True).flatten(-2)).fisher
    ours = statistics.factorise(prior).to_dense() - dense_prior(prior, ())
    product = kronecker.kronecker_product(statistics.outputs, statistics.inputs)
    assert (fisher - ours).norm() <= (fisher - product).norm()
    close(ours.trace(), fisher.trace())


@for_every_prior
@for_every_batch
@few
@given(seed=seeds)
def test_new_bases_keep_what_r_has_beyond_the_product_as_they_see_it(
    kind: str, batch: tuple[int, ...], seed: int
) -> None:
    prior, statistics = fitted(kind, seed, batch)
    precision = statistics.factorise(prior)
    old, inverse = precision.to_dense() - dense_prior(prior, batch), torch.linalg.inv(precision.to_dense())
    before, places = statistics.clone(), [tensor.data_ptr() for tensor in statistics.tensors().values()]
    statistics.refresh_basis_(prior)
    assert places == [tensor.data_ptr() for tensor in statistics.tensors().values()]
    close(columns(precision.solve, OUT * IN, batch), inverse)  # what was factorised before is unchanged
    product = kronecker.kronecker_product(before.outputs, before.inputs)
    old_basis = kronecker.kronecker_product(before.left, before.right)
    basis = kronecker.kronecker_product(statistics.left, statistics.right)
    dual = torch.linalg.inv(old_basis)
    # The product, and with it what is beyond its diagonal in the old bases, is kept whole.
    blurred = dual.mT @ torch.diag_embed((old_basis.mT @ product @ old_basis).diagonal(dim1=-2, dim2=-1)) @ dual
    unclamped = (basis.mT @ (product + old - blurred) @ basis).diagonal(dim1=-2, dim2=-1)
    close(statistics.fisher.flatten(-2), unclamped.clamp(min=0.0))
    inverse_prior = torch.linalg.inv(dense_prior(prior, batch))
    close(unclamped.sum(-1), torch.einsum("...ij,...ji", inverse_prior, old))
    whole = (unclamped >= 0).all(-1)
    close(statistics.fisher.sum((-2, -1))[whole], before.fisher.sum((-2, -1))[whole])
    for side, moment in ((statistics.left, before.outputs), (statistics.right, before.inputs)):
        white = side.mT @ moment @ side
        close(white, torch.diag_embed(white.diagonal(dim1=-2, dim2=-1)), BETWEEN_TIES)
    again = statistics.clone()
    again.refresh_basis_(prior)  # nothing has been measured since
    close(again.factorise(prior).to_dense(), statistics.factorise(prior).to_dense(), CLOSE_BASES)


@for_every_prior
def test_where_the_fisher_is_the_product_turned_bases_do_not_blur_it(kind: str) -> None:
    """What R was measured as in the old bases is the diagonal of S ⊗ A there, so that it is s aᵀ in the new ones."""
    prior, statistics = fitted(kind, 5, (2,))
    product = kronecker.kronecker_product(statistics.outputs, statistics.inputs)
    old = kronecker.kronecker_product(statistics.left, statistics.right)
    seen = (old.mT @ product @ old).diagonal(dim1=-2, dim2=-1)
    statistics.fisher.copy_(seen.unflatten(-1, (OUT, IN)))
    trace = statistics.fisher.sum((-2, -1))
    statistics.refresh_basis_(prior)
    close(statistics.fisher.sum((-2, -1)), trace)
    close(statistics.factorise(prior).to_dense(), product + dense_prior(prior, (2,)), CLOSE_BASES)


@for_every_batch
@pytest.mark.parametrize(("kind", "damping"), [*((kind, 0.0) for kind in PRIORS), ("isotropic", 0.2)])
def test_equals_exact_kronecker_where_the_fisher_is_a_product(
    kind: str, batch: tuple[int, ...], damping: float
) -> None:
    """Every pair of an input and a gradient occurs, so that S ⊗ A is exact."""
    prior = make_prior(kind, 4, batch)
    inputs, outputs = normal(5, *batch, 7, 1, IN - 1), normal(6, *batch, 6, 1, OUT)
    activations, gradients = inputs.repeat_interleave(6, dim=-3), torch.cat([outputs] * 7, dim=-3)
    statistics = one_basis(prior, activations, gradients)
    ours = statistics.factorise(prior, damping)
    theirs = layer_moments(activations, gradients, True).factorise(prior, damping, "exact")
    vector = normal(7, *batch, OUT * IN)
    for name in ("solve", "sample", "quad"):
        close(getattr(ours, name)(vector), getattr(theirs, name)(vector), CLOSE_BASES)
    close(ours.logdet(), theirs.logdet(), CLOSE_BASES)
    close(ours.trace(prior), theirs.trace(prior), CLOSE_BASES)
    close(ours.to_dense(), theirs.to_dense(), CLOSE_BASES)
    if damping == 0.0:
        close(
            columns(ours.as_prior().times, OUT * IN, batch),
            columns(theirs.as_prior().times, OUT * IN, batch),
            CLOSE_BASES,
        )


# What is refused


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -2.0])
def test_a_fisher_that_cannot_be_factorised_is_refused(value: float) -> None:
    prior, statistics = fitted("matrices", 1, (2,))
    statistics.fisher[1, 2, 3] = value
    with pytest.raises(FactorisationError) as error:
        statistics.factorise(prior, 0.1)
    assert list(error.value.weights) == []
    assert (error.value.condition == torch.inf) == (value == -2.0)


@pytest.mark.parametrize("value", [0.0, -1.0, torch.nan, torch.inf])
@pytest.mark.parametrize("side", ["inputs", "outputs"])
def test_an_improper_prior_is_refused(value: float, side: str) -> None:
    prior, statistics = fitted("diagonal", 1, ())
    getattr(prior, side)[1] = value
    matrices = kronecker.Prior(torch.diag(prior.inputs), torch.diag(prior.outputs), diagonal=False)
    # A singular matrix is repaired with a warning, as `kronecker` does.
    for wrong in (prior,) if value <= 0 else (prior, matrices):
        for use in (statistics.factorise, statistics.refresh_basis_, start):
            with pytest.raises(FactorisationError):
                use(wrong)


@for_every_prior
def test_bases_of_another_prior_are_refused(kind: str) -> None:
    prior, statistics = fitted(kind, 1, (2,))
    before = statistics.clone()
    for use in (statistics.factorise, statistics.refresh_basis_):
        with pytest.raises(ValueError, match="another prior"):
            use(prior.scaled(0.5))
    assert torch.equal(statistics.left, before.left)


def no_convergence(matrix: Tensor) -> None:
    raise RuntimeError("no convergence")


@pytest.mark.parametrize("field", ["inputs", "outputs", "fisher", "none"])
def test_new_bases_that_cannot_be_found_change_nothing(field: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prior, statistics = fitted("matrices", 1, (2,))
    if field == "none":
        monkeypatch.setattr(factorisation.torch.linalg, "eigh", no_convergence)
    else:
        getattr(statistics, field)[1, 0, 0] = torch.nan
    before = statistics.clone()
    with pytest.raises(FactorisationError):
        statistics.refresh_basis_(prior)
    for name, tensor in statistics.tensors().items():
        assert torch.equal(tensor.nan_to_num(), before.tensors()[name].nan_to_num())


@for_every_prior
def test_nothing_is_read_on_the_host_where_that_is_not_possible(kind: str) -> None:
    """A tensor on the meta device has no numbers: to read one raises."""
    prior, statistics = (record.map(lambda t: t.to("meta")) for record in fitted(kind, 1, (2,)))
    activations, gradients = (tensor.to("meta") for tensor in examples(1, (2, 3), 2))
    with unchecked():
        statistics.update_(measure(activations, gradients, True, statistics), 0.9)
        statistics.add_floor_(0.1)
        precision = statistics.factorise(prior, 0.1)
        for found in (precision.sample, precision.solve, precision.quad):
            assert found(torch.zeros(2, OUT * IN, device="meta", dtype=torch.float64)).shape[0] == 2


@for_every_prior
def test_float32_is_as_good_as_its_digits(kind: str) -> None:
    prior, statistics = fitted(kind, 3, (2,))
    wide = statistics.factorise(prior)
    narrow = statistics.map(Tensor.float).factorise(prior.map(Tensor.float))
    close(narrow.to_dense().double(), wide.to_dense(), 1e-4)
    noise = normal(4, 2, OUT * IN)
    close(narrow.sample(noise.float()).double(), wide.sample(noise), 1e-4)


@pytest.mark.parametrize("kind", ["isotropic", "matrices"])
def test_rounding_does_not_choose_the_basis(kind: str) -> None:
    """Two examples show two of the directions; the others have equal eigenvalues."""
    prior, found = make_prior(kind, 3, ()), []
    for nudge in (1.0, 1.0 + 1e-14):
        statistics = start(prior)
        for i in range(4):
            activations, gradients = examples(7 * i, (2,), 1)
            statistics.update_(measure(activations * nudge, gradients, True, statistics), 0.5)
            statistics.refresh_basis_(prior)
        found.append(statistics.factorise(prior).to_dense())
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 1e-5
