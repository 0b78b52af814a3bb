"""What a pass says of layers that took no part in it: numbers of its own, which may be changed like any others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from noisygrad.curvature.passes import MatrixPass
from noisygrad.families import FAMILIES
from noisygrad.families.base import Statistics
from noisygrad.kernels.tensors import average_into_
from noisygrad.posterior.blocks import Block
from noisygrad.posterior.structure import build_structure
from support.compare import mlp
from support.families import normal


def started(family: str) -> list[tuple[Block, Statistics]]:
    """Each block of a small network, with a moving average of numbers that are none of the start's."""
    found = []
    for block in build_structure(mlp(), family).blocks:
        identity = block.family.identity(block.prior(lambda name: 0.7, torch.zeros(0, dtype=torch.float64)))
        found.append((block, identity.map(lambda tensor: tensor + normal(tensor.numel(), *tensor.shape))))
    return found


def places(tensors: Mapping[str, Tensor]) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}


def passes_of(block: Block, names: list[str]) -> dict[str, Any]:
    """A pass of four examples through some of a block's layers."""
    return {
        unit.name: MatrixPass(normal(1, 4, 1, unit.inputs - 1), normal(2, 4, 1, unit.outputs), constant=True)
        for unit in block.units
        if unit.name in names
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_an_unused_block_has_no_fisher_and_the_inputs_it_had(family: str) -> None:
    for block, current in started(family):
        for name, tensor in block.family.measure(block.units, {}, current).averages().items():
            kept = name.startswith("inputs")
            assert torch.equal(tensor, current.tensors()[name] if kept else torch.zeros_like(tensor)), name


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("used", [[], ["0"], ["0", "4"], ["2"]], ids=str)
@pytest.mark.parametrize("change", ["masked", "averaged", "floored", "overwritten"])
def test_what_becomes_of_it_leaves_the_moving_average_alone(family: str, used: list[str], change: str) -> None:
    for block, current in started(family):
        measured = block.family.measure(block.units, passes_of(block, used), current)
        assert not places(measured.averages()) & places(current.tensors())
        before = current.clone().tensors()
        if change == "masked":
            other = current.clone()
            pair = ([*each.averages().values()] for each in (measured, other))
            average_into_(*pair, rate=0.0, mask=torch.zeros(1, dtype=torch.float64))
        elif change == "averaged":
            measured.update_(current.clone(), 0.3)
        elif change == "floored":
            measured.add_floor_(0.5)
        else:
            for tensor in measured.averages().values():
                tensor.fill_(torch.nan)
        for name, tensor in current.tensors().items():
            assert torch.equal(tensor, before[name]), name
