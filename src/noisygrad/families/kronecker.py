"""The matrix-variate family: a layer's Fisher block is S ⊗ A, as in noisy K-FAC (Algorithm 2 of the paper).

A is the second moment of the layer's inputs (with the constant 1 of the bias), S that of its output gradients. A
weight matrix X is out × in, flattened row by row, so that (S ⊗ A) x is S X Aᵀ flattened. All identities below are that
one, used on roots and inverses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from noisygrad.families import base
from noisygrad.families.base import DampingMode
from noisygrad.families.diagonal import rest_as_diagonal
from noisygrad.families.factors import (
    Prior,
    damped_factors,
    identity,
    in_eigenbasis,
    kronecker_product,
    whitener,
    with_damping,
)
from noisygrad.families.family import Family, Part, PrecisionOf, Reads, column_precisions, register_family
from noisygrad.families.units import Span, Unit
from noisygrad.kernels.factorisation import inverse_root, symmetric_eigh
from noisygrad.kernels.products import LARGE_SIDE, between, gram, matmul, wide_product
from noisygrad.kernels.triangles import times_large_lower

__all__ = ["KRONECKER", "Inverse", "Kronecker", "Precision", "Prior", "Statistics"]


@dataclasses.dataclass
class Statistics(base.Statistics):
    """A, `[..., in, in]`, and S, `[..., out, out]`: F = S ⊗ A."""

    inputs: Tensor
    outputs: Tensor

    def diagonals(self) -> tuple[Tensor, Tensor]:
        """Those of A and S."""
        return self.inputs.diagonal(dim1=-2, dim2=-1), self.outputs.diagonal(dim1=-2, dim2=-1)

    def determined(self, precision: Precision) -> Tensor:
        inverse_s, inverse_a = precision.inverse_left, precision.inverse_right
        if inverse_s is not None and inverse_a is not None:
            return (inverse_s * self.outputs).sum((-2, -1)) * (inverse_a * self.inputs).sum((-2, -1))
        fisher = Prior(self.inputs, self.outputs, diagonal=False)
        return fisher.trace(precision.left, precision.right, precision.spectrum)

    def factorise(self, prior: Prior, damping: float = 0.0, mode: DampingMode = "factored") -> Precision:
        """P = S ⊗ A + Γ + γ_ex I, by equation (11) ("factored") or in the eigenbasis ("exact")."""
        prior = with_damping(prior, damping)
        return self._factorise_exactly(prior) if mode == "exact" else self._factorise_factors(prior)

    def factorise_pair(
        self, prior: Prior, damping: float, mode: DampingMode = "factored"
    ) -> tuple[base.Precision, base.Precision]:
        """(`factorise(prior)`, `factorise(prior, damping)`), without their terms; factored, one batch of twice as many.

        A GPU is idle between the many small operations that make a factor, so half of them is half of the time.
        """
        if mode == "exact":
            return super().factorise_pair(prior, damping, mode)
        priors = [each.tensors() for each in (prior, with_damping(prior, damping))]
        both = prior.with_tensors({name: torch.stack([each[name] for each in priors]) for name in priors[0]})
        twice = self.map(lambda tensor: tensor.expand(2, *tensor.shape))._factorise_factors(both).drop_terms()
        return twice.map(lambda tensor: tensor[0]), twice.map(lambda tensor: tensor[1])

    def _factorise_factors(self, prior: Prior) -> Precision:
        damped = damped_factors(self.inputs, self.outputs, prior)
        right, logdet_a = inverse_root(damped.inputs, *damped.bound_inputs)
        left, logdet_s = inverse_root(damped.outputs, *damped.bound_outputs)
        return Precision(
            left=left,
            right=right,
            terms=(damped.outputs, damped.inputs),
            log_determinant=right.shape[-1] * logdet_s + left.shape[-1] * logdet_a,
        )

    def _factorise_exactly(self, prior: Prior) -> Precision:
        (root_s, logdet_s), (root_a, logdet_a) = (whitener(f, prior.diagonal) for f in (prior.outputs, prior.inputs))
        if prior.diagonal:
            root_s, root_a = torch.diag_embed(root_s), torch.diag_embed(root_a)
        s, left = symmetric_eigh(root_s.mT @ self.outputs @ root_s)
        a, right = symmetric_eigh(root_a.mT @ self.inputs @ root_a)
        spectrum = s[..., :, None] * a[..., None, :] + 1.0
        logdet = a.shape[-1] * logdet_s + s.shape[-1] * logdet_a + spectrum.log().sum((-2, -1))
        terms = (self.outputs, self.inputs, *prior.matrices())
        sides = {"left": root_s @ left, "right": root_a @ right, "left_basis": left, "right_basis": right}
        return Precision(terms=terms, log_determinant=logdet, spectrum=spectrum, **sides)


@dataclasses.dataclass
class Precision(base.Precision):
    """P⁻¹ = (U ⊗ V) diag(1/R) (U ⊗ V)ᵀ with U = `left`, V = `right` and R = `spectrum` (None where it is all ones).

    `inverse_left` and `inverse_right` are U Uᵀ and V Vᵀ, after `with_inverses`, for factored damping only. `terms` are
    (S₁, A₁[, S₂, A₂]) with P = Σ Sᵢ ⊗ Aᵢ. Where U and V hold eigenvectors, the bases are those: see `in_eigenbasis`.
    """

    left: Tensor
    right: Tensor
    terms: tuple[Tensor, ...]
    log_determinant: Tensor
    spectrum: Tensor | None = None
    inverse_left: Tensor | None = None
    inverse_right: Tensor | None = None
    left_basis: Tensor | None = None
    right_basis: Tensor | None = None

    def drop_terms(self) -> Self:
        return dataclasses.replace(self, terms=())

    def with_inverses(self) -> Self:
        """The same with U Uᵀ and V Vᵀ, so that `solve` takes two products and not four."""
        if self.spectrum is not None:
            return self
        return dataclasses.replace(self, inverse_left=gram(self.left.mT), inverse_right=gram(self.right.mT))

    def solver(self) -> base.Solver:
        """U Uᵀ and V Vᵀ alone, where there is no spectrum."""
        return self if self.spectrum is not None else Inverse(gram(self.left.mT), gram(self.right.mT))

    def solve(self, vector: Tensor) -> Tensor:
        """U [(Uᵀ X V) / R] Vᵀ."""
        matrix = self._matrix(vector)
        if self.inverse_left is not None and self.inverse_right is not None:
            return matmul(matmul(self.inverse_left, matrix), self.inverse_right).flatten(-2)
        rotated = matmul(wide_product(self.left.mT, matrix), self.right)
        rotated = rotated if self.spectrum is None else rotated / self.spectrum
        return matmul(wide_product(self.left, rotated), self.right.mT).flatten(-2)

    def sample(self, noise: Tensor) -> Tensor:
        """U (Z / √R) Vᵀ, with Z brought into the eigenbasis."""
        matrix = self._matrix(noise)
        if self.spectrum is not None and self.left_basis is not None and self.right_basis is not None:
            matrix = in_eigenbasis(matrix, self.left_basis, self.right_basis) * self.spectrum.rsqrt()
            return between(self.left, matrix, self.right.mT).flatten(-2)
        if matrix.dim() > self.left.dim():
            return between(self.left, matrix, self.right.mT).flatten(-2)
        product, lower = matmul(self.left, matrix), self.right.mT
        large = lower.shape[-1] >= LARGE_SIDE
        return (times_large_lower(product, lower) if large else matmul(product, lower)).flatten(-2)

    def quad(self, vector: Tensor) -> Tensor:
        """Σᵢ ⟨X, Sᵢ X Aᵢ⟩."""
        matrix = self._matrix(vector)
        total = torch.zeros_like(vector[..., 0])
        for outputs, inputs in self._pairs():
            total = total + (matrix * (outputs @ matrix @ inputs)).sum((-2, -1))
        return total

    def logdet(self) -> Tensor:
        return self.log_determinant

    def trace(self, prior: base.Prior) -> Tensor:
        if not isinstance(prior, Prior):
            raise TypeError(f"expected the Kronecker family's Prior, got {type(prior).__module__}.Prior")
        return prior.trace(self.left, self.right, self.spectrum)

    def to_dense(self) -> Tensor:
        dense = [kronecker_product(outputs, inputs) for outputs, inputs in self._pairs()]
        return torch.stack(dense).sum(0)

    def layer_covariance(self) -> base.FactoredCovariance:
        return base.FactoredCovariance(self.left, self.right, self.spectrum)

    def as_prior(self) -> Prior:
        """P as one Kronecker product.

        Factored: P itself. With a spectrum R, that is replaced by the outer product of its row and column means: P
        itself where R has rank one (a Fisher of zero, or a 1×1 factor), otherwise its nearest such match in the mean.
        """
        if self.spectrum is None:
            [(outputs, inputs)] = self._pairs()
            return Prior(inputs, outputs, diagonal=False)
        rows, columns, spectrum = self._dual()
        by_row = spectrum.mean(-1)
        by_column = spectrum.mean(-2) / spectrum.mean((-2, -1))[..., None]
        inputs = (columns * by_column[..., None, :]) @ columns.mT
        return Prior(inputs, (rows * by_row[..., None, :]) @ rows.mT, diagonal=False)

    def _dual(self) -> tuple[Tensor, Tensor, Tensor]:
        """(Γ_S U, Γ_A V, R): U Uᵀ = Γ_S⁻¹, so U⁻ᵀ = Γ_S U, back to weights without another factorisation."""
        outputs, inputs = self._pairs()[-1]
        assert self.spectrum is not None
        return outputs @ self.left, inputs @ self.right, self.spectrum

    def _matrix(self, vector: Tensor) -> Tensor:
        return vector.reshape(*vector.shape[:-1], self.left.shape[-1], self.right.shape[-1])

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        if not self.terms:
            raise RuntimeError("this Precision was stripped by drop_terms(); use the original for quad and to_dense")
        return list(zip(self.terms[::2], self.terms[1::2], strict=True))


@dataclasses.dataclass
class Inverse(base.Solver):
    """P⁻¹ = left ⊗ right: what a step needs of a precision with factored damping."""

    left: Tensor
    right: Tensor

    def solve(self, vector: Tensor) -> Tensor:
        matrix = vector.reshape(*vector.shape[:-1], self.left.shape[-1], self.right.shape[-1])
        return matmul(matmul(self.left, matrix), self.right).flatten(-2)


class Kronecker(Family):
    """A block for each layer with a matrix, or for each of the groups of a convolution."""

    name: ClassVar[str] = "kronecker"
    reads: ClassVar[Reads] = "moments"
    damping_modes: ClassVar[tuple[DampingMode, ...]] = ("factored", "exact")
    stacking: ClassVar[Mapping[str, tuple[int, ...]] | None] = {
        "right": (-2, -1),
        "inverse_right": (-2, -1),
        "right_basis": (-2, -1),
        "spectrum": (-1,),
    }
    traceable_modes: ClassVar[tuple[DampingMode, ...]] = ("factored",)

    def partition(self, units: Sequence[Unit], every_unit: Sequence[Unit]) -> Iterator[Part]:
        """One block for each matrix; all else is diagonal."""
        for unit in units:
            if unit.kind == "matrix":
                yield Part(unit.name, self, (unit,))
        yield from rest_as_diagonal([unit for unit in units if unit.kind != "matrix"])

    def identity(self, prior: base.Prior) -> base.Statistics:
        assert isinstance(prior, Prior)
        return Statistics(identity(prior.inputs, prior.diagonal), identity(prior.outputs, prior.diagonal))

    def measure(self, units: Sequence[Unit], passes: Mapping[str, Any], current: base.Statistics) -> base.Statistics:
        (unit,) = units
        if unit.name not in passes:
            return self.unmeasured(current)
        one = passes[unit.name]
        measured: base.Statistics = one.moments()
        some = one.takes_part()
        return measured if some is None else measured.keep_inputs_(current, some)

    def prior(self, span: Span, precision_of: PrecisionOf, like: Tensor) -> Prior:
        (unit,) = span.units
        return Prior.from_columns(column_precisions(unit, span, precision_of, like), unit.outputs)

    def cost(self, units: Sequence[Unit]) -> float:
        return float(sum(unit.groups * (unit.outputs**3 + unit.inputs**3) for unit in units))

    def pieces(self, units: Sequence[Unit], statistics: base.Statistics) -> list[tuple[str, Tensor]]:
        """The diagonals: by the inequality of Cauchy and Schwarz the rest of a moment is finite if they are."""
        (unit,) = units
        inputs, outputs = statistics.diagonals()  # type: ignore[attr-defined]
        return [(unit.name, inputs), (unit.name, outputs)]


KRONECKER = register_family(Kronecker())
