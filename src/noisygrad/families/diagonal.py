"""The fully factorised family: P is a diagonal, as in noisy Adam (Algorithm 1 of the paper)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from noisygrad.families import base
from noisygrad.families.base import DampingMode, map_constant_rows
from noisygrad.kernels.factorisation import capturing, factorisation_error, not_positive


@dataclasses.dataclass
class Prior(base.Prior):
    """A precision per weight, `[..., n]`; 0 is an improper prior."""

    precision: Tensor

    @classmethod
    def from_precision(cls, columns: Tensor) -> Self:
        """The prior with these precisions, `[..., n]`."""
        return cls(columns)

    def scaled(self, factor: float) -> Self:
        """Γ times `factor`."""
        return dataclasses.replace(self, precision=map_constant_rows(lambda values: values * factor, self.precision))

    def quad(self, vector: Tensor) -> Tensor:
        """Σ Γ_j v_j²."""
        return (self.precision * vector.square()).sum(-1)

    def times(self, vector: Tensor) -> Tensor:
        """Γ_j v_j."""
        return self.precision * vector

    def logdet(self) -> Tensor:
        """Σ log Γ_j."""
        return self.precision.log().sum(-1)


@dataclasses.dataclass
class Statistics(base.Statistics):
    """f of Algorithm 1: the diagonal of the Fisher, `[..., n]`."""

    fisher: Tensor

    @classmethod
    def identity(cls, batch: Sequence[int], size: int, *, dtype: torch.dtype, device: torch.device | str) -> Self:
        """The Fisher at the start: ones."""
        return cls(torch.ones(*batch, size, dtype=dtype, device=device))

    @classmethod
    def measure(cls, rows: Tensor) -> Self:
        """The mean square of per-example gradients `[..., B, n]` (not the square of their mean)."""
        return cls(rows.square().mean(-2))

    @torch.no_grad()
    def add_floor_(self, floor: float) -> None:
        """In place: f + floor."""
        self.fisher.add_(floor)

    def factorise(self, prior: Prior, damping: float = 0.0, mode: DampingMode = "factored") -> Precision:
        """P = f + Γ + γ_ex; `mode` changes nothing, a diagonal is always damped exactly.

        Raises:
            FactorisationError: an entry of P is not finite or not above 0.
        """
        del mode
        diagonal = self.fisher + prior.precision + damping
        if not capturing():
            smallest, largest = (float(value) for value in torch.stack(diagonal.aminmax()).cpu())
            if not (smallest > 0.0 and math.isfinite(largest)):
                condition = math.nan if not math.isfinite(smallest + largest) else math.inf
                raise factorisation_error(diagonal.shape[-1], condition, damping, not_positive(diagonal))
        return Precision(diagonal, diagonal.rsqrt())


@dataclasses.dataclass
class Precision(base.Precision):
    """P = diag(p), kept with p^-½."""

    diagonal: Tensor
    inverse_root: Tensor

    def sampler(self) -> base.Sampler:
        """p^-½ alone."""
        return Root(self.inverse_root)

    def solver(self) -> base.Solver:
        """p alone."""
        return Divisor(self.diagonal)

    def solve(self, vector: Tensor) -> Tensor:
        """v / p."""
        return vector / self.diagonal

    def sample(self, noise: Tensor) -> Tensor:
        """z / √p."""
        return noise * self.inverse_root

    def quad(self, vector: Tensor) -> Tensor:
        """Σ p_j v_j²."""
        return (self.diagonal * vector.square()).sum(-1)

    def logdet(self) -> Tensor:
        """Σ log p_j."""
        return self.diagonal.log().sum(-1)

    def trace(self, prior: base.Prior) -> Tensor:
        """Σ Γ_j / p_j."""
        if not isinstance(prior, Prior):
            raise TypeError(f"expected the diagonal family's Prior, got {type(prior).__module__}.Prior")
        return (prior.precision / self.diagonal).sum(-1)

    def to_dense(self) -> Tensor:
        """diag(p)."""
        return torch.diag_embed(self.diagonal)

    def layer_covariance(self) -> Tensor:
        """1 / p."""
        return 1.0 / self.diagonal

    def as_prior(self) -> Prior:
        """The prior with precision p."""
        return Prior(self.diagonal)


@dataclasses.dataclass
class Root(base.Sampler):
    """What a draw needs of P = diag(p)."""

    inverse_root: Tensor

    def sample(self, noise: Tensor) -> Tensor:
        """z / √p."""
        return noise * self.inverse_root


@dataclasses.dataclass
class Divisor(base.Solver):
    """What a step needs of P = diag(p)."""

    diagonal: Tensor

    def solve(self, vector: Tensor) -> Tensor:
        """v / p."""
        return vector / self.diagonal
