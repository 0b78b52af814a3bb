"""Which block each parameter lies in: total, fixed at construction, and open to view (`Coverage`).

All weights live in one flat vector `[*replicas, n]`, block after block, param group after param group. A block is one
or more units (layers' matrices) that share a covariance family; `Block.vector` is its part of any such flat vector.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from noisygrad.curvature.network import find_units
from noisygrad.families import Family, family_named
from noisygrad.families.base import Statistics
from noisygrad.families.units import Slot, Unit
from noisygrad.posterior.blocks import Block, reordered
from noisygrad.posterior.coverage import Coverage
from noisygrad.posterior.faults import format_names

DEVICES = {"cuda"}
"""Where flat vectors follow the memory of the parameters, so that copies take no detour."""


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

    def in_memory_order(self) -> Structure:
        """The same with flat vectors in the order of the parameters' own memory, on a GPU: copies take no detour.

        Channels-last weights are an example. Only matrices without replicas, and not a dense covariance, whose order is
        that of its rows. `to_memory` and `from_memory` go between the two.
        """
        first = next(iter(self.parameters.values()))
        if first.device.type not in DEVICES or self.family.layout == "rows" or self.replicas:
            return self
        new = {unit.name: _as_it_lies(unit, self.parameters) for unit in self.units}
        if not any(unit.has_custom_layout for unit in new.values()):
            return self
        return dataclasses.replace(
            self,
            blocks=[dataclasses.replace(b, units=tuple(new[unit.name] for unit in b.units)) for b in self.blocks],
            layers={module: [new[unit.name] for unit in units] for module, units in self.layers.items()},
        )

    def to_memory(self, flat: Tensor) -> Tensor:
        """A flat vector of which every parameter is row by row, in the order of this structure's; itself, if it is."""
        return reordered(self.units, flat, Unit.to_memory)

    def from_memory(self, flat: Tensor) -> Tensor:
        """The inverse of `to_memory`."""
        return reordered(self.units, flat, Unit.from_memory)

    def group_part(self, group: int) -> slice:
        """The part of the flat vector that a param group owns; groups lie one after another."""
        mine = [block for block in self.blocks if block.group == group]
        return slice(mine[0].start, mine[-1].start + mine[-1].size)

    def check_unchanged(self, model: nn.Module) -> None:
        """Raise if a parameter was frozen since, where only its prior would move it, or is one that is not trained."""
        frozen = [name for name, parameter in self.parameters.items() if not parameter.requires_grad]
        if frozen:
            raise RuntimeError(
                f"{format_names(frozen)}: frozen (requires_grad is False) after the optimiser was made, which trains "
                "all it was made with. Make a new one, perhaps with prior=posterior.as_prior(), or unfreeze"
            )
        now = {id(parameter): name for name, parameter in model.named_parameters() if parameter.requires_grad}
        then = {id(parameter): name for name, parameter in self.parameters.items()}
        if new := [name for key, name in now.items() if key not in then]:
            raise RuntimeError(
                f"{format_names(new)}: not trained by this optimiser, since the model got it (or unfroze it) after the "
                "optimiser was made. Make a new optimiser"
            )
        if gone := [name for key, name in then.items() if key not in now]:
            raise RuntimeError(
                f"{format_names(gone)}: no longer in the model, from which it was taken after the optimiser was made. "
                "Make a new optimiser"
            )

    def coverage(self, statistics: Mapping[str, Statistics] | None = None) -> Coverage:
        """Which block each parameter got and why, frozen ones included; `statistics` tell what became of couplings."""
        notes = dict(self.notes)
        for block in self.blocks:
            if statistics and block.name in statistics:
                notes |= block.family.notes(block.units, statistics[block.name])
        order = {name: index for index, name in enumerate(self.parameters)}
        slots = [(block, unit, slot) for block in self.blocks for unit in block.units for slot in unit.slots]
        slots.sort(key=lambda found: order[found[2].parameter])
        frozen = [
            (name, "×".join(map(str, parameter.shape)), "frozen", "requires_grad is False")
            for name, parameter in self.frozen.items()
        ]
        return Coverage((*(self._row(*found, notes) for found in slots), *frozen))

    def _row(self, block: Block, unit: Unit, slot: Slot, notes: Mapping[str, str]) -> tuple[str, str, str, str]:
        """One line of the table of coverage: parameter, shape, block, why."""
        parameter = self.parameters[slot.parameter]
        shape = "×".join(map(str, slot.of(parameter, len(self.replicas)).shape)) or "scalar"
        name = slot.parameter if slot.rows is None else f"{slot.parameter}[{slot.rows[0]}:{slot.rows[1]}]"
        kind = f"{block.family}:{block.name}" + ("" if block.noise else " (no noise)")
        why = notes.get(unit.name, unit.note) or unit.layer
        return name, shape, kind, why if parameter.requires_grad else f"{why}; frozen since"


def build_structure(
    model: nn.Module, family: str, group_of: Callable[[str], int] = lambda name: 0, noise: Sequence[bool] = (True,)
) -> Structure:
    """Every trainable parameter of `model` in a block of the named family, or in another where that does not apply.

    `group_of` names the param group of each parameter and `noise` says which groups are noisy. Raises for a model
    without trainable parameters, and where a layer's parameters lie in different groups.
    """
    kind = family_named(family)
    units, layers = find_units(model)
    if not units:
        raise ValueError("the model has no trainable parameters")
    if empty := [name for name, p in model.named_parameters() if p.requires_grad and p.numel() == 0]:
        raise ValueError(f"{format_names(empty)}: without elements there is nothing to train; freeze or remove them")
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
        for part in kind.partition(mine, units):
            start = blocks[-1].start + blocks[-1].size if blocks else 0
            unique = f"{part.name}@{group}" if group else part.name
            blocks.append(Block(unique, part.family, part.units, start, group, noisy))
            notes |= part.notes
    _check_partition(kind, units, blocks)
    return Structure(
        kind,
        blocks,
        layers,
        {name: p for name, p in model.named_parameters() if p.requires_grad},
        {name: p for name, p in model.named_parameters() if not p.requires_grad},
        next(iter(replicas)),
        notes,
    )


def _check_partition(family: Family, units: Sequence[Unit], blocks: Sequence[Block]) -> None:
    """Raise for a family whose `partition` would leave weights untrained, or train them twice."""
    taken = Counter(unit.name for block in blocks for unit in block.units)
    names = Counter(block.name for block in blocks)
    wrong = [f"{unit.name} ({unit.layer}) is in {taken[unit.name]} blocks" for unit in units if taken[unit.name] != 1]
    wrong += [f"{count} blocks are called {name}" for name, count in names.items() if count > 1]
    if wrong:
        raise ValueError(
            f"partition of the family {str(family)!r} must put each layer into one block, of a name of its own: "
            f"{'; '.join(wrong[:4])}"
        )


def _as_it_lies(unit: Unit, own: Mapping[str, nn.Parameter]) -> Unit:
    """The unit in the memory order of its parameters: those with a row for each of its rows that fill their memory."""
    if unit.kind != "matrix" or any(slot.rows is not None for slot in unit.slots):
        return unit
    slots = []
    for slot in unit.slots:
        parameter, meta = own[slot.parameter], torch.device("meta")
        shape, strides = tuple(parameter.shape), tuple(parameter.stride())
        dense = torch.empty_like(parameter, device=meta).stride() == strides
        usual = torch.empty(shape, device=meta).stride() == strides
        fits = len(shape) > 1 and shape[0] == unit.rows
        memory_layout = (shape, strides) if fits and dense and not usual else None
        slots.append(dataclasses.replace(slot, memory_layout=memory_layout))
    return dataclasses.replace(unit, slots=tuple(slots))


def _group(unit: Unit, group_of: Callable[[str], int]) -> int:
    found = {slot.parameter: group_of(slot.parameter) for slot in unit.slots}
    if len(set(found.values())) > 1:
        raise ValueError(
            f"the parameters of layer {unit.name!r} share one block but fall into different groups: {found}; "
            'use patterns that cover the whole layer, such as "layer.*"'
        )
    return next(iter(found.values()))


def copied(tensor: Tensor, owner: Structure | Block | None) -> Tensor:
    """A copy with every parameter row by row, of a tensor whose numbers lie as its owner says, if it has one."""
    moved = tensor if owner is None else owner.from_memory(tensor)
    return moved.detach().clone() if moved is tensor else moved.detach()
