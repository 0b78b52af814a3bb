"""The full family: P is any positive definite matrix (NNG-full of the paper; small networks only)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from noisygrad.families import base, factors
from noisygrad.families.base import DampingMode
from noisygrad.families.diagonal import DIAGONAL, join_units
from noisygrad.families.family import Family, Layout, Part, PrecisionOf, register_family, weight_precisions
from noisygrad.families.units import Span, Unit, by_unit
from noisygrad.kernels.factorisation import FactorisationError, inverse_root, not_positive, rounding_floor

LARGEST = 20_000
"""A dense block of more weights than this (3 GB in float64) is refused with advice instead of an out-of-memory."""


@dataclasses.dataclass
class Prior(base.Prior):
    """A precision matrix, `[..., n, n]`, or its diagonal, `[..., n]`, if `diagonal`."""

    precision: Tensor
    diagonal: bool

    def scaled(self, factor: float) -> Self:
        return dataclasses.replace(self, precision=self.precision * factor)

    def times(self, vector: Tensor) -> Tensor:
        return self.precision * vector if self.diagonal else _apply(self.precision, vector)

    def logdet(self) -> Tensor:
        if self.diagonal:
            return self.precision.log().sum(-1)
        logdet: Tensor = torch.linalg.slogdet(self.precision).logabsdet
        return logdet


@dataclasses.dataclass
class Statistics(base.Statistics):
    """F, `[..., n, n]`."""

    fisher: Tensor

    @classmethod
    def measure(cls, rows: Tensor) -> Self:
        """The second moment of per-example gradients `[..., B, n]`."""
        return cls(rows.mT @ rows / rows.shape[-2])

    def determined(self, precision: Precision) -> Tensor:
        return precision.trace(Prior(self.fisher, diagonal=False))

    def factorise(self, prior: Prior, damping: float = 0.0, mode: DampingMode = "factored") -> Precision:
        """P = F + Γ + γ_ex I; `mode` changes nothing, a matrix is always damped exactly."""
        if prior.diagonal:
            matrix = self.fisher + torch.diag_embed(prior.precision + damping)
            floor = prior.precision.amin(-1) + damping
        else:
            eye = torch.eye(self.fisher.shape[-1], dtype=self.fisher.dtype, device=self.fisher.device)
            matrix = self.fisher + prior.precision + damping * eye
            floor = rounding_floor(prior.precision) + damping
        try:
            root, logdet = inverse_root(matrix, floor)
        except FactorisationError as error:
            error.weights = not_positive(matrix.diagonal(dim1=-2, dim2=-1))
            raise
        return Precision(matrix, root, logdet)


@dataclasses.dataclass
class Precision(base.Precision):
    """P with a root of its inverse, root rootᵀ = P⁻¹."""

    matrix: Tensor
    root: Tensor
    log_determinant: Tensor

    def solve(self, vector: Tensor) -> Tensor:
        return _apply(self.root, _apply(self.root.mT, vector))

    def sample(self, noise: Tensor) -> Tensor:
        return _apply(self.root, noise)

    def quad(self, vector: Tensor) -> Tensor:
        return (vector * _apply(self.matrix, vector)).sum(-1)

    def logdet(self) -> Tensor:
        return self.log_determinant

    def trace(self, prior: base.Prior) -> Tensor:
        if not isinstance(prior, Prior):
            raise TypeError(f"expected the dense family's Prior, got {type(prior).__module__}.Prior")
        weighted = prior.precision[..., None] * self.root if prior.diagonal else prior.precision @ self.root
        return (self.root * weighted).sum((-2, -1))

    def to_dense(self) -> Tensor:
        return self.matrix

    def as_prior(self) -> Prior:
        return Prior(self.matrix, diagonal=False)


def _apply(matrix: Tensor, vector: Tensor) -> Tensor:
    """M v; further dimensions in front of v's are columns of one product, so that M is not copied for each."""
    extra = vector.dim() - matrix.dim() + 1
    if extra <= 0:
        return (matrix @ vector.unsqueeze(-1)).squeeze(-1)
    columns = vector.flatten(0, extra - 1).movedim(0, -1)
    product: Tensor = (matrix @ columns).movedim(-1, 0).unflatten(0, vector.shape[:extra])
    return product


class Dense(Family):
    """All layers with per-example gradients in one block."""

    name: ClassVar[str] = "full"
    layout: ClassVar[Layout] = "rows"

    def partition(self, units: Sequence[Unit], every_unit: Sequence[Unit]) -> Iterator[Part]:
        """One block of all layers that are known; a parameter of unknown use is diagonal."""
        together = [unit for unit in units if unit.kind != "other"]
        size = sum(unit.size for unit in together)
        if size > LARGEST:
            raise ValueError(
                f"a full covariance over {size} weights needs a matrix of {size}×{size}; at most {LARGEST} are "
                "supported. Use NoisyKFAC or NoisyBlockTridiagonal, or freeze layers"
            )
        if together:
            yield Part("all", self, tuple(together))
        if rest := [unit for unit in units if unit.kind == "other"]:
            yield Part("diagonal", DIAGONAL, tuple(rest))

    def identity(self, prior: base.Prior) -> Statistics:
        assert isinstance(prior, Prior)
        return Statistics(factors.identity(prior.precision, prior.diagonal))

    def measure(self, units: Sequence[Unit], passes: Mapping[str, Any], current: base.Statistics) -> base.Statistics:
        """The second moment of gradients; a layer that took no part has none."""
        rows = {unit.name: [passes[unit.name].rows()] for unit in units if unit.name in passes}
        if not rows:
            return self.unmeasured(current)
        return Statistics.measure(join_units(units, rows))

    def prior(self, span: Span, precision_of: PrecisionOf, like: Tensor) -> Prior:
        return Prior(weight_precisions(span, precision_of, like), diagonal=True)

    def cost(self, units: Sequence[Unit]) -> float:
        return float(sum(unit.size for unit in units)) ** 3

    def pieces(self, units: Sequence[Unit], statistics: base.Statistics) -> list[tuple[str, Tensor]]:
        """Each layer's part of the diagonal: by the inequality of Cauchy and Schwarz the rest is finite if it is."""
        diagonal = statistics.tensors()["fisher"].diagonal(dim1=-2, dim2=-1)
        return [(unit.name, part) for unit, part in by_unit(units, diagonal)]

    def fitted_prior_shapes(self, statistics: base.Statistics) -> dict[str, torch.Size]:
        return {"precision": statistics.tensors()["fisher"].shape}


DENSE = register_family(Dense())
