"""The matrix-variate family: a layer's Fisher block is S ⊗ A, as in noisy K-FAC (Algorithm 2 of the paper).

A is the second moment of the layer's inputs (with the constant 1 of the bias), S that of its output gradients. A
weight matrix X is out × in, flattened row by row, so that (S ⊗ A) x is S X Aᵀ flattened. All identities below are that
one, used on roots and inverses.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from noisygrad.families import base
from noisygrad.families.base import DampingMode
from noisygrad.kernels.factorisation import factorisation_error, inverse_root, rounding_floor, symmetric_eigh
from noisygrad.kernels.moments import between, gram, second_moment, times_lower, wide_product
from noisygrad.kernels.products import matmul

_LARGEST_PI = 1e8


@dataclasses.dataclass
class Prior(base.Prior):
    """Γ = outputs ⊗ inputs: vectors `[..., out]` and `[..., in]` if `diagonal`, else square matrices."""

    inputs: Tensor
    outputs: Tensor
    diagonal: bool

    @classmethod
    def from_columns(cls, columns: Tensor, outputs: int) -> Self:
        """The prior whose precision depends on the column (the input) only, `[..., in]`."""
        return cls(columns, columns.new_ones(*columns.shape[:-1], outputs), diagonal=True)

    def scaled(self, factor: float) -> Self:
        """Γ times `factor`."""
        return dataclasses.replace(self, outputs=self.outputs * factor)

    def quad(self, vector: Tensor) -> Tensor:
        """⟨X, Γ_S X Γ_A⟩."""
        return (vector * self.times(vector)).sum(-1)

    def times(self, vector: Tensor) -> Tensor:
        """Γ_S X Γ_A."""
        matrix = vector.reshape(*vector.shape[:-1], self.outputs.shape[-1], self.inputs.shape[-1])
        if self.diagonal:
            return (self.outputs[..., :, None] * matrix * self.inputs[..., None, :]).flatten(-2)
        return (self.outputs @ matrix @ self.inputs).flatten(-2)

    def logdet(self) -> Tensor:
        """in · log |Γ_S| + out · log |Γ_A|."""
        inputs, outputs = (
            factor.log().sum(-1) if self.diagonal else torch.linalg.slogdet(factor).logabsdet
            for factor in (self.inputs, self.outputs)
        )
        return self.inputs.shape[-1] * outputs + self.outputs.shape[-1] * inputs

    def matrices(self) -> tuple[Tensor, Tensor]:
        """(Γ_S, Γ_A) as matrices."""
        if self.diagonal:
            return torch.diag_embed(self.outputs), torch.diag_embed(self.inputs)
        return self.outputs, self.inputs


@dataclasses.dataclass
class DampedFactors:
    """A^γ = cA·A + pA·Γ_A and S^γ = cS·S + pS·Γ_S, with the four coefficients and the least eigenvalues, `[...]`."""

    inputs: Tensor
    outputs: Tensor
    fisher_inputs: Tensor
    fisher_outputs: Tensor
    prior_inputs: Tensor
    prior_outputs: Tensor
    floor_inputs: Tensor
    floor_outputs: Tensor


def damped_factors(inputs: Tensor, outputs: Tensor, prior: Prior) -> DampedFactors:
    """Equation (11) of the paper: add the prior to each factor, A^γ = A + πΓ_A and S^γ = S + Γ_S/π.

    π balances the traces, π² = (tr A / tr Γ_A) / (tr S / tr Γ_S), which for Γ = γI is the paper's: A + π'√γ I with
    π'² = (tr A / dim A) / (tr S / dim S), however γ is divided between Γ_A and Γ_S. Where S ⊗ A = 0 (a dead layer) the
    result is the prior. A 1×1 factor becomes 1, its value multiplied into the other factor: then the sum is exact.
    """
    a, s = _trace(inputs, False), _trace(outputs, False)
    prior_a, prior_s = _trace(prior.inputs, prior.diagonal), _trace(prior.outputs, prior.diagonal)
    # NaN counts as alive, so that it reaches the factorisation, which raises.
    alive = ~((a <= torch.finfo(a.dtype).tiny) | (s <= torch.finfo(s.dtype).tiny))
    if outputs.shape[-1] == 1:
        share = _fisher_share(a * s, prior_a * prior_s, alive, prior.diagonal)
        c_a, p_a, (c_s, p_s) = alive * s, prior_s, _unit_coefficients(s, prior_s, share)
    elif inputs.shape[-1] == 1:
        share = _fisher_share(a * s, prior_a * prior_s, alive, prior.diagonal)
        c_s, p_s, (c_a, p_a) = alive * a, prior_a, _unit_coefficients(a, prior_a, share)
    else:
        upper, lower = a.sqrt() * prior_s.sqrt(), s.sqrt() * prior_a.sqrt()
        balanced = alive & (upper > 0) & (lower > 0)
        pi = (torch.where(balanced, upper, 1.0) / torch.where(balanced, lower, 1.0)).clamp(1 / _LARGEST_PI, _LARGEST_PI)
        c_a = c_s = alive.to(a.dtype)
        p_a, p_s = pi, 1.0 / pi
    damped_a = _combine(c_a, inputs, p_a, prior.inputs, prior.diagonal)
    damped_s = _combine(c_s, outputs, p_s, prior.outputs, prior.diagonal)
    if outputs.shape[-1] == 1:
        damped_s = torch.ones_like(damped_s)
    elif inputs.shape[-1] == 1:
        damped_a = torch.ones_like(damped_a)
    floor_a, floor_s = p_a * _floor(prior.inputs, prior.diagonal), p_s * _floor(prior.outputs, prior.diagonal)
    return DampedFactors(damped_a, damped_s, c_a, c_s, p_a, p_s, floor_a, floor_s)


def _fisher_share(fisher: Tensor, prior: Tensor, alive: Tensor, diagonal: bool) -> Tensor:
    """How much of a 1×1 factor, which becomes 1, is the Fisher's.

    It matters only to the couplings between layers (`tridiagonal`), which it weighs: those of the Fisher fully, unless
    the prior has couplings too; then each has its share of the trace.
    """
    if diagonal:
        return alive.to(fisher.dtype)
    return alive * fisher / (fisher + prior).clamp(min=torch.finfo(fisher.dtype).tiny)


def _unit_coefficients(scalar: Tensor, prior: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """(c, p) with c · scalar + p · prior = 1, of which `share` is the first part."""
    return share / torch.where(share > 0, scalar, 1.0), (1.0 - share) / torch.where(prior > 0, prior, 1.0)


def with_damping(prior: Prior, damping: float) -> Prior:
    """Γ + γ_ex I: exact for a diagonal prior with constant outputs, by equation (11) for a matrix prior."""
    if damping == 0.0:
        return prior
    if not prior.diagonal:
        isotropic = Prior.from_columns(torch.full_like(prior.inputs[..., 0], damping), prior.outputs.shape[-1])
        damped = damped_factors(prior.inputs, prior.outputs, isotropic)
        return Prior(damped.inputs, damped.outputs, diagonal=False)
    # The constant moves from the outputs to the columns, where the damping can be added to it.
    constant = prior.outputs.mean(-1, keepdim=True)
    improper = constant == 0
    outputs = torch.where(improper, torch.ones_like(prior.outputs), prior.outputs / constant)
    return Prior(prior.inputs * constant + damping, outputs, diagonal=True)


@dataclasses.dataclass
class Statistics(base.Statistics):
    """A, `[..., in, in]`, and S, `[..., out, out]`: F = S ⊗ A."""

    inputs: Tensor
    outputs: Tensor

    @classmethod
    def identity(
        cls, batch: Sequence[int], outputs: int, inputs: int, *, dtype: torch.dtype, device: torch.device | str
    ) -> Self:
        """The factors at the start: identities."""
        return cls(
            torch.eye(inputs, dtype=dtype, device=device).expand(*batch, inputs, inputs).clone(),
            torch.eye(outputs, dtype=dtype, device=device).expand(*batch, outputs, outputs).clone(),
        )

    @classmethod
    def measure(cls, activations: Tensor, gradients: Tensor, constant: bool) -> Self:
        """From inputs `[..., B, T, in]` and per-example output gradients `[..., B, T, out]` of one batch.

        A is a mean over examples and positions, S a mean over examples and a sum over positions.
        """
        positions = gradients.shape[-2]
        inputs = second_moment(activations, activations, constant, constant)
        return cls(inputs, second_moment(gradients, gradients, False, False) * positions)

    def diagonals(self) -> tuple[Tensor, Tensor]:
        """Those of A and S."""
        return self.inputs.diagonal(dim1=-2, dim2=-1), self.outputs.diagonal(dim1=-2, dim2=-1)

    def factorise(self, prior: Prior, damping: float = 0.0, mode: DampingMode = "factored") -> Precision:
        """P = S ⊗ A + Γ + γ_ex I, by equation (11) ("factored") or in the eigenbasis ("exact").

        Raises:
            FactorisationError: a factor is not finite or, after damping, not positive definite.
        """
        prior = with_damping(prior, damping)
        return self._factorise_exactly(prior) if mode == "exact" else self._factorise_factors(prior)

    def factorise_twice(self, prior: Prior, damping: float) -> tuple[Precision, Precision]:
        """(`factorise(prior)`, `factorise(prior, damping)`), factored, without their terms: one batch of twice as many.

        A GPU is idle between the many small operations that make a factor, so half of them is half of the time.
        """
        priors = [each.tensors() for each in (prior, with_damping(prior, damping))]
        both = prior.with_tensors({name: torch.stack([each[name] for each in priors]) for name in priors[0]})
        twice = self.map(lambda tensor: tensor.expand(2, *tensor.shape))._factorise_factors(both).drop_terms()
        return twice.map(lambda tensor: tensor[0]), twice.map(lambda tensor: tensor[1])

    def _factorise_factors(self, prior: Prior) -> Precision:
        damped = damped_factors(self.inputs, self.outputs, prior)
        right, logdet_a = inverse_root(damped.inputs, damped.floor_inputs)
        left, logdet_s = inverse_root(damped.outputs, damped.floor_outputs)
        return Precision(
            left=left,
            right=right,
            spectrum=None,
            inverse_left=None,
            inverse_right=None,
            terms=(damped.outputs, damped.inputs),
            log_determinant=right.shape[-1] * logdet_s + left.shape[-1] * logdet_a,
        )

    def _factorise_exactly(self, prior: Prior) -> Precision:
        root_s, logdet_s = _whitener(prior.outputs, prior.diagonal)
        root_a, logdet_a = _whitener(prior.inputs, prior.diagonal)
        s, left = symmetric_eigh(root_s.mT @ self.outputs @ root_s)
        a, right = symmetric_eigh(root_a.mT @ self.inputs @ root_a)
        spectrum = s[..., :, None] * a[..., None, :] + 1.0
        logdet = a.shape[-1] * logdet_s + s.shape[-1] * logdet_a + spectrum.log().sum((-2, -1))
        terms = (self.outputs, self.inputs, *prior.matrices())
        return Precision(root_s @ left, root_a @ right, spectrum, None, None, terms, logdet, left, right)


@dataclasses.dataclass
class Precision(base.Precision):
    """P⁻¹ = (U ⊗ V) diag(1/R) (U ⊗ V)ᵀ with U = `left`, V = `right` and R = `spectrum` (None where it is all ones).

    `inverse_left` and `inverse_right` are U Uᵀ and V Vᵀ, after `with_inverses`, for factored damping only. `terms` are
    (S₁, A₁[, S₂, A₂]) with P = Σ Sᵢ ⊗ Aᵢ. Where U and V hold eigenvectors, the bases are those: see `in_eigenbasis`.
    """

    left: Tensor
    right: Tensor
    spectrum: Tensor | None
    inverse_left: Tensor | None
    inverse_right: Tensor | None
    terms: tuple[Tensor, ...]
    log_determinant: Tensor
    left_basis: Tensor | None = None
    right_basis: Tensor | None = None

    def drop_terms(self) -> Self:
        """A copy that can only solve, sample and take traces: half the memory, for caches used at every step."""
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
        return times_lower(matmul(self.left, matrix), self.right.mT).flatten(-2)

    def quad(self, vector: Tensor) -> Tensor:
        """Σᵢ ⟨X, Sᵢ X Aᵢ⟩."""
        matrix = self._matrix(vector)
        total = torch.zeros_like(vector[..., 0])
        for outputs, inputs in self._pairs():
            total = total + (matrix * (outputs @ matrix @ inputs)).sum((-2, -1))
        return total

    def logdet(self) -> Tensor:
        """log |P|."""
        return self.log_determinant

    def trace(self, prior: base.Prior) -> Tensor:
        """Σ_ij (Uᵀ Γ_S U)_ii (Vᵀ Γ_A V)_jj / R_ij."""
        if not isinstance(prior, Prior):
            raise TypeError(f"expected the Kronecker family's Prior, got {type(prior).__module__}.Prior")
        left = congruence_diagonal(self.left, prior.outputs, prior.diagonal)
        right = congruence_diagonal(self.right, prior.inputs, prior.diagonal)
        if self.spectrum is None:
            return left.sum(-1) * right.sum(-1)
        return (left[..., :, None] * right[..., None, :] / self.spectrum).sum((-2, -1))

    def to_dense(self) -> Tensor:
        """Σᵢ Sᵢ ⊗ Aᵢ."""
        dense = [kronecker_product(outputs, inputs) for outputs, inputs in self._pairs()]
        return torch.stack(dense).sum(0)

    def layer_covariance(self) -> base.FactoredCovariance:
        """U, V and R."""
        return base.FactoredCovariance(self.left, self.right, self.spectrum)

    def as_prior(self) -> Prior:
        """P as one Kronecker product.

        Factored: P itself. Exact: with R replaced by the outer product of its row and column means, which is P itself
        where R has rank one (a Fisher of zero, or a 1×1 factor) and otherwise its nearest such match in the mean.
        """
        (outputs, inputs), *rest = self._pairs()
        if self.spectrum is None:
            return Prior(inputs, outputs, diagonal=False)
        [(outputs, inputs)] = rest
        rows = self.spectrum.mean(-1)
        columns = self.spectrum.mean(-2) / self.spectrum.mean((-2, -1))[..., None]
        # U Uᵀ = Γ_S⁻¹, so U⁻¹ = Uᵀ Γ_S: back to weights without another factorisation.
        back_s, back_a = outputs @ self.left, inputs @ self.right
        return Prior((back_a * columns[..., None, :]) @ back_a.mT, (back_s * rows[..., None, :]) @ back_s.mT, False)

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
        """left X right."""
        matrix = vector.reshape(*vector.shape[:-1], self.left.shape[-1], self.right.shape[-1])
        return matmul(matmul(self.left, matrix), self.right).flatten(-2)


def in_eigenbasis(noise: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """E_Sᵀ Z E_A: as standard normal as Z, and it makes the square root independent of the choice of eigenvectors.

    Their signs, and their directions where eigenvalues are equal, hang on rounding; a draw should not.
    """
    return between(left.mT, noise, right)


def kronecker_product(left: Tensor, right: Tensor) -> Tensor:
    """`torch.kron` of the last two dimensions, batched over the others."""
    product = left[..., :, None, :, None] * right[..., None, :, None, :]
    return product.flatten(-4, -3).flatten(-2, -1)


def congruence_diagonal(basis: Tensor, factor: Tensor, diagonal: bool) -> Tensor:
    """The diagonal of basisᵀ factor basis; `factor` is given by its own diagonal if `diagonal`."""
    weighted = factor[..., :, None] * basis if diagonal else factor @ basis
    return (basis * weighted).sum(-2)


def _trace(factor: Tensor, diagonal: bool) -> Tensor:
    return (factor if diagonal else factor.diagonal(dim1=-2, dim2=-1)).sum(-1)


def _floor(factor: Tensor, diagonal: bool) -> Tensor:
    return factor.amin(-1) if diagonal else rounding_floor(factor)


def _combine(c: Tensor, factor: Tensor, p: Tensor, prior: Tensor, diagonal: bool) -> Tensor:
    combined = c[..., None, None] * factor
    if diagonal:
        combined.diagonal(dim1=-2, dim2=-1).add_(p[..., None] * prior)
        return combined
    return combined.add_(p[..., None, None] * prior)


def _whitener(factor: Tensor, diagonal: bool) -> tuple[Tensor, Tensor]:
    """(W, log |factor|) with W Wᵀ = factor⁻¹."""
    if not diagonal:
        return inverse_root(factor, rounding_floor(factor))
    if not bool(((factor > 0) & torch.isfinite(factor)).all()):
        condition = math.inf if bool(torch.isfinite(factor).all()) else math.nan
        raise factorisation_error(factor.shape[-1], condition, float(factor.min()))
    return torch.diag_embed(factor.rsqrt()), factor.log().sum(-1)
