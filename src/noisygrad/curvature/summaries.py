"""Statistics of each layer as soon as its output gradient is known, so that no gradient is kept in a GPU's memory.

All output gradients of a deep network together are as large as its activations. So a hook on the graph node of a
layer's output computes what the layer's block needs of the gradient, and only that is kept: for the diagonal family and
for Kronecker blocks; other families need all layers together. Only the gradients of layers that come first in the
network, and of layers that were called several times, are returned by the backward pass itself.

A hook that a user has put on such a node (`grad_fn.register_prehook`) runs first, so what it changes is changed in the
statistics, too. Hooks on tensors and modules make no difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node

from noisygrad.curvature.capture import Record
from noisygrad.curvature.passes import MatrixPass, Pass
from noisygrad.families.base import Statistics
from noisygrad.families.family import Reads
from noisygrad.families.units import Unit

DEVICES = {"cuda"}
"""Types of devices with scarce memory. A CPU works on several layers in parallel, for which it needs them all."""

Summarise: TypeAlias = Callable[[Unit, Pass], Pass]


@dataclass
class PassSummary(Pass):
    """The sums over examples that a block needs of a pass, in place of the pass."""

    examples: int
    sizes: dict[str, Tensor]
    """For `inputs` and `gradients`, numbers that are not all finite if the pass's own were not, or if their squares
    overflow: `optim.finite.FiniteTrace` needs nothing else. The inputs themselves, until `release_inputs`."""
    some_count: Tensor | None = field(default=None, kw_only=True)
    """What `takes_part` says."""

    def release_inputs(self, others: Sequence[Tensor]) -> None:
        """Keep only the sum of the inputs, unless one of these tensors keeps them in memory anyway."""
        inputs = self.sizes.get("inputs")
        if inputs is not None and _storage(inputs) not in map(_storage, others):
            self.sizes["inputs"] = inputs.sum()

    def rows(self) -> Tensor:
        raise TypeError("a summary of a pass has no per-example gradients")

    def carried(self) -> dict[str, Tensor]:
        return self.sizes

    def takes_part(self) -> Tensor | None:
        return self.some_count

    @classmethod
    def joined(cls, passes: Sequence[Pass]) -> Pass:
        raise TypeError("the calls of a layer are joined before they are summarised")


@dataclass
class SquareSummary(PassSummary):
    """Sums of squares for a diagonal, in the unit's own order of memory; only `layout_squares` is defined."""

    sums: list[Tensor]

    def layout_squares(self, unit: Unit) -> list[Tensor]:
        return self.sums


@dataclass
class MomentSummary(PassSummary):
    """A and S, for a Kronecker product."""

    kept: Statistics

    def moments(self) -> Statistics:
        return self.kept


@dataclass
class BasisSummary(PassSummary):
    """A, S and the sums of squares in a basis, for a Kronecker product with a spectrum of its own."""

    inputs: Tensor
    outputs: Tensor
    in_basis: Tensor

    def input_moment(self) -> Tensor:
        return self.inputs

    def output_moment(self) -> Tensor:
        return self.outputs

    def squares_in_basis(self, left: Tensor, right: Tensor) -> Tensor:
        return self.in_basis


def summarised(one: Pass, unit: Unit, reads: Reads, current: Statistics) -> Pass:
    """All that a family that `reads` so wants to know of a pass; its `current` basis stays until that is used."""
    if reads == "squares":
        sums = one.layout_squares(unit)
        return SquareSummary(one.examples, _sizes(one, sums), sums)
    if reads == "rows" or not isinstance(one, MatrixPass):
        return one
    if reads == "moments":
        moments = one.moments()
        _, outputs = moments.diagonals()  # type: ignore[attr-defined]
        return MomentSummary(one.examples, _sizes(one, [outputs]), moments, some_count=one.takes_part())
    basis = current.tensors()
    squares = one.squares_in_basis(basis["left"], basis["right"])
    inputs, outputs = one.input_moment(), one.output_moment()
    return BasisSummary(one.examples, _sizes(one, [squares]), inputs, outputs, squares, some_count=one.takes_part())


def _sizes(one: Pass, squares: Sequence[Tensor]) -> dict[str, Tensor]:
    """The inputs, and for the gradients their squares: these show what is not finite, are smaller, and kept anyway."""
    seen = squares[0] if len(squares) == 1 else torch.stack([piece.sum() for piece in squares])
    return {kind: tensor if kind == "inputs" else seen for kind, tensor in one.carried().items()}


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def hookable(records: Sequence[Record]) -> list[bool]:
    """Which calls get their gradient in a hook: those between the loss and another call, of layers called once."""
    nodes, dead_ends = {record.edge.node for record in records}, set[Node]()
    calls = Counter(record.unit.name for record in records)
    return [calls[record.unit.name] == 1 and reaches(record.edge.node, nodes, dead_ends) for record in records]


def reaches(start: Node, targets: set[Node], dead_ends: set[Node]) -> bool:
    """Whether `start` depends on a target; if not, all nodes that it depends on are added to `dead_ends`."""
    stack, seen = [start], set[Node]()
    while stack:
        # The first input is usually a layer's input and the others are parameters, so it is followed first.
        for following, _ in reversed(stack.pop().next_functions):
            if following in targets:
                return True
            if following is not None and following not in dead_ends and following not in seen:
                seen.add(following)
                stack.append(following)
    dead_ends |= seen
    return False


@contextmanager
def gradient_hooks(records: Sequence[Record], take: Callable[[Record, Tensor], None]) -> Iterator[None]:
    """Inside, a backward pass calls `take` with each record and its output gradient."""

    def receive(record: Record, gradients: tuple[Tensor | None, ...]) -> None:
        gradient = gradients[record.edge.output_nr]
        if gradient is not None:
            take(record, gradient)

    handles = [record.edge.node.register_prehook(partial(receive, record)) for record in records]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
