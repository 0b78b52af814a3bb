"""Which block each parameter lies in: total, fixed at construction, and open to view (`Coverage`).

All weights live in one flat vector `[*replicas, n]`, block after block, param group after param group. A block is one
or more units (layers' matrices) that share a covariance family; `Block.vector` is its part of any such flat vector.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from noisygrad.curvature.layers import Slot, Unit, find_units
from noisygrad.curvature.parallel import side_by_side
from noisygrad.curvature.passes import MatrixPass, Pass
from noisygrad.curvature.summaries import MomentSummary, SquareSummary
from noisygrad.families import dense, diagonal, kronecker, tridiagonal
from noisygrad.families.base import Prior, Statistics, thin
from noisygrad.posterior.coverage import Coverage, coverage_of
from noisygrad.posterior.faults import some_of
from noisygrad.posterior.parameters import ParameterViews

Family = Literal["diagonal", "kronecker", "tridiagonal", "full"]
FAMILIES: tuple[Family, ...] = ("diagonal", "kronecker", "tridiagonal", "full")
LARGE = 100_000
"""From so many weights on, the statistics of a CPU's layers are taken side by side."""
LARGEST_DENSE = 20_000
"""A dense block of more weights than this (3 GB in float64) is refused with advice instead of an out-of-memory."""


@dataclass(frozen=True)
class Block:
    """Weights [start, start + size) of the flat vector, with one covariance family."""

    name: str
    family: Family
    units: tuple[Unit, ...]
    start: int
    group: int
    noise: bool

    @cached_property
    def size(self) -> int:
        """How many weights it has (per replica)."""
        return sum(unit.size for unit in self.units)

    @cached_property
    def grouped(self) -> int:
        """How many independent sub-blocks (groups of a convolution) it consists of; 1 if it is one block."""
        return self.units[0].groups if self.family == "kronecker" else 1

    @property
    def batch(self) -> tuple[int, ...]:
        """Leading dimensions of its family's tensors: replicas, then groups."""
        return self.units[0].replicas + ((self.grouped,) if self.grouped > 1 else ())

    def segment(self, flat: Tensor) -> Tensor:
        """Its part of a flat vector, a view `[*replicas, size]`."""
        return flat if self.size == flat.shape[-1] else flat[..., self.start : self.start + self.size]

    def vector(self, flat: Tensor) -> Tensor:
        """Its part of a flat vector in the order of its family, `[*batch, n]`: matrices [W | b] row by row.

        A view for the diagonal and the dense family, to which the order is nothing.
        """
        part = self.segment(flat)
        if self.family == "kronecker":
            part = self.units[0].matrix(part)
        elif self.family == "tridiagonal":
            pieces = part.split([unit.size for unit in self.units], dim=-1)
            part = torch.cat([unit.matrix(piece) for unit, piece in zip(self.units, pieces, strict=True)], dim=-1)
        return self.batched(part)

    def batched(self, part: Tensor) -> Tensor:
        """`[*replicas, size]` in the order of the family as `[*batch, n]`."""
        return part.unflatten(-1, (self.grouped, -1)) if self.grouped > 1 else part

    def write_(self, flat: Tensor, values: Tensor) -> None:
        """The inverse of `vector`: put `[*batch, n]` into a flat vector."""
        part = self.segment(flat)
        values = values.flatten(start_dim=-2) if self.grouped > 1 else values
        if self.family == "kronecker":
            self.units[0].write_matrix_(part, values)
        elif self.family == "tridiagonal":
            sizes = [unit.size for unit in self.units]
            for unit, piece, value in zip(self.units, part.split(sizes, -1), values.split(sizes, -1), strict=True):
                unit.write_matrix_(piece, value)
        else:
            part.copy_(values)

    def total(self, values: Tensor) -> Tensor:
        """One number per replica from one per sub-block."""
        return values.sum(dim=-1) if self.grouped > 1 else values

    def identity(self, dtype: torch.dtype, device: torch.device) -> Statistics:
        """The statistics at the start: F̄ = I."""
        first = self.units[0]
        if self.family == "diagonal":
            return diagonal.Statistics.identity(self.batch, self.size, dtype=dtype, device=device)
        if self.family == "kronecker":
            return kronecker.Statistics.identity(self.batch, first.outputs, first.inputs, dtype=dtype, device=device)
        if self.family == "tridiagonal":
            outputs, inputs = [unit.outputs for unit in self.units], [unit.inputs for unit in self.units]
            return tridiagonal.Statistics.identity(self.batch, outputs, inputs, dtype=dtype, device=device)
        return dense.Statistics.identity(self.batch, self.size, dtype=dtype, device=device)

    def measure(self, passes: Mapping[str, Pass], current: Statistics) -> Statistics:
        """The statistics of one pass, for a moving average that is now `current`.

        A layer that took no part has no gradient. It says nothing of its inputs either, which stay as they are.
        """
        seen = [unit for unit in self.units if unit.name in passes]
        if self.family == "diagonal" and seen:
            of_cpu = next(iter(current.tensors().values())).device.type == "cpu"
            mine = {unit.name: passes[unit.name].square_sums for unit in seen}
            found = side_by_side(list(mine.values()), when=of_cpu and self.size >= LARGE)
            joined = self._joined(dict(zip(mine, found, strict=True)))
            return diagonal.Statistics(joined.div_(passes[seen[0].name].examples))
        if self.family == "full" and seen:
            return dense.Statistics.measure(self._joined({unit.name: [passes[unit.name].rows()] for unit in seen}))
        if not seen:
            nothing = current.map(torch.zeros_like)
            for name, tensor in nothing.tensors().items():
                if name.startswith("inputs"):
                    tensor.copy_(current.tensors()[name])
            return nothing
        if self.family == "kronecker":
            only = passes[self.units[0].name]
            assert isinstance(only, MatrixPass | MomentSummary)
            return kronecker.Statistics(only.input_moment(), only.output_moment())
        matrices = self._matrices(passes)
        measured = tridiagonal.Statistics.measure(
            [p.activations for p in matrices],
            [p.gradients for p in matrices],
            [p.constant for p in matrices],
            [
                a.gradients.shape[-3:-1] == b.gradients.shape[-3:-1] and before in seen and after in seen
                for (a, b), (before, after) in zip(pairwise(matrices), pairwise(self.units), strict=True)
            ],
        )
        if len(seen) == len(self.units) or not isinstance(current, tridiagonal.Statistics):
            return measured
        pairs = zip(self.units, measured.inputs, current.inputs, strict=True)
        return dataclasses.replace(
            measured, inputs=tuple(new if unit in seen else old for unit, new, old in pairs)
        ).clone()

    def summarise(self, one: Pass) -> Pass:
        """All that `measure` wants to know of a pass through one of its units."""
        if self.family == "diagonal":
            return SquareSummary.of(one)
        return MomentSummary.of(one) if self.family == "kronecker" and isinstance(one, MatrixPass) else one

    def _matrices(self, passes: Mapping[str, Pass]) -> list[MatrixPass]:
        """The passes of all units; a layer of a chain that took no part has no gradient."""
        found = {unit.name: p for unit in self.units if isinstance(p := passes.get(unit.name), MatrixPass)}
        like = next(iter(found.values()))
        for unit in self.units:
            if unit.name not in found:
                inputs = like.activations.new_zeros(*like.activations.shape[:-1], unit.inputs - unit.constant)
                outputs = like.gradients.new_zeros(*like.gradients.shape[:-1], unit.outputs)
                found[unit.name] = MatrixPass(inputs, outputs, unit.constant)
        return [found[unit.name] for unit in self.units]

    def _joined(self, pieces: Mapping[str, Sequence[Tensor]]) -> Tensor:
        """The units' vectors, each in pieces, as one of its own; a layer that took no part has no gradient."""
        like = next(iter(pieces.values()))[0]
        found: list[Tensor] = []
        for unit in self.units:
            found += pieces.get(unit.name) or [like.new_zeros(*like.shape[:-1], unit.size)]
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)

    def prior(self, precision_of: Callable[[str], float], dtype: torch.dtype, device: torch.device) -> Prior:
        """A fresh prior from the precision 1/η of each parameter."""
        different = {precision_of(slot.parameter) for unit in self.units for slot in unit.slots}
        if self.family == "diagonal" and len(different) == 1:
            return diagonal.Prior(thin(different.pop(), (*self.batch, self.size), dtype=dtype, device=device))
        if self.family in {"diagonal", "full"}:
            flat = torch.cat(
                [
                    torch.full((unit.rows * (slot.stop - slot.start),), precision_of(slot.parameter), dtype=dtype)
                    for unit in self.units
                    for slot in unit.slots
                ]
            )
            flat = flat.to(device).repeat(*self.batch, 1)
            return diagonal.Prior(flat) if self.family == "diagonal" else dense.Prior(flat, diagonal=True)
        columns = []
        for unit in self.units:
            values = torch.zeros(*self.batch, unit.inputs, dtype=dtype, device=device)
            for slot in unit.slots:
                values[..., slot.start : slot.stop] = precision_of(slot.parameter)
            columns.append(values)
        if self.family == "kronecker":
            return kronecker.Prior.from_columns(columns[0], self.units[0].outputs)
        return tridiagonal.Prior.from_columns(columns, [unit.outputs for unit in self.units])


@dataclass
class Structure:
    """The blocks of a model, its parameters, and where each lies in the flat vector."""

    family: Family
    blocks: list[Block]
    layers: dict[nn.Module, list[Unit]]
    parameters: dict[str, nn.Parameter]
    frozen: dict[str, nn.Parameter]
    replicas: tuple[int, ...]
    notes: dict[str, str] = field(default_factory=dict)
    _parameter_views: ParameterViews | None = field(default=None, repr=False)

    @property
    def size(self) -> int:
        """How many trainable weights there are (per replica)."""
        return sum(block.size for block in self.blocks)

    @property
    def units(self) -> list[Unit]:
        """All units in the order of the flat vector."""
        return [unit for block in self.blocks for unit in block.units]

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """The shape of every trainable parameter."""
        return {name: parameter.shape for name, parameter in self.parameters.items()}

    @cached_property
    def block_of(self) -> dict[str, Block]:
        """The block of each unit, by name."""
        return {unit.name: block for block in self.blocks for unit in block.units}

    def parameter_views(self, slots: Sequence[Slot]) -> ParameterViews:
        """The parts of the parameters that `slots` hold; one object for all flat vectors of this structure."""
        if self._parameter_views is None:
            parts = [(slot, self.parameters[slot.parameter]) for slot in slots]
            self._parameter_views = ParameterViews(parts, len(self.replicas))
        return self._parameter_views

    @property
    def generation(self) -> int:
        """Counts how often parameters were found in another place of memory."""
        return self._parameter_views.generation if self._parameter_views is not None else 0

    def group_part(self, group: int) -> slice:
        """The part of the flat vector that a param group owns; groups lie one after another."""
        mine = [block for block in self.blocks if block.group == group]
        return slice(mine[0].start, mine[-1].start + mine[-1].size)

    def check_trainable(self) -> None:
        """Raise if a parameter was frozen since: without a gradient, only its prior would move it."""
        frozen = [name for name, parameter in self.parameters.items() if not parameter.requires_grad]
        if frozen:
            raise RuntimeError(
                f"{some_of(frozen)}: frozen (requires_grad is False) after the optimiser was made, which trains all it "
                "was made with. Make a new one, perhaps with prior=posterior.as_prior(), or unfreeze"
            )

    def coverage(self, statistics: Mapping[str, Statistics] | None = None) -> Coverage:
        """Which block each parameter got and why, frozen ones included; `statistics` tell what became of couplings."""
        return coverage_of(self, statistics or {})


def build_structure(
    model: nn.Module, family: Family, group_of: Callable[[str], int] = lambda name: 0, noise: Sequence[bool] = (True,)
) -> Structure:
    """Every trainable parameter of `model` in a block of the family, or in a diagonal one where that does not apply.

    `group_of` names the param group of each parameter and `noise` says which groups are noisy. Raises for a model
    without trainable parameters, and where a layer's parameters lie in different groups.
    """
    units, layers = find_units(model)
    if not units:
        raise ValueError("the model has no trainable parameters")
    if empty := [name for name, p in model.named_parameters() if p.requires_grad and p.numel() == 0]:
        raise ValueError(f"{some_of(empty)}: without elements there is nothing to train; freeze or remove them")
    devices = {parameter.device for parameter in model.parameters() if parameter.requires_grad}
    if len(devices) > 1:
        raise ValueError(f"all trainable parameters must be on one device, found {sorted(map(str, devices))}")
    replicas = {unit.replicas for unit in units}
    if len(replicas) > 1:
        raise ValueError(f"all trainable layers must have the same replicas, found {sorted(replicas)}")
    groups = {unit.name: _group(unit, group_of) for unit in units}
    notes: dict[str, str] = {}
    blocks: list[Block] = []
    for group, noisy in enumerate(noise):
        mine = [unit for unit in units if groups[unit.name] == group]
        for name, kind, members in _partition(mine, units, family, notes):
            start = blocks[-1].start + blocks[-1].size if blocks else 0
            unique = f"{name}@{group}" if group else name
            blocks.append(Block(unique, kind, tuple(members), start, group, noisy))
    return Structure(
        family,
        blocks,
        layers,
        {name: p for name, p in model.named_parameters() if p.requires_grad},
        {name: p for name, p in model.named_parameters() if not p.requires_grad},
        next(iter(replicas)),
        notes,
    )


def _group(unit: Unit, group_of: Callable[[str], int]) -> int:
    found = {slot.parameter: group_of(slot.parameter) for slot in unit.slots}
    if len(set(found.values())) > 1:
        raise ValueError(
            f"the parameters of layer {unit.name!r} share one block but fall into different groups: {found}; "
            'use patterns that cover the whole layer, such as "layer.*"'
        )
    return next(iter(found.values()))


def _partition(
    units: Sequence[Unit], all_units: Sequence[Unit], family: Family, notes: dict[str, str]
) -> Iterable[tuple[str, Family, list[Unit]]]:
    """The blocks of one param group: name, family and members."""
    if not units:
        return
    rest = [unit for unit in units if unit.kind == "other"] if family == "full" else list(units)
    if family == "full" and len(rest) < len(units):
        together = [unit for unit in units if unit.kind != "other"]
        size = sum(unit.size for unit in together)
        if size > LARGEST_DENSE:
            raise ValueError(
                f"a full covariance over {size} weights needs a matrix of {size}×{size}; at most {LARGEST_DENSE} are "
                "supported. Use NoisyKFAC or NoisyBlockTridiagonal, or freeze layers"
            )
        yield "all", "full", together
    if family in {"kronecker", "tridiagonal"}:
        for chain in _chains(units, all_units) if family == "tridiagonal" else []:
            for before, after in pairwise(chain):
                notes[after.name] = f"{after.layer}, coupled with {before.name}"
            yield "–".join((chain[0].name, chain[-1].name)), "tridiagonal", chain
            rest = [unit for unit in rest if unit not in chain]
        for unit in rest:
            if unit.kind == "matrix":
                if family == "tridiagonal":
                    notes[unit.name] = f"{unit.layer} without a neighbour to couple with: coupling zero"
                yield unit.name, "kronecker", [unit]
        rest = [unit for unit in rest if unit.kind != "matrix"]
        notes.update({unit.name: f"{unit.layer}: diagonal" for unit in rest if not unit.note})
    if rest:
        yield ("diagonal" if family != "diagonal" else "all"), "diagonal", rest


def _chains(units: Sequence[Unit], all_units: Sequence[Unit]) -> list[list[Unit]]:
    """Runs of two or more Linear layers that follow one another; any other layer with a matrix ends a run."""
    chains: list[list[Unit]] = [[]]
    mine = set(units)
    for unit in all_units:
        if unit.chainable and unit in mine:
            chains[-1].append(unit)
        elif unit.kind in {"matrix", "embedding"}:
            chains.append([])
    return [chain for chain in chains if len(chain) > 1]


def parameter_order(structure: Structure) -> Tensor:
    """For each entry of `torch.nn.utils.parameters_to_vector`, where it lies in the flat vector (one replica)."""
    where = torch.arange(structure.size)
    lead = len(structure.replicas)
    places = {name: torch.empty(shape[lead:], dtype=torch.long) for name, shape in structure.shapes.items()}
    for block in structure.blocks:
        start = block.start
        for unit in block.units:
            for slot, view in unit.views(where[start : start + unit.size], structure.shapes):
                slot.of(places[slot.parameter], 0).copy_(view)
            start += unit.size
    return torch.cat([place.reshape(math.prod(place.shape)) for place in places.values()])
