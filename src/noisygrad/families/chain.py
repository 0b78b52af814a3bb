"""Gaussians over a chain of layers in which consecutive layers are correlated (Martens & Grosse 2015, section 4.3).

A chain of layers i = 1 … L has the Fisher blocks F_ii = S_i ⊗ A_i and F_{i,i+1} = Gx_i ⊗ Ax_i. P is the precision that
has these (damped) blocks and whose *inverse* is block-tridiagonal:

    P⁻¹ = Ξᵀ Λ Ξ,   Ξ = I − (Ψ_i above the diagonal),   Ψ_i = F_{i,i+1} F_{i+1,i+1}⁻¹ = ΨG_i ⊗ ΨA_i,
    Λ_i = Σ_i⁻¹,     Σ_i = F_ii − Ψ_i F_{i+1,i+1} Ψ_iᵀ   (Σ_L = F_LL).

Σ_i is a difference of two Kronecker products. In the basis that makes the first one the identity and the second one
diagonal it is R_i = 1 − s2 s1ᵀ, where s1, s2 are the squared canonical correlations of the two layers' inputs and of
their output gradients: Λ_i = (K2 ⊗ K1) diag(1/R_i) (K2 ⊗ K1)ᵀ.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from noisygrad.families import base, factors
from noisygrad.families.factors import in_eigenbasis
from noisygrad.kernels.factorisation import Bound, FactorisationError, inverse_root, rounding_floor, symmetric_eigh
from noisygrad.kernels.products import between


@dataclasses.dataclass
class Blocks(base.TensorRecord):
    """The blocks F_ii = S_i ⊗ A_i and F_{i,i+1} = Gx_i ⊗ Ax_i of a chain."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    cross_inputs: tuple[Tensor, ...]
    cross_outputs: tuple[Tensor, ...]


@dataclasses.dataclass
class Prior(Blocks, base.Prior):
    """Γ: independent layers, by vectors per layer, if `diagonal`; else an earlier fit's blocks, with its couplings."""

    diagonal: bool

    @classmethod
    def from_columns(cls, columns: Sequence[Tensor], outputs: Sequence[int]) -> Self:
        """The prior whose precision depends on the layer and the column only, `[..., in_i]` for each layer."""
        ones = tuple(c.new_ones(*c.shape[:-1], size) for c, size in zip(columns, outputs, strict=True))
        return cls(tuple(columns), ones, (), (), diagonal=True)

    def scaled(self, factor: float) -> Self:
        return dataclasses.replace(
            self,
            outputs=tuple(outputs * factor for outputs in self.outputs),
            cross_outputs=tuple(cross * factor for cross in self.cross_outputs),
        )

    def times(self, vector: Tensor) -> Tensor:
        """Γ v; the first call for a fitted prior factorises its blocks, which are then kept."""
        if not self.diagonal:
            return self._factorised().times(vector)
        rows = [s[..., :, None] * a[..., None, :] for s, a in zip(self.outputs, self.inputs, strict=True)]
        return vector * _join(rows)

    def logdet(self) -> Tensor:
        if not self.diagonal:
            return self._factorised().logdet()
        return torch.stack([layer.logdet() for layer in self.layers()]).sum(0)

    def copy_(self, other: Self) -> Self:
        """Overwrite the tensors in place, and forget the factorisation of the old ones."""
        super().copy_(other)
        self.__dict__.pop("_factors", None)
        return self

    def layers(self) -> list[factors.Prior]:
        """The diagonal blocks."""
        return [factors.Prior(a, s, self.diagonal) for a, s in zip(self.inputs, self.outputs, strict=True)]

    def _factorised(self) -> Precision:
        # Not a field: it is derived, and neither saved nor copied. The prior is multiplied with at every step.
        known: Precision | None = self.__dict__.get("_factors")
        if known is None:
            pairs = zip(self.inputs, self.outputs, strict=True)
            bounds = [(Bound(rounding_floor(a)), Bound(rounding_floor(s))) for a, s in pairs]
            known = self.__dict__["_factors"] = factorise_blocks(self, bounds)
        return known


@dataclasses.dataclass
class Precision(Blocks, base.Precision):
    """P⁻¹ = Ξᵀ Λ Ξ of a chain: ΨA and ΨG per pair; K1 = `right`, K2 = `left`, R = `spectrum` per layer; P's blocks."""

    psi_inputs: tuple[Tensor, ...]
    psi_outputs: tuple[Tensor, ...]
    left: tuple[Tensor, ...]
    right: tuple[Tensor, ...]
    spectrum: tuple[Tensor, ...]
    left_basis: tuple[Tensor, ...]
    right_basis: tuple[Tensor, ...]
    log_determinant: Tensor

    def drop_terms(self) -> Self:
        return dataclasses.replace(self, inputs=(), outputs=(), cross_inputs=(), cross_outputs=())

    def solve(self, vector: Tensor) -> Tensor:
        """Ξᵀ Λ Ξ v."""
        parts = self._split(vector)
        # T_i = V_i − ΨG V_{i+1} ΨAᵀ
        parts = [
            part - psi_s @ after @ psi_a.mT
            for part, after, psi_s, psi_a in zip(parts, parts[1:], self.psi_outputs, self.psi_inputs, strict=False)
        ] + parts[-1:]
        layers = zip(parts, self.left, self.right, self.spectrum, strict=True)
        return self._bottom_up([left @ ((left.mT @ part @ right) / r) @ right.mT for part, left, right, r in layers])

    def sample(self, noise: Tensor) -> Tensor:
        """Ξᵀ Λ^½ z: one pass, a moving average over the layers.

        Drawing the top layer and then each lower one given the one above would have covariance P, not P⁻¹.
        """
        parts = self._split(noise)
        for i, bases in enumerate(zip(self.left_basis, self.right_basis, strict=True)):
            parts[i] = in_eigenbasis(parts[i], *bases)
        layers = zip(parts, self.left, self.right, self.spectrum, strict=True)
        return self._bottom_up([between(left, part * r.rsqrt(), right.mT) for part, left, right, r in layers])

    def times(self, vector: Tensor) -> Tensor:
        """P v = Ξ⁻¹ Λ⁻¹ Ξ⁻ᵀ v."""
        parts = [self._conditional(i, part) for i, part in enumerate(self._ascend(vector))]
        for i in reversed(range(len(self.psi_outputs))):
            parts[i] = parts[i] + self.psi_outputs[i] @ parts[i + 1] @ self.psi_inputs[i].mT
        return _join(parts)

    def quad(self, vector: Tensor) -> Tensor:
        """Σ_i ⟨U_i, Σ_i U_i⟩ with u = Ξ⁻ᵀ v."""
        parts = enumerate(self._ascend(vector))
        return torch.stack([(part * self._conditional(i, part)).sum((-2, -1)) for i, part in parts]).sum(0)

    def logdet(self) -> Tensor:
        """Σ_i log |Σ_i|: Ξ has a unit diagonal."""
        return self.log_determinant

    def trace(self, prior: base.Prior) -> Tensor:
        """tr(Γ Ξᵀ Λ Ξ), which needs only Γ's own tridiagonal blocks, as P⁻¹ has no others.

        With Λ_i = Σ_jk (1/R_jk) of outer products, each of the blocks Λ_i, Ψ_iᵀ Λ_i Ψ_i and −Λ_i Ψ_i (twice) is a sum
        over j, k of a diagonal of outputs times a diagonal of inputs.
        """
        if not isinstance(prior, Prior):
            raise TypeError(f"expected the tridiagonal family's Prior, got {type(prior).__module__}.Prior")
        layers = prior.layers()
        total = torch.zeros_like(self.log_determinant)
        for i, (left, right, r) in enumerate(zip(self.left, self.right, self.spectrum, strict=True)):
            total = total + layers[i].trace(left, right, r)
            if i < len(self.psi_outputs):
                psi_left, psi_right = self.psi_outputs[i].mT @ left, self.psi_inputs[i].mT @ right
                total = total + layers[i + 1].trace(psi_left, psi_right, r)
                if not prior.diagonal:
                    outputs = (left * (prior.cross_outputs[i] @ psi_left)).sum(-2)
                    inputs = (right * (prior.cross_inputs[i] @ psi_right)).sum(-2)
                    total = total - 2.0 * (outputs[..., :, None] * inputs[..., None, :] / r).sum((-2, -1))
        return total

    def to_dense(self) -> Tensor:
        size = sum(left.shape[-1] * right.shape[-1] for left, right in zip(self.left, self.right, strict=True))
        return base.matrix_of(self.times, self.log_determinant.unsqueeze(-1).expand(*self.log_determinant.shape, size))

    def as_prior(self) -> Prior:
        """The prior with P's blocks, couplings included: P itself."""
        self._require_blocks()
        return Prior(self.inputs, self.outputs, self.cross_inputs, self.cross_outputs, diagonal=False)

    def _split(self, vector: Tensor) -> list[Tensor]:
        shapes = [(left.shape[-1], right.shape[-1]) for left, right in zip(self.left, self.right, strict=True)]
        parts = vector.split([rows * columns for rows, columns in shapes], dim=-1)
        return [part.reshape(*part.shape[:-1], *shape) for part, shape in zip(parts, shapes, strict=True)]

    def _bottom_up(self, parts: list[Tensor]) -> Tensor:
        """Ξᵀ y: U_i = Y_i − ΨG_{i−1}ᵀ Y_{i−1} ΨA_{i−1}."""
        below = [
            between(psi_s.mT, y, psi_a)
            for y, psi_s, psi_a in zip(parts, self.psi_outputs, self.psi_inputs, strict=False)
        ]
        return _join(parts[:1] + [part - lower for part, lower in zip(parts[1:], below, strict=True)])

    def _ascend(self, vector: Tensor) -> list[Tensor]:
        """u = Ξ⁻ᵀ v: U_{i+1} = V_{i+1} + ΨG_iᵀ U_i ΨA_i."""
        parts = self._split(vector)
        for i, (psi_s, psi_a) in enumerate(zip(self.psi_outputs, self.psi_inputs, strict=True)):
            parts[i + 1] = parts[i + 1] + psi_s.mT @ parts[i] @ psi_a
        return parts

    def _conditional(self, i: int, part: Tensor) -> Tensor:
        """Σ_i X = S_i X A_i − (ΨG S_{i+1} ΨGᵀ) X (ΨA A_{i+1} ΨAᵀ)."""
        self._require_blocks()
        product = self.outputs[i] @ part @ self.inputs[i]
        if i == len(self.psi_outputs):
            return product
        # Ψ_i F_{i+1,i+1} = F_{i,i+1}
        explained_s = self.psi_outputs[i] @ self.cross_outputs[i].mT
        explained_a = self.cross_inputs[i] @ self.psi_inputs[i].mT
        return product - explained_s @ part @ explained_a

    def _require_blocks(self) -> None:
        if not self.inputs:
            raise RuntimeError("this Precision was stripped by drop_terms(); use the original for quad and to_dense")


def factorise_blocks(blocks: Blocks, bounds: Sequence[tuple[Bound, Bound]]) -> Precision:
    """Ξ and Λ from damped blocks, by Cholesky and one `eigh` for each side of each coupling."""
    roots_a, roots_s, first = [], [], 0
    for a, s, (bound_a, bound_s) in zip(blocks.inputs, blocks.outputs, bounds, strict=True):
        try:
            roots_a.append(inverse_root(a, *bound_a))
            roots_s.append(inverse_root(s, *bound_s))
        except FactorisationError as error:
            error.weights = [first]
            raise
        first += a.shape[-1] * s.shape[-1]
    lists: list[list[Tensor]] = [[] for _ in range(7)]
    psi_a, psi_s, left, right, spectra, bases_s, bases_a = lists
    total = torch.zeros_like(roots_a[0][1])
    for i, ((root_a, logdet_a), (root_s, logdet_s)) in enumerate(zip(roots_a, roots_s, strict=True)):
        total = total + root_a.shape[-1] * logdet_s + root_s.shape[-1] * logdet_a
        if i + 1 < len(roots_a):
            s1 = _correlate(root_a, blocks.cross_inputs[i], roots_a[i + 1][0], bases_a, psi_a)
            s2 = _correlate(root_s, blocks.cross_outputs[i], roots_s[i + 1][0], bases_s, psi_s)
            spectra.append(1.0 - s2[..., :, None] * s1[..., None, :])
        else:
            spectra.append(torch.ones_like(root_s[..., :, :1] * root_a[..., :1, :]))
        left.append(root_s @ bases_s[i] if i < len(bases_s) else root_s)
        right.append(root_a @ bases_a[i] if i < len(bases_a) else root_a)
        total = total + spectra[-1].log().sum((-2, -1))
    terms = (blocks.inputs, blocks.outputs, blocks.cross_inputs, blocks.cross_outputs)
    psi, bases = (tuple(psi_a), tuple(psi_s)), (tuple(bases_s), tuple(bases_a))
    return Precision(*terms, *psi, tuple(left), tuple(right), tuple(spectra), *bases, total)


def _correlate(root: Tensor, cross: Tensor, next_root: Tensor, bases: list[Tensor], psis: list[Tensor]) -> Tensor:
    """Squared canonical correlations s of one side of a coupling; its basis E and its Ψ are appended to the lists.

    With C = rootᵀ cross next_root, the whitened coupling, C Cᵀ = E diag(s) Eᵀ and Ψ = cross · next_root next_rootᵀ.
    """
    half = cross @ next_root
    whitened = root.mT @ half
    s, basis = symmetric_eigh(whitened @ whitened.mT)
    bases.append(basis)
    psis.append(half @ next_root.mT)
    # Damping keeps every correlation below 1; rounding may not.
    return s.clamp(max=1.0 - torch.finfo(s.dtype).eps)


def _join(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat([part.flatten(-2) for part in parts], dim=-1)
