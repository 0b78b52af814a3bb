"""Kronecker blocks with large factors, kept in bands (`triangles`): an optimiser's memory is mostly theirs.

A record here stands for one of `kronecker`, its `whole()`, and does what that does. Factors in an eigenbasis are
neither symmetric nor triangular and stay as they are.
"""

import dataclasses
from typing import Self, TypeVar

import torch
from torch import Tensor

from noisygrad.families import base, factors, kronecker
from noisygrad.families.base import DampingMode
from noisygrad.kernels import triangles
from noisygrad.kernels.triangles import Bands

MOMENT_BANDS = 10
FACTOR_BANDS = 4
"""Fewer, since they are multiplied with in every step: products with wide bands are faster."""
Record = TypeVar("Record", bound=base.Solver | base.Sampler)


@dataclasses.dataclass
class Statistics(base.Statistics):
    """A and S of `kronecker.Statistics` in bands."""

    inputs: Bands
    outputs: Bands

    @classmethod
    def of(cls, whole: kronecker.Statistics) -> Self:
        """The same moments."""
        return cls(triangles.pack(whole.inputs, MOMENT_BANDS), triangles.pack(whole.outputs, MOMENT_BANDS))

    def unpacked(self) -> kronecker.Statistics:
        return kronecker.Statistics(triangles.symmetric(self.inputs), triangles.symmetric(self.outputs))

    def load_unpacked_(self, unpacked: base.TensorRecord) -> None:
        assert isinstance(unpacked, kronecker.Statistics)
        self.copy_(self.of(unpacked))

    def diagonals(self) -> tuple[Tensor, Tensor]:
        return triangles.diagonal(self.inputs), triangles.diagonal(self.outputs)

    @torch.no_grad()
    def add_floor_(self, floor: Tensor | float) -> None:
        scale = triangles.diagonal(self.inputs).mean(-1, keepdim=True)
        triangles.add_to_diagonal_(self.outputs, floor / scale.clamp(min=torch.finfo(scale.dtype).tiny))

    def with_identity(self, share: Tensor | float) -> Self:
        return self.of(self.unpacked().with_identity(share))

    def determined(self, precision: kronecker.Precision) -> Tensor:
        return self.unpacked().determined(precision)

    def factorise(
        self, prior: factors.Prior, damping: float = 0.0, mode: DampingMode = "factored"
    ) -> kronecker.Precision:
        return self.unpacked().factorise(prior, damping, mode)


@dataclasses.dataclass
class Factors(base.SolverSampler):
    """P⁻¹ = U Uᵀ ⊗ V Vᵀ: Uᵀ and Vᵀ, which are lower triangular, for draws; U Uᵀ and V Vᵀ for steps; or both pairs."""

    left: Bands
    right: Bands
    inverse_left: Bands
    inverse_right: Bands
    log_determinant: Tensor | None

    @classmethod
    def of(cls, whole: kronecker.Precision | kronecker.Inverse) -> Self:
        """The same factors; what is left of a precision are its roots and, after `with_inverses`, its inverses."""
        if isinstance(whole, kronecker.Inverse):
            return cls((), (), _pack(whole.left), _pack(whole.right), None)
        return cls(
            _pack(whole.left.mT),
            _pack(whole.right.mT),
            _pack(whole.inverse_left),
            _pack(whole.inverse_right),
            whole.log_determinant,
        )

    def unpacked(self) -> kronecker.Precision | kronecker.Inverse:
        if not self.left:
            return kronecker.Inverse(triangles.symmetric(self.inverse_left), triangles.symmetric(self.inverse_right))
        assert self.log_determinant is not None
        return kronecker.Precision(
            left=triangles.lower(self.left).mT,
            right=triangles.lower(self.right).mT,
            inverse_left=triangles.symmetric(self.inverse_left) if self.inverse_left else None,
            inverse_right=triangles.symmetric(self.inverse_right) if self.inverse_right else None,
            terms=(),
            log_determinant=self.log_determinant,
        )

    def load_unpacked_(self, unpacked: base.TensorRecord) -> None:
        assert isinstance(unpacked, kronecker.Precision | kronecker.Inverse)
        self.copy_(self.of(unpacked))

    def solve(self, vector: Tensor) -> Tensor:
        """U Uᵀ X V Vᵀ."""
        matrix = _matrix(vector, self.inverse_left, self.inverse_right)
        rows = triangles.symmetric_times(self.inverse_left, matrix)
        return triangles.times_symmetric(rows, self.inverse_right).flatten(-2)

    def sample(self, noise: Tensor) -> Tensor:
        """U Z Vᵀ."""
        matrix = _matrix(noise, self.left, self.right)
        return triangles.times_lower(triangles.upper_times(self.left, matrix), self.right).flatten(-2)


def pack_statistics(whole: base.Statistics) -> base.Statistics:
    """The statistics of any family, large moments in bands."""
    if not isinstance(whole, kronecker.Statistics):
        return whole
    return Statistics.of(whole) if _is_large(whole.inputs, whole.outputs) else whole


def pack_factors(whole: Record) -> Record | Factors:
    """What steps or draws of any family need, large factors in bands where there is no eigenbasis."""
    in_eigenbasis = isinstance(whole, kronecker.Precision) and whole.spectrum is not None
    if in_eigenbasis or not isinstance(whole, kronecker.Precision | kronecker.Inverse):
        return whole
    return Factors.of(whole) if _is_large(whole.left, whole.right) else whole


def _is_large(first: Tensor, second: Tensor) -> bool:
    return max(first.shape[-1], second.shape[-1]) >= triangles.LARGE


def _matrix(vector: Tensor, left: Bands, right: Bands) -> Tensor:
    return vector.reshape(*vector.shape[:-1], left[0].shape[-2], right[0].shape[-2])


def _pack(factor: Tensor | None) -> Bands:
    return () if factor is None else triangles.pack(factor, FACTOR_BANDS)
