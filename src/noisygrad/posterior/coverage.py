"""The table of which block each parameter got and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from noisygrad.families import tridiagonal
from noisygrad.families.base import Statistics

if TYPE_CHECKING:
    from noisygrad.posterior.structure import Structure


@dataclass(frozen=True)
class Coverage:
    """Which block each parameter got and why; `print` it."""

    rows: tuple[tuple[str, str, str, str], ...]

    def __str__(self) -> str:
        header = ("parameter", "shape", "block", "why")
        table = [header, *self.rows]
        widths = [max(len(row[column]) for row in table) for column in range(3)]
        lines = ["  ".join([*(row[c].ljust(widths[c]) for c in range(3)), row[3]]).rstrip() for row in table]
        return "\n".join([lines[0], "-" * max(len(line) for line in lines), *lines[1:]])

    __repr__ = __str__


def coverage_of(structure: Structure, statistics: Mapping[str, Statistics]) -> Coverage:
    """The table of all parameters, frozen ones included; what `statistics` there are tell which couplings are zero."""
    notes = structure.notes | dict(_without_coupling(structure, statistics))
    rows = []
    for block in structure.blocks:
        for unit in block.units:
            for slot in unit.slots:
                parameter = structure.parameters[slot.parameter]
                part = slot.of(parameter, len(structure.replicas))
                shape = "×".join(map(str, part.shape)) or "scalar"
                name = slot.parameter if slot.rows is None else f"{slot.parameter}[{slot.rows[0]}:{slot.rows[1]}]"
                kind = f"{block.family}:{block.name}" + ("" if block.noise else " (no noise)")
                why = notes.get(unit.name, unit.note) or unit.layer
                rows.append((name, shape, kind, why if parameter.requires_grad else f"{why}; frozen since"))
    order = {name: index for index, name in enumerate(structure.parameters)}
    rows.sort(key=lambda row: order[row[0].partition("[")[0]])
    for name, parameter in structure.frozen.items():
        rows.append((name, "×".join(map(str, parameter.shape)), "frozen", "requires_grad is False"))
    return Coverage(tuple(rows))


def _without_coupling(structure: Structure, statistics: Mapping[str, Statistics]) -> Iterator[tuple[str, str]]:
    """Notes on the layers of a chain that were measured, but never together with the one before."""
    for block in structure.blocks:
        moments = statistics.get(block.name)
        if not isinstance(moments, tridiagonal.Statistics):
            continue
        for i, (before, after) in enumerate(pairwise(block.units)):
            own = (*moments.inputs[i : i + 2], *moments.outputs[i : i + 2])
            coupled = bool(moments.cross_inputs[i].any()) or bool(moments.cross_outputs[i].any())
            if not coupled and not all(map(_is_identity, own)):  # which all moments are at the start
                yield (
                    after.name,
                    f"{after.layer}, not coupled with {before.name}: never seen at the same positions",
                )


def _is_identity(moment: Tensor) -> bool:
    return bool((moment == torch.eye(moment.shape[-1], dtype=moment.dtype, device=moment.device)).all())
