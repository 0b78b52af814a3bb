"""The block-tridiagonal family: the Fisher of consecutive Linear layers, damped by equation (11), as a chain.

The algebra of such Gaussians is in `chain`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from noisygrad.families import base, factors, kronecker
from noisygrad.families.base import DampingMode
from noisygrad.families.chain import Blocks, Precision, Prior, factorise_blocks
from noisygrad.families.diagonal import rest_as_diagonal
from noisygrad.families.factors import damped_factors
from noisygrad.families.family import Family, Part, PrecisionOf, column_precisions, register_family
from noisygrad.families.kronecker import KRONECKER
from noisygrad.families.units import Unit
from noisygrad.kernels.products import second_moment

__all__ = ["TRIDIAGONAL", "Precision", "Prior", "Statistics", "Tridiagonal", "damp", "with_damping"]


@dataclasses.dataclass
class Statistics(base.Statistics):
    """A_i and S_i of every layer; Ax_i = E[a_i a_{i+1}ᵀ] and Gx_i = E[g_i g_{i+1}ᵀ] of every consecutive pair."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    cross_inputs: tuple[Tensor, ...]
    cross_outputs: tuple[Tensor, ...]

    @classmethod
    def identity(
        cls,
        batch: Sequence[int],
        outputs: Sequence[int],
        inputs: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> Self:
        """The moments at the start: identities, and no coupling."""

        def eye(size: int) -> Tensor:
            return torch.eye(size, dtype=dtype, device=device).expand(*batch, size, size).clone()

        def zeros(sizes: tuple[int, int]) -> Tensor:
            return torch.zeros(*batch, *sizes, dtype=dtype, device=device)

        crosses = tuple(map(zeros, pairwise(inputs))), tuple(map(zeros, pairwise(outputs)))
        return cls(tuple(map(eye, inputs)), tuple(map(eye, outputs)), *crosses)

    @classmethod
    def measure(
        cls,
        activations: Sequence[Tensor],
        gradients: Sequence[Tensor],
        constants: Sequence[bool],
        coupled: Sequence[bool],
    ) -> Self:
        """From the layers' inputs `[..., B, T_i, in]` and per-example output gradients `[..., B, T_i, out]`.

        Args:
            activations: one per layer.
            gradients: one per layer.
            constants: whether the layer has a bias, that is, an input of constant 1.
            coupled: for each consecutive pair, whether its coupling is measured (T must agree) or left at zero.
        """
        layers = [
            kronecker.Statistics.measure(a, g, c) for a, g, c in zip(activations, gradients, constants, strict=True)
        ]
        cross_inputs, cross_outputs = [], []
        for i, together in enumerate(coupled):
            (a, a_next), (g, g_next), (c, c_next) = activations[i : i + 2], gradients[i : i + 2], constants[i : i + 2]
            if together and a.shape[-2] != a_next.shape[-2]:
                raise ValueError(
                    f"layers {i} and {i + 1} have {a.shape[-2]} and {a_next.shape[-2]} positions; only layers with "
                    "equally many can be coupled: pass coupled=False for this pair"
                )
            cross_inputs.append(_cross_moment(a, a_next, c, c_next, together))
            cross_outputs.append(_cross_moment(g, g_next, False, False, together) * g.shape[-2])
        inputs, outputs = tuple(layer.inputs for layer in layers), tuple(layer.outputs for layer in layers)
        return cls(inputs, outputs, tuple(cross_inputs), tuple(cross_outputs))

    def factorise(self, prior: Prior, damping: float = 0.0, mode: DampingMode = "factored") -> Precision:
        """P with the blocks of F + Γ + γ_ex I, each damped by equation (11); couplings in proportion."""
        if mode == "exact":
            raise ValueError(
                'the block-tridiagonal family supports damping_mode="factored" only; use NoisyKFAC for exact damping'
            )
        blocks, floors = damp(self, with_damping(prior, damping))
        return factorise_blocks(blocks, floors)


def damp(moments: Blocks, prior: Prior) -> tuple[Statistics, list[tuple[Tensor, Tensor]]]:
    """Equation (11) for a chain: the damped blocks, and a floor of the eigenvalues of each (A_i, S_i).

    A layer's factors become c·A + p·Γ_A; a coupling becomes √(c_i c_{i+1}) Ax + √(p_i p_{i+1}) Γ_Ax. That is a
    congruence of the joint moments of each pair of layers, and of the prior's, so both stay positive semi-definite.
    """
    damped = [damped_factors(a, s, p) for a, s, p in zip(moments.inputs, moments.outputs, prior.layers(), strict=True)]

    own_a, own_s = [f.fisher_inputs for f in damped], [f.fisher_outputs for f in damped]
    prior_a, prior_s = [f.prior_inputs for f in damped], [f.prior_outputs for f in damped]
    blocks = Statistics(
        tuple(f.inputs for f in damped),
        tuple(f.outputs for f in damped),
        _couple((moments.cross_inputs, own_a), (prior.cross_inputs, prior_a)),
        _couple((moments.cross_outputs, own_s), (prior.cross_outputs, prior_s)),
    )
    return blocks, [(f.floor_inputs, f.floor_outputs) for f in damped]


def with_damping(prior: Prior, damping: float) -> Prior:
    """Γ + γ_ex I: exact for a diagonal prior, by equation (11) for a fitted one."""
    if damping == 0.0:
        return prior
    if prior.diagonal:
        layers = [factors.with_damping(layer, damping) for layer in prior.layers()]
        return Prior(tuple(p.inputs for p in layers), tuple(p.outputs for p in layers), (), (), diagonal=True)
    columns = [torch.full_like(inputs[..., 0], damping) for inputs in prior.inputs]
    blocks, _ = damp(prior, Prior.from_columns(columns, [outputs.shape[-1] for outputs in prior.outputs]))
    return Prior(blocks.inputs, blocks.outputs, blocks.cross_inputs, blocks.cross_outputs, diagonal=False)


def _cross_moment(left: Tensor, right: Tensor, left_constant: bool, right_constant: bool, coupled: bool) -> Tensor:
    if coupled:
        return second_moment(left, right, left_constant, right_constant)
    return left.new_zeros(*left.shape[:-3], left.shape[-1] + left_constant, right.shape[-1] + right_constant)


def _couple(*sources: tuple[Sequence[Tensor], Sequence[Tensor]]) -> tuple[Tensor, ...]:
    """Σ over sources of √(w_i w_{i+1}) cross_i, for every pair; a source without couplings adds nothing."""
    weighted = [
        [
            (first.sqrt() * second.sqrt())[..., None, None] * cross
            for (first, second), cross in zip(pairwise(weights), crosses, strict=True)
        ]
        for crosses, weights in sources
        if crosses
    ]
    return tuple(torch.stack(terms).sum(0) for terms in zip(*weighted, strict=True))


class Tridiagonal(Family):
    """A block for each run of two or more Linear layers; a matrix without a neighbour is a Kronecker block."""

    name: ClassVar[str] = "tridiagonal"

    def partition(self, units: Sequence[Unit], every_unit: Sequence[Unit]) -> Iterator[Part]:
        """The chains first, then what is left of the matrices, then all else."""
        chains = _chains(units, every_unit)
        for chain in chains:
            notes = {after.name: f"{after.layer}, coupled with {before.name}" for before, after in pairwise(chain)}
            yield Part("–".join((chain[0].name, chain[-1].name)), self, tuple(chain), notes)
        chained = {unit for chain in chains for unit in chain}
        for unit in units:
            if unit.kind == "matrix" and unit not in chained:
                note = f"{unit.layer} without a neighbour to couple with: coupling zero"
                yield Part(unit.name, KRONECKER, (unit,), {unit.name: note})
        yield from rest_as_diagonal([unit for unit in units if unit.kind != "matrix"])

    def identity(
        self,
        units: Sequence[Unit],
        batch: Sequence[int],
        prior: base.Prior,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Statistics:
        """A_i = I, S_i = I, and no coupling."""
        del prior
        outputs, inputs = [unit.outputs for unit in units], [unit.inputs for unit in units]
        return Statistics.identity(batch, outputs, inputs, dtype=dtype, device=device)

    def measure(self, units: Sequence[Unit], passes: Mapping[str, Any], current: base.Statistics) -> base.Statistics:
        """The moments of all layers; a coupling where two layers were seen at the same positions."""
        like = next((passes[unit.name] for unit in units if unit.name in passes), None)
        if like is None:
            return self.unmeasured(current)
        activations, gradients = [], []
        for unit in units:
            one = passes.get(unit.name)
            if one is None:  # no gradient, in the shape of another layer's
                activations.append(
                    like.activations.new_zeros(*like.activations.shape[:-1], unit.inputs - unit.constant)
                )
                gradients.append(like.gradients.new_zeros(*like.gradients.shape[:-1], unit.outputs))
            else:
                activations.append(one.activations)
                gradients.append(one.gradients)
        seen = [unit.name in passes for unit in units]
        constants = [passes[unit.name].constant if unit.name in passes else unit.constant for unit in units]
        coupled = [
            g.shape[-3:-1] == g_next.shape[-3:-1] and before and after
            for (g, g_next), (before, after) in zip(pairwise(gradients), pairwise(seen), strict=True)
        ]
        measured = Statistics.measure(activations, gradients, constants, coupled)
        if all(seen) or not isinstance(current, Statistics):
            return measured
        pairs = zip(seen, measured.inputs, current.inputs, strict=True)
        return dataclasses.replace(measured, inputs=tuple(new if own else old for own, new, old in pairs)).clone()

    def unmeasured(self, current: base.Statistics) -> base.Statistics:
        """No gradients; the A_i as they were."""
        assert isinstance(current, Statistics)
        return dataclasses.replace(current.map(torch.zeros_like), inputs=current.clone().inputs)

    def prior(
        self,
        units: Sequence[Unit],
        batch: Sequence[int],
        precision_of: PrecisionOf,
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Prior:
        """A precision for each column of each layer."""
        columns = [column_precisions(unit, batch, precision_of, dtype=dtype, device=device) for unit in units]
        return Prior.from_columns(columns, [unit.outputs for unit in units])

    def cost(self, units: Sequence[Unit]) -> float:
        """The cubes of the factors' sizes."""
        return KRONECKER.cost(units)

    def pieces(self, units: Sequence[Unit], statistics: base.Statistics) -> list[tuple[str, Tensor]]:
        """All moments; a coupling is its lower layer's."""
        assert isinstance(statistics, Statistics)
        names = [unit.name for unit in units]
        owners = (names, names, names[:-1], names[:-1])
        kinds = (statistics.inputs, statistics.outputs, statistics.cross_inputs, statistics.cross_outputs)
        return [pair for own, kind in zip(owners, kinds, strict=True) for pair in zip(own, kind, strict=True)]

    def notes(self, units: Sequence[Unit], statistics: base.Statistics) -> dict[str, str]:
        """Layers that were measured, but never together with the one before."""
        if not isinstance(statistics, Statistics):
            return {}
        found = {}
        for i, (before, after) in enumerate(pairwise(units)):
            own = (*statistics.inputs[i : i + 2], *statistics.outputs[i : i + 2])
            coupled = bool(statistics.cross_inputs[i].any()) or bool(statistics.cross_outputs[i].any())
            if not coupled and not all(map(_is_identity, own)):  # which all moments are at the start
                found[after.name] = f"{after.layer}, not coupled with {before.name}: never seen at the same positions"
        return found

    def traceable(self, mode: DampingMode) -> bool:
        """A coupling takes eigenvectors."""
        del mode
        return False


def _chains(units: Sequence[Unit], every_unit: Sequence[Unit]) -> list[list[Unit]]:
    """Runs of two or more Linear layers that follow one another; any other layer with a matrix ends a run."""
    chains: list[list[Unit]] = [[]]
    mine = set(units)
    for unit in every_unit:
        if unit.chainable and unit in mine:
            chains[-1].append(unit)
        elif unit.kind in {"matrix", "embedding"}:
            chains.append([])
    return [chain for chain in chains if len(chain) > 1]


def _is_identity(moment: Tensor) -> bool:
    return bool((moment == torch.eye(moment.shape[-1], dtype=moment.dtype, device=moment.device)).all())


TRIDIAGONAL = register_family(Tridiagonal())
