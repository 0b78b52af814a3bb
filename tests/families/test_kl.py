"""The KL and density of every family against torch.distributions on the dense Gaussian."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import MultivariateNormal

from noisygrad.families import dense, diagonal, kronecker, tridiagonal
from noisygrad.families.base import Prior, Statistics
from noisygrad.families.kl import kl_divergence, log_prob
from support.families import CASES, close, columns, few, for_every_case, for_every_prior_like_case, normal, seeds


def gaussian(mean: Tensor, precision: Tensor) -> MultivariateNormal:
    return MultivariateNormal(mean, precision_matrix=0.5 * (precision + precision.mT))


@for_every_case
@few
@given(seed=seeds, scale=st.sampled_from([1.0, 37.0, 5e4]))
def test_kl_is_that_of_the_dense_gaussians(
    name: str, batch: tuple[int, ...], fitted: bool, seed: int, scale: float
) -> None:
    prior, precision = CASES[name](seed, batch, fitted, 0.0)
    matrix = precision.to_dense()
    size = matrix.shape[-1]
    mean, prior_mean = normal(seed + 5, *batch, size), normal(seed + 6, *batch, size)
    posterior = gaussian(mean, scale * matrix)
    reference = gaussian(prior_mean, scale * columns(prior.times, size, batch))
    kl = kl_divergence(precision, prior, mean - prior_mean, scale)
    close(kl, torch.distributions.kl_divergence(posterior, reference))
    assert (kl > 0).all()


@for_every_case
def test_kl_of_equals_is_zero_and_of_others_is_not(name: str, batch: tuple[int, ...], fitted: bool) -> None:
    """With no Fisher at all the posterior is the prior, whatever the damping mode."""
    prior, precision = CASES[name](11, batch, fitted, 0.0)
    size = precision.to_dense().shape[-1]
    mode = "exact" if "exact" in name else "factored"
    unchanged = no_fisher(prior).factorise(prior, 0.0, mode)
    same = torch.zeros(*batch, size, dtype=torch.float64)
    kl = kl_divergence(unchanged, prior, same, 10.0)
    torch.testing.assert_close(kl, torch.zeros_like(kl), rtol=0, atol=1e-9)
    assert (kl_divergence(precision, prior, same, 10.0) > 1e-3).all()


@for_every_prior_like_case
def test_kl_of_a_posterior_to_itself_as_prior_is_zero(name: str, batch: tuple[int, ...], fitted: bool) -> None:
    _, precision = CASES[name](12, batch, fitted, 0.0)
    same = torch.zeros(*batch, precision.to_dense().shape[-1], dtype=torch.float64)
    kl = kl_divergence(precision, precision.as_prior(), same, 10.0)
    torch.testing.assert_close(kl, torch.zeros_like(kl), rtol=0, atol=1e-9)


def no_fisher(prior: Prior) -> Statistics:
    """Statistics of zero in the shape of the prior: a network whose outputs do not depend on the weights."""
    families = {
        diagonal.Prior: diagonal.DIAGONAL,
        kronecker.Prior: kronecker.KRONECKER,
        tridiagonal.Prior: tridiagonal.TRIDIAGONAL,
        dense.Prior: dense.DENSE,
    }
    return families[type(prior)].identity(prior).map(torch.zeros_like)


@for_every_case
@few
@given(seed=seeds)
def test_log_prob_is_that_of_the_dense_gaussian(name: str, batch: tuple[int, ...], fitted: bool, seed: int) -> None:
    _, precision = CASES[name](seed, batch, fitted, 0.0)
    matrix = precision.to_dense()
    difference = normal(seed + 7, *batch, matrix.shape[-1])
    expected = gaussian(torch.zeros_like(difference), 20.0 * matrix).log_prob(difference)
    close(log_prob(precision, difference, 20.0), expected)
    close(log_prob(precision, difference, torch.tensor(20.0, dtype=torch.float64)), expected)


def test_kl_to_an_improper_prior_is_infinite() -> None:
    prior = kronecker.Prior.from_columns(torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64), 2)
    statistics = kronecker.KRONECKER.identity(prior)
    kl = kl_divergence(statistics.factorise(prior), prior, torch.zeros(6, dtype=torch.float64), 1.0)
    assert kl == torch.inf
