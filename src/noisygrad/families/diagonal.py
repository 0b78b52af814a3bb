"""The fully factorised family: P is a diagonal, as in noisy Adam (Algorithm 1 of the paper)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from noisygrad.families import base
from noisygrad.families.base import DampingMode, constant_rows, has_constant_rows
from noisygrad.families.family import (
    Family,
    Layout,
    Part,
    Piece,
    PrecisionOf,
    Reads,
    register_family,
    weight_precisions,
)
from noisygrad.families.units import Span, Unit, by_unit, joined
from noisygrad.kernels.factorisation import capturing, factorisation_error, not_positive
from noisygrad.kernels.threads import run_in_threads

LARGE = 100_000
"""From this many weights on, the statistics of a CPU's layers are taken in several threads."""


@dataclasses.dataclass
class Prior(base.Prior):
    """A precision per weight, `[..., n]`; 0 is an improper prior."""

    precision: Tensor

    def scaled(self, factor: float) -> Self:
        rows = self.precision[..., :1] if has_constant_rows(self.precision) else self.precision
        return dataclasses.replace(self, precision=(rows * factor).expand(self.precision.shape))

    def times(self, vector: Tensor) -> Tensor:
        return self.precision * vector

    def logdet(self) -> Tensor:
        return self.precision.log().sum(-1)


@dataclasses.dataclass
class Statistics(base.Statistics):
    """f of Algorithm 1: the diagonal of the Fisher, `[..., n]`."""

    fisher: Tensor

    @torch.no_grad()
    def add_floor_(self, floor: Tensor | float) -> None:
        self.fisher.add_(floor)

    def with_identity(self, share: Tensor | float) -> Self:
        return dataclasses.replace(self, fisher=self.fisher * (1.0 - share) + share)

    def determined(self, precision: Precision) -> Tensor:
        return (self.fisher / precision.diagonal).sum(-1)

    def factorise(self, prior: Prior, damping: float = 0.0, mode: DampingMode = "factored") -> Precision:
        """P = f + Γ + γ_ex; `mode` changes nothing, a diagonal is always damped exactly."""
        diagonal = self.fisher + prior.precision + damping
        if not capturing():
            smallest, largest = (float(value) for value in torch.stack(diagonal.aminmax()).cpu())
            if not (smallest > 0.0 and math.isfinite(largest)):
                condition = math.nan if not math.isfinite(smallest + largest) else math.inf
                raise factorisation_error(diagonal.shape[-1], condition, damping, not_positive(diagonal))
        return Precision(diagonal, diagonal.rsqrt())


@dataclasses.dataclass
class Root(base.Sampler):
    """What a draw needs of P = diag(p)."""

    inverse_root: Tensor

    def sample(self, noise: Tensor) -> Tensor:
        return noise * self.inverse_root

    def perturb(self, mean: Tensor, noise: Tensor, scale: float, out: Tensor | None = None) -> Tensor:
        return torch.addcmul(mean, noise, self.inverse_root, value=scale, out=out)


@dataclasses.dataclass
class Divisor(base.Solver):
    """What a step needs of P = diag(p)."""

    diagonal: Tensor

    def solve(self, vector: Tensor) -> Tensor:
        return vector / self.diagonal


@dataclasses.dataclass
class Precision(Root, Divisor, base.Precision):
    """P = diag(p), kept with p^-½."""

    def sampler(self) -> base.Sampler:
        return Root(self.inverse_root)

    def solver(self) -> base.Solver:
        return Divisor(self.diagonal)

    def quad(self, vector: Tensor) -> Tensor:
        return (self.diagonal * vector.square()).sum(-1)

    def logdet(self) -> Tensor:
        return self.diagonal.log().sum(-1)

    def trace(self, prior: base.Prior) -> Tensor:
        if not isinstance(prior, Prior):
            raise TypeError(f"expected the diagonal family's Prior, got {type(prior).__module__}.Prior")
        return (prior.precision / self.diagonal).sum(-1)

    def to_dense(self) -> Tensor:
        return torch.diag_embed(self.diagonal)

    def layer_covariance(self) -> Tensor:
        return 1.0 / self.diagonal

    def as_prior(self) -> Prior:
        return Prior(self.diagonal)


class Diagonal(Family):
    """All layers of a param group in one block."""

    name: ClassVar[str] = "diagonal"
    layout: ClassVar[Layout] = "memory"
    reads: ClassVar[Reads] = "squares"
    factors_wait: ClassVar[bool] = False

    def partition(self, units: Sequence[Unit], every_unit: Sequence[Unit]) -> Iterator[Part]:
        if units:
            yield Part("all", self, tuple(units))

    def identity(self, prior: base.Prior) -> Statistics:
        assert isinstance(prior, Prior)
        return Statistics(prior.precision.new_ones(prior.precision.shape))

    def measure(self, units: Sequence[Unit], passes: Mapping[str, Any], current: base.Statistics) -> base.Statistics:
        """The mean of squared gradients; a layer that took no part has none."""
        seen = [unit for unit in units if unit.name in passes]
        if not seen:
            return self.unmeasured(current)
        works = [partial(passes[unit.name].layout_squares, unit) for unit in seen]
        device = next(iter(current.tensors().values())).device
        found = run_in_threads(works, when=sum(unit.size for unit in units) >= LARGE, device=device)
        pieces = dict(zip([unit.name for unit in seen], found, strict=True))
        return Statistics(join_units(units, pieces).div_(passes[seen[0].name].examples))

    def prior(self, span: Span, precision_of: PrecisionOf, like: Tensor) -> Prior:
        """A precision for each weight; where all have the same, it is in memory once."""
        different = {precision_of(slot.parameter) for unit in span.units for slot in unit.slots}
        if len(different) == 1:
            return Prior(constant_rows(different.pop(), (*span.batch, span.size // span.num_groups), like))
        return Prior(weight_precisions(span, precision_of, like))

    def cost(self, units: Sequence[Unit]) -> float:
        return float(sum(unit.size for unit in units))

    def pieces(self, units: Sequence[Unit], statistics: base.Statistics) -> list[tuple[str, Tensor]]:
        return [(unit.name, part) for unit, part in by_unit(units, statistics.tensors()["fisher"])]

    def split(
        self, units: Sequence[Unit], statistics: base.Statistics, precision: base.Precision, prior: base.Prior
    ) -> Iterator[Piece]:
        """Layer by layer, since their weights have nothing to do with each other."""
        first = 0
        for unit in units:

            def part(tensor: Tensor, rows: slice = slice(first, first + unit.size)) -> Tensor:
                return tensor[..., rows]

            yield Piece(unit.name, (unit,), first, statistics.map(part), precision.map(part), prior.map(part))
            first += unit.size


def join_units(units: Sequence[Unit], pieces: Mapping[str, Sequence[Tensor]]) -> Tensor:
    """The layers' vectors, each in pieces, end to end; zeros for a layer that has none."""
    like = next(iter(pieces.values()))[0]
    found = [pieces.get(unit.name) or [like.new_zeros(*like.shape[:-1], unit.size)] for unit in units]
    return joined([piece for several in found for piece in several])


def rest_as_diagonal(units: Sequence[Unit]) -> Iterator[Part]:
    """The layers for which another family has no structure, as one diagonal block."""
    if units:
        notes = {unit.name: f"{unit.layer}: diagonal" for unit in units if not unit.note}
        yield Part("diagonal", DIAGONAL, tuple(units), notes)


DIAGONAL = register_family(Diagonal())
