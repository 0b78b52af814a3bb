"""Kronecker factors of a layer's matrix X, out × in: the prior, its addition to a Fisher by equation (11), products.

A weight matrix is flattened row by row, so that (S ⊗ A) x is S X Aᵀ flattened. The Kronecker, the eigenvalue-corrected
and the block-tridiagonal family are built of these.
"""

import dataclasses
import math
from typing import Self

import torch
from torch import Tensor

from noisygrad.families import base
from noisygrad.kernels.factorisation import (
    Bound,
    Unrounded,
    capturing,
    factorisation_error,
    inverse_root,
    rounding_floor,
)
from noisygrad.kernels.products import between


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
        return dataclasses.replace(self, outputs=self.outputs * factor)

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

    def trace(self, left: Tensor, right: Tensor, spectrum: Tensor | None) -> Tensor:
        """tr(Γ (U ⊗ V) diag(1/R) (U ⊗ V)ᵀ) = Σ_ij (Uᵀ Γ_S U)_ii (Vᵀ Γ_A V)_jj / R_ij; None for an R of ones."""
        outputs = _congruence_diagonal(left, self.outputs, self.diagonal)
        inputs = _congruence_diagonal(right, self.inputs, self.diagonal)
        if spectrum is None:
            return outputs.sum(-1) * inputs.sum(-1)
        return (outputs[..., :, None] * inputs[..., None, :] / spectrum).sum((-2, -1))

    def matrices(self) -> tuple[Tensor, Tensor]:
        """(Γ_S, Γ_A) as matrices."""
        if self.diagonal:
            return torch.diag_embed(self.outputs), torch.diag_embed(self.inputs)
        return self.outputs, self.inputs


def identity(factor: Tensor, diagonal: bool) -> Tensor:
    """The identity matrix of the size, type and device of a prior's factor, which is its own diagonal if `diagonal`."""
    return torch.diag_embed(factor.new_ones(factor.shape if diagonal else factor.shape[:-1]))


@dataclasses.dataclass
class DampedFactors:
    """A^γ = cA·A + pA·Γ_A and S^γ = cS·S + pS·Γ_S, with the four coefficients, `[...]`, and what bounds each."""

    inputs: Tensor
    outputs: Tensor
    fisher_inputs: Tensor
    fisher_outputs: Tensor
    prior_inputs: Tensor
    prior_outputs: Tensor
    bound_inputs: Bound
    bound_outputs: Bound


def damped_factors(inputs: Tensor, outputs: Tensor, prior: Prior) -> DampedFactors:
    """Equation (11) of the paper: add the prior to each factor, (S + Γ_S/π) ⊗ (A + πΓ_A).

    π balances the traces, π² = (tr A / tr Γ_A) / (tr S / tr Γ_S), which for Γ = γI is the paper's: A + π'√γ I with
    π'² = (tr A / dim A) / (tr S / dim S), however γ is divided between Γ_A and Γ_S. It may be of any size, so it is
    divided out of one factor and multiplied into the other: A^γ = A/π + Γ_A and S^γ = πS + Γ_S. Where S ⊗ A = 0 (a dead
    layer) the result is the prior. A 1×1 factor becomes 1, its value multiplied into the other factor: then the sum is
    exact.
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
        pi = torch.where(balanced, upper, 1.0) / torch.where(balanced, lower, 1.0)
        c_a, c_s = alive / pi, alive * pi
        p_a = p_s = torch.ones_like(pi)
    damped_a = _combine(c_a, inputs, p_a, prior.inputs, prior.diagonal)
    damped_s = _combine(c_s, outputs, p_s, prior.outputs, prior.diagonal)
    if outputs.shape[-1] == 1:
        damped_s = torch.ones_like(damped_s)
    elif inputs.shape[-1] == 1:
        damped_a = torch.ones_like(damped_a)
    bound_a = _bound(c_a, inputs, p_a, prior.inputs, prior.diagonal)
    bound_s = _bound(c_s, outputs, p_s, prior.outputs, prior.diagonal)
    return DampedFactors(damped_a, damped_s, c_a, c_s, p_a, p_s, bound_a, bound_s)


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


def in_eigenbasis(noise: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """E_Sᵀ Z E_A: as standard normal as Z, and it makes the square root independent of the choice of eigenvectors.

    Their signs, and their directions where eigenvalues are equal, hang on rounding; a draw should not.
    """
    return between(left.mT, noise, right)


def kronecker_product(left: Tensor, right: Tensor) -> Tensor:
    """`torch.kron` of the last two dimensions, batched over the others."""
    product = left[..., :, None, :, None] * right[..., None, :, None, :]
    return product.flatten(-4, -3).flatten(-2, -1)


def _congruence_diagonal(basis: Tensor, factor: Tensor, diagonal: bool) -> Tensor:
    """The diagonal of basisᵀ factor basis; `factor` is given by its own diagonal if `diagonal`."""
    weighted = factor[..., :, None] * basis if diagonal else factor @ basis
    return (basis * weighted).sum(-2)


def _trace(factor: Tensor, diagonal: bool) -> Tensor:
    return (factor if diagonal else factor.diagonal(dim1=-2, dim2=-1)).sum(-1)


def _bound(c: Tensor, factor: Tensor, p: Tensor, prior: Tensor, diagonal: bool) -> Bound:
    """Of `_combine` of these. Of a prior that is a matrix no eigenvalue is known, so rounding is not looked at."""
    if not diagonal:
        return Bound(p * rounding_floor(prior))

    def unrounded() -> Unrounded:
        """c (A + p/c Γ): in A no digit is lost."""
        alive = c != 0
        scale = torch.where(alive, c, 1.0).double()
        ridge = (p.double() / scale)[..., None] * prior.double()
        return Unrounded(scale, alive[..., None, None] * factor.double(), ridge)

    return Bound(p * prior.amin(-1), unrounded)


def _combine(c: Tensor, factor: Tensor, p: Tensor, prior: Tensor, diagonal: bool) -> Tensor:
    combined = c[..., None, None] * factor
    if diagonal:
        combined.diagonal(dim1=-2, dim2=-1).add_(p[..., None] * prior)
        return combined
    return combined.add_(p[..., None, None] * prior)


def whitener(factor: Tensor, diagonal: bool) -> tuple[Tensor, Tensor]:
    """(W, log |factor|) with W Wᵀ = factor⁻¹; W is given by its own diagonal if `diagonal`, else it is triangular."""
    if not diagonal:
        return inverse_root(factor, rounding_floor(factor))
    if not capturing() and not bool(((factor > 0) & torch.isfinite(factor)).all()):
        condition = math.inf if bool(torch.isfinite(factor).all()) else math.nan
        raise factorisation_error(factor.shape[-1], condition, float(factor.min()))
    return factor.rsqrt(), factor.log().sum(-1)
