"""Priors, examples and moving averages of the eigenvalue-corrected family."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from noisygrad.curvature.passes import MatrixPass
from noisygrad.families import eigen, kronecker
from noisygrad.families.units import Slot, Unit
from support.families import columns, normal, positive

BATCHES: tuple[tuple[int, ...], ...] = ((), (2,), (2, 3))
PRIORS = ("isotropic", "diagonal", "matrices")
OUT, IN = 4, 5
BETWEEN_TIES, CLOSE_BASES = 1e-7, 1e-5
"""A basis is that of the moments but for what decides between equal eigenvalues, the root of rounding."""


def spd(seed: int, batch: tuple[int, ...], size: int) -> Tensor:
    root = normal(seed, *batch, size, size)
    return root @ root.mT / size + 0.2 * torch.eye(size, dtype=torch.float64)


def make_prior(kind: str, seed: int, batch: tuple[int, ...], outputs: int = OUT, inputs: int = IN) -> kronecker.Prior:
    if kind == "matrices":
        return kronecker.Prior(spd(seed, batch, inputs), spd(seed + 1, batch, outputs), diagonal=False)
    if kind == "isotropic":
        return kronecker.Prior.from_columns(torch.full((*batch, inputs), 0.3, dtype=torch.float64), outputs)
    return kronecker.Prior(positive(seed, *batch, inputs), positive(seed + 1, *batch, outputs), diagonal=True)


def examples(seed: int, shape: tuple[int, ...], positions: int, outputs: int = OUT, inputs: int = IN) -> Any:
    """Inputs without the constant, and output gradients that depend on them, so that S ⊗ A is not exact."""
    activations = normal(seed, *shape, positions, inputs - 1)
    gradients = normal(seed + 1, *shape, positions, outputs)
    return activations, gradients * (1.0 + activations.square().sum(-1, keepdim=True))


def measure(activations: Tensor, gradients: Tensor, constant: bool, current: eigen.Statistics) -> eigen.Statistics:
    """What the family makes of one pass through a layer."""
    unit = Unit("layer", "matrix", OUT, IN, (Slot("layer", 0, IN),), "Linear")
    return eigen.EIGEN.measure([unit], {"layer": MatrixPass(activations, gradients, constant)}, current)


def start(prior: kronecker.Prior) -> eigen.Statistics:
    return eigen.EIGEN.identity(prior)


def fitted(kind: str, seed: int, batch: tuple[int, ...], outputs: int = OUT, inputs: int = IN) -> Any:
    """A prior, and a moving average whose bases are not those of its last A and S."""
    prior = make_prior(kind, seed, batch, outputs, inputs)
    statistics = start(prior)
    for i in range(3):
        data = examples(seed + 10 * i, (*batch, 6), 3, outputs, inputs)
        statistics.update_(measure(*data, True, statistics), 0.5)
        if i < 2:
            statistics.refresh_basis_(prior)
    return prior, statistics


def one_basis(prior: kronecker.Prior, activations: Tensor, gradients: Tensor) -> eigen.Statistics:
    """All of the same examples: A and S, their bases, and R in these."""
    begun = start(prior)
    found = measure(activations, gradients, True, begun)
    found.refresh_basis_(prior)
    return measure(activations, gradients, True, found)


def per_example(activations: Tensor, gradients: Tensor, constant: bool) -> Tensor:
    """Gradients of each example, `[..., B, out, in]`."""
    ones = torch.ones(*activations.shape[:-1], int(constant), dtype=torch.float64)
    return torch.einsum("...ti,...tj->...ij", gradients, torch.cat([activations, ones], -1))


def dense_prior(prior: kronecker.Prior, batch: tuple[int, ...]) -> Tensor:
    return columns(prior.times, prior.outputs.shape[-1] * prior.inputs.shape[-1], batch)
