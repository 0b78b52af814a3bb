"""The block-tridiagonal family: the Fisher of consecutive Linear layers, damped by equation (11), as a chain.

The algebra of such Gaussians is in `chain`.
"""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from noisygrad.families import base, factors
from noisygrad.families.base import DampingMode
from noisygrad.families.chain import Blocks, Precision, Prior, factorise_blocks
from noisygrad.families.diagonal import rest_as_diagonal
from noisygrad.families.factors import damped_factors, identity
from noisygrad.families.family import Family, Part, PrecisionOf, column_precisions, register_family
from noisygrad.families.kronecker import KRONECKER
from noisygrad.families.units import Span, Unit
from noisygrad.kernels.factorisation import Bound
from noisygrad.kernels.products import second_moment

__all__ = ["TRIDIAGONAL", "Precision", "Prior", "Statistics", "Tridiagonal", "damp", "with_damping"]


@dataclasses.dataclass
class Statistics(Blocks, base.Statistics):
    """A_i and S_i of every layer; Ax_i = E[a_i a_{i+1}ᵀ] and Gx_i = E[g_i g_{i+1}ᵀ] of every consecutive pair."""

    def determined(self, precision: Precision) -> Tensor:
        moments = (self.inputs, self.outputs, self.cross_inputs, self.cross_outputs)
        return precision.trace(Prior(*moments, diagonal=False))

    def factorise(self, prior: Prior, damping: float = 0.0, mode: DampingMode = "factored") -> Precision:
        """P with the blocks of F + Γ + γ_ex I, each damped by equation (11); couplings in proportion."""
        if mode == "exact":
            raise ValueError(
                'the block-tridiagonal family supports damping_mode="factored" only; use NoisyKFAC for exact damping'
            )
        return factorise_blocks(*damp(self, with_damping(prior, damping)))


def damp(moments: Blocks, prior: Prior) -> tuple[Statistics, list[tuple[Bound, Bound]]]:
    """Equation (11) for a chain: the damped blocks, and what bounds the eigenvalues of each (A_i, S_i).

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
    return blocks, [(f.bound_inputs, f.bound_outputs) for f in damped]


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
    traceable_modes: ClassVar[tuple[DampingMode, ...]] = ()

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

    def identity(self, prior: base.Prior) -> Statistics:
        """A_i = I, S_i = I, and no coupling."""
        assert isinstance(prior, Prior)

        def moments(sides: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            eyes = tuple(identity(side, prior.diagonal) for side in sides)
            return eyes, tuple(a.new_zeros(*a.shape[:-1], b.shape[-1]) for a, b in pairwise(eyes))

        (inputs, cross_inputs), (outputs, cross_outputs) = moments(prior.inputs), moments(prior.outputs)
        return Statistics(inputs, outputs, cross_inputs, cross_outputs)

    def measure(self, units: Sequence[Unit], passes: Mapping[str, Any], current: base.Statistics) -> base.Statistics:
        """The moments of all layers; a coupling where two layers were seen at the same positions."""
        assert isinstance(current, Statistics)
        # A layer that took no part has no gradient, and its inputs count as they were.
        found = self.unmeasured(current)
        seen = [passes.get(unit.name) for unit in units]
        inputs = [_input_moment(one, old) for one, old in zip(seen, found.inputs, strict=True)]
        outputs = [old if one is None else one.output_moment() for one, old in zip(seen, found.outputs, strict=True)]
        cross_inputs, cross_outputs = list(found.cross_inputs), list(found.cross_outputs)
        for i, (one, after) in enumerate(pairwise(seen)):
            if one is None or after is None or one.gradients.shape[-3:-1] != after.gradients.shape[-3:-1]:
                continue
            cross_inputs[i] = one.cross_input_moment(after)
            positions = one.gradients.shape[-2]
            cross_outputs[i] = second_moment(one.gradients, after.gradients, False, False) * positions
        return Statistics(tuple(inputs), tuple(outputs), tuple(cross_inputs), tuple(cross_outputs))

    def prior(self, span: Span, precision_of: PrecisionOf, like: Tensor) -> Prior:
        columns = [column_precisions(unit, span, precision_of, like) for unit in span.units]
        return Prior.from_columns(columns, [unit.outputs for unit in span.units])

    def cost(self, units: Sequence[Unit]) -> float:
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
            if not coupled and any(bool(moment.any()) for moment in own):  # none has any before the first measurement
                found[after.name] = f"{after.layer}, not coupled with {before.name}: never seen at the same positions"
        return found


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


def _input_moment(one: Any, old: Tensor) -> Tensor:
    """That of a pass through a layer; the old one where the layer, or what counts of the batch, took no part."""
    if one is None:
        return old
    moment: Tensor = one.input_moment()
    some = one.takes_part()
    return moment if some is None else torch.where(some, moment, old)


TRIDIAGONAL = register_family(Tridiagonal())
