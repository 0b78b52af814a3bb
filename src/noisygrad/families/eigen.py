"""The eigenvalue-corrected Kronecker family: a layer's Fisher block is diagonal in a Kronecker basis (noisy EK-FAC).

The basis is L ⊗ V. L = W_S U_S, where W_S W_Sᵀ = Γ_S⁻¹ whitens the prior Γ = Γ_S ⊗ Γ_A and U_S holds the orthonormal
eigenvectors of W_Sᵀ S W_S; V is the same for the inputs. So (L ⊗ V)ᵀ Γ (L ⊗ V) = I, and with R the mean square of one
example's gradient in this basis, P = F̄ + Γ is diagonal in it: P⁻¹ = (L ⊗ V) diag(1/(R + 1)) (L ⊗ V)ᵀ.

`kronecker` in its exact mode is the special case R = s aᵀ, with s and a the eigenvalues. R holds the Fisher's true
diagonal in the basis instead, which for the same examples is never farther from the Fisher in Frobenius norm, if the
prior is isotropic.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from noisygrad.families import base, factors, kronecker
from noisygrad.families.base import DampingMode
from noisygrad.families.factors import Prior, kronecker_product
from noisygrad.families.family import Reads, register_family
from noisygrad.families.units import Unit
from noisygrad.kernels.factorisation import capturing, factorisation_error, symmetric_eigh
from noisygrad.kernels.products import between, matmul

__all__ = ["EIGEN", "Eigen", "Precision", "Prior", "Statistics"]


@dataclasses.dataclass
class Statistics(base.Statistics):
    """A (`inputs`), S (`outputs`), the bases L (`left`) and V (`right`), and R (`fisher`, `[..., out, in]`).

    A, S and R are moving averages (`averages`). L and V are not: `refresh_basis_` replaces them. They belong to one
    prior, and every method that takes a prior has to be given that one.
    """

    inputs: Tensor
    outputs: Tensor
    left: Tensor
    right: Tensor
    fisher: Tensor

    def averages(self) -> dict[str, Tensor]:
        return {"inputs": self.inputs, "outputs": self.outputs, "fisher": self.fisher}

    def basis_tensors(self) -> dict[str, Tensor]:
        return {"left": self.left, "right": self.right, "fisher": self.fisher}

    @torch.no_grad()
    def add_floor_(self, floor: Tensor | float) -> None:
        """In place: F + floor · I, exact for an isotropic prior; otherwise I is replaced by its diagonal in the basis.

        A and S, which only determine the next bases, stay as they are.
        """
        self.fisher.add_(_squared_lengths(self.left, self.right) * floor)

    def with_identity(self, share: Tensor | float) -> Self:
        """R + share · (I's diagonal in the basis − R); the bases, and what determines them, stay as they are."""
        squared_lengths = _squared_lengths(self.left, self.right)
        return dataclasses.replace(self, fisher=self.fisher * (1.0 - share) + squared_lengths * share)

    def determined(self, precision: kronecker.Precision) -> Tensor:
        assert precision.spectrum is not None
        return (self.fisher / precision.spectrum).sum((-2, -1))

    @torch.no_grad()
    def refresh_basis_(self, prior: Prior) -> None:
        """In place: new bases from A and S as they are now, and R as they say, with what R has shown beyond them.

        In the new bases S ⊗ A is diagonal: s aᵀ. To it comes how much R differs, in the old bases, from the diagonal of
        S ⊗ A there, as it is seen in the new ones. So what R has averaged in bases that have turned since does not
        blur it: where S ⊗ A is the Fisher, R is s aᵀ. This reads on the host, so it cannot be
        part of a CUDA graph. Raises FactorisationError where something is not finite or cannot be decomposed, and
        ValueError where the bases belong to another prior; then nothing has changed.
        """
        rows, _, old_left = _side(prior.outputs, self.left, prior.diagonal)
        columns, _, old_right = _side(prior.inputs, self.right, prior.diagonal)
        _check(self.fisher + 1.0, old_left, old_right, 0.0)
        left = _eigenvectors(self.outputs, rows, prior.diagonal, old_left)
        right = _eigenvectors(self.inputs, columns, prior.diagonal, old_right)
        # M = L_newᵀ Γ L_old is a rotation from the old basis to the new one, of which R takes the squares.
        turn_left, turn_right = matmul(left.mT, old_left).square_(), matmul(right.mT, old_right).square_()
        beyond = self.fisher - _model(self.left, self.outputs, self.right, self.inputs)
        new_left, new_right = _times(rows, left, prior.diagonal), _times(columns, right, prior.diagonal)
        model = _model(new_left, self.outputs, new_right, self.inputs)
        fisher = (model + matmul(matmul(turn_left, beyond), turn_right.mT)).clamp_(min=0.0)
        self.left.copy_(new_left)
        self.right.copy_(new_right)
        self.fisher.copy_(fisher)

    def factorise(self, prior: Prior, damping: float = 0.0, mode: DampingMode = "factored") -> Precision:
        """P = F̄ + Γ + γ_ex I; `mode` changes nothing. No eigendecomposition is made here (`refresh_basis_`).

        γ_ex I is exact for an isotropic prior; otherwise it is replaced by its diagonal in the basis. Raises ValueError
        where the bases belong to another prior.
        """
        _, logdet_s, left_basis = _side(prior.outputs, self.left, prior.diagonal)
        _, logdet_a, right_basis = _side(prior.inputs, self.right, prior.diagonal)
        spectrum = self.fisher + 1.0
        if damping:
            spectrum.add_(_squared_lengths(self.left, self.right), alpha=damping)
        if not capturing():
            _check(spectrum, left_basis, right_basis, damping)
        outputs, inputs = spectrum.shape[-2:]
        logdet = inputs * logdet_s + outputs * logdet_a + spectrum.log().sum((-2, -1))
        return Precision(
            left=self.left.clone(),
            right=self.right.clone(),
            spectrum=spectrum,
            terms=prior.matrices(),
            log_determinant=logdet,
            left_basis=left_basis,
            right_basis=right_basis,
        )


@dataclasses.dataclass
class Precision(kronecker.Precision):
    """P⁻¹ = (L ⊗ V) diag(1/`spectrum`) (L ⊗ V)ᵀ, with L = `left` and V = `right`.

    `terms` are (Γ_S, Γ_A). L Lᵀ = Γ_S⁻¹ makes L⁻ᵀ = Γ_S L, so P = B diag(`spectrum`) Bᵀ with B = Γ_S L ⊗ Γ_A V. The
    bases are the orthonormal U_S and U_A: see `factors.in_eigenbasis`.
    """

    def quad(self, vector: Tensor) -> Tensor:
        """Σ_ij spectrum_ij (Lᵀ Γ_S X Γ_A V)_ij²."""
        rows, columns, spectrum = self._dual()
        return (spectrum * between(rows.mT, self._matrix(vector), columns).square()).sum((-2, -1))

    def to_dense(self) -> Tensor:
        """B diag(spectrum) Bᵀ with B = Γ_S L ⊗ Γ_A V."""
        rows, columns, spectrum = self._dual()
        dual = kronecker_product(rows, columns)
        return (dual * spectrum.flatten(-2)[..., None, :]) @ dual.mT


def _times(factor: Tensor, matrix: Tensor, diagonal: bool) -> Tensor:
    """Γ X; `factor` is given by its own diagonal if `diagonal`."""
    return factor[..., :, None] * matrix if diagonal else matmul(factor, matrix)


def _side(factor: Tensor, basis: Tensor, diagonal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(W, log |factor|, U) of one factor of the prior and `basis` = W U."""
    whitener, logdet = factors.whitener(factor, diagonal)
    if diagonal:
        return whitener, logdet, basis / whitener[..., :, None]
    return whitener, logdet, torch.linalg.solve_triangular(whitener, basis, upper=True)


def _eigenvectors(moment: Tensor, whitener: Tensor, diagonal: bool, old: Tensor | None = None) -> Tensor:
    """Those of Wᵀ `moment` W; where eigenvalues are equal, the ones of the `old` basis.

    Directions that no example has shown have equal eigenvalues. Rounding would choose among their bases, and R, which
    is measured in the one chosen, would differ from machine to machine. Equal are those that differ by less than the
    root of rounding (3e-4 in float32) times their mean: below that the old basis stays, in part.
    """
    if diagonal:
        whitened = whitener[..., :, None] * moment * whitener[..., None, :]
    else:
        whitened = matmul(matmul(whitener.mT, moment), whitener)
    if old is None:
        return symmetric_eigh(whitened)[1]
    seen = matmul(matmul(old.mT, whitened), old)
    spread = torch.linspace(
        0.0, torch.finfo(seen.dtype).eps ** 0.5, seen.shape[-1], dtype=seen.dtype, device=seen.device
    )
    seen.diagonal(dim1=-2, dim2=-1).add_(spread * seen.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True))
    return matmul(old, symmetric_eigh(seen)[1])


def _identity_basis(factor: Tensor, diagonal: bool) -> Tensor:
    """W U, in which the prior's `factor` and the identity are both diagonal."""
    whitener, _ = factors.whitener(factor, diagonal)
    if diagonal:
        return torch.diag_embed(whitener)
    return matmul(whitener, _eigenvectors(factors.identity(factor, diagonal), whitener, diagonal))


def _squared_lengths(left: Tensor, right: Tensor) -> Tensor:
    """The diagonal of (L ⊗ V)ᵀ (L ⊗ V), the identity's in the basis, `[..., out, in]`."""
    return left.square().sum(-2)[..., :, None] * right.square().sum(-2)[..., None, :]


def _model(left: Tensor, outputs: Tensor, right: Tensor, inputs: Tensor) -> Tensor:
    """The diagonal of (L ⊗ V)ᵀ (S ⊗ A) (L ⊗ V), `[..., out, in]`."""
    rows, columns = ((side * matmul(moment, side)).sum(-2) for side, moment in ((left, outputs), (right, inputs)))
    return rows[..., :, None] * columns[..., None, :]


def _check(spectrum: Tensor, left: Tensor, right: Tensor, damping: float) -> None:
    """Raise where the spectrum is not finite or not positive, or U_S or U_A is not orthonormal; one host read."""
    lengths = torch.stack([side.square().sum((-2, -1)) / side.shape[-1] for side in (left, right)])
    flags = [
        torch.isfinite(spectrum).all() & torch.isfinite(lengths).all(),
        (spectrum > 0).all(),
        ((lengths - 1.0).abs() < 0.1).all(),  # rounding is far smaller, even with a badly conditioned prior in float32
    ]
    finite, positive, same_prior = torch.stack(flags).tolist()
    if not (finite and positive):
        raise factorisation_error(spectrum.shape[-2:].numel(), math.inf if finite else math.nan, damping)
    if not same_prior:
        raise ValueError(
            "the bases of these statistics belong to another prior than the one given; give the prior that identity() "
            "was given"
        )


class Eigen(kronecker.Kronecker):
    """The blocks of the Kronecker family, each with an eigenbasis of its own."""

    name: ClassVar[str] = "eigen"
    reads: ClassVar[Reads] = "basis"
    damping_modes: ClassVar[tuple[DampingMode, ...]] = ("factored",)
    stacking: ClassVar[Mapping[str, tuple[int, ...]] | None] = None
    proper_prior: ClassVar[bool] = True
    traceable_modes: ClassVar[tuple[DampingMode, ...]] = ()

    def identity(self, prior: base.Prior) -> Statistics:
        """F̄ = I in a basis that whitens the prior; `FactorisationError` where that is improper or not finite."""
        assert isinstance(prior, Prior)
        plain = super().identity(prior).tensors()
        left, right = (_identity_basis(factor, prior.diagonal) for factor in (prior.outputs, prior.inputs))
        return Statistics(plain["inputs"], plain["outputs"], left, right, _squared_lengths(left, right))

    def measure(self, units: Sequence[Unit], passes: Mapping[str, Any], current: base.Statistics) -> Statistics:
        """A, S and, in the bases of `current`, which the result shares, R."""
        (unit,) = units
        assert isinstance(current, Statistics)
        if unit.name not in passes:
            return self.unmeasured(current)
        one = passes[unit.name]
        squares = one.squares_in_basis(current.left, current.right)
        moments = one.input_moment(), one.output_moment()
        measured = Statistics(*moments, current.left, current.right, squares / one.examples)
        some = one.takes_part()
        return measured if some is None else measured.keep_inputs_(current, some)

    def cost(self, units: Sequence[Unit]) -> float:
        """Some ten Cholesky factorisations of each factor."""
        return 10.0 * super().cost(units)

    def pieces(self, units: Sequence[Unit], statistics: base.Statistics) -> list[tuple[str, Tensor]]:
        """The diagonals of A and S, and all of R."""
        assert isinstance(statistics, Statistics)
        (unit,) = units
        moments = (statistics.inputs, statistics.outputs)
        diagonals = [moment.diagonal(dim1=-2, dim2=-1) for moment in moments]
        return [(unit.name, piece) for piece in (*diagonals, statistics.fisher)]

    def fitted_prior_shapes(self, statistics: base.Statistics) -> dict[str, torch.Size]:
        assert isinstance(statistics, Statistics)
        return {"inputs": statistics.inputs.shape, "outputs": statistics.outputs.shape}


EIGEN = register_family(Eigen())
