"""Statistics of each layer as soon as its output gradient is there, on a GPU: that gradient need not be kept.

All output gradients of a deep network together are as large as its activations. So a hook on the place of the graph
where a layer's output was made takes what the layer's block wants to know of it, and only that is kept: by the diagonal
family and by Kronecker blocks; others need all layers together. The backward pass is asked for the gradients of the few
layers alone that no other layer comes before, and of those that need all their calls together.

A hook that a user has put on such a place (`grad_fn.register_prehook`) comes first, so what it changes is changed in
the statistics too. Hooks on tensors and modules make no difference.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node

from noisygrad.curvature.capture import Record
from noisygrad.curvature.passes import MatrixPass, Pass
from noisygrad.families.base import Statistics
from noisygrad.families.units import Unit

DEVICES = {"cuda"}
"""Where memory is scarce. A CPU takes the layers side by side, for which it needs them all."""

Summarise: TypeAlias = Callable[[Unit, Pass], Pass]


@dataclass
class Summary(Pass):
    """What is left of a pass: sums over its examples."""

    count: int
    sizes: dict[str, Tensor]
    """For what it carried numbers of which some are not finite if some of that was not, or if squares of it are too
    large: `optim.finite.FiniteTrace` asks for nothing else. The inputs themselves, until `let_go`."""

    def let_go(self, others: Sequence[Tensor]) -> None:
        """Keep but the sum of the inputs, unless they are among tensors that others keep."""
        inputs = self.sizes.get("inputs")
        if inputs is not None and _place(inputs) not in map(_place, others):
            self.sizes["inputs"] = inputs.sum()

    @property
    def examples(self) -> int:
        """How many there were."""
        return self.count

    def rows(self) -> Tensor:
        """None are left."""
        raise TypeError("of a summary no per-example gradients are left")

    def carried(self) -> dict[str, Tensor]:
        """What stands for it."""
        return self.sizes

    @classmethod
    def joined(cls, passes: Sequence[Pass]) -> Pass:
        """Too late."""
        raise TypeError("the calls of a layer are joined before they are summarised")


@dataclass
class SquareSummary(Summary):
    """Sums of squares, for a diagonal, as the numbers of a unit lie: `layout_squares` is all that it answers."""

    sums: list[Tensor]

    @classmethod
    def of(cls, one: Pass, unit: Unit) -> SquareSummary:
        """That of a pass through a unit."""
        sums = one.layout_squares(unit)
        return cls(one.examples, _sizes(one, sums), sums)

    def layout_squares(self, unit: Unit) -> list[Tensor]:
        """In pieces, as the pass had them."""
        return self.sums


@dataclass
class MomentSummary(Summary):
    """A and S, for a Kronecker product."""

    kept: Statistics

    @classmethod
    def of(cls, one: MatrixPass) -> MomentSummary:
        """That of a pass."""
        moments = one.moments()
        _, outputs = moments.diagonals()  # type: ignore[attr-defined]
        return cls(one.examples, _sizes(one, [outputs]), moments)

    def moments(self) -> Statistics:
        """A and S."""
        return self.kept


def _sizes(one: Pass, squares: Sequence[Tensor]) -> dict[str, Tensor]:
    """What is wrong with the gradients is seen in their squares, which are fewer, and kept in any case."""
    seen = squares[0] if len(squares) == 1 else torch.stack([piece.sum() for piece in squares])
    return {kind: tensor if kind == "inputs" else seen for kind, tensor in one.carried().items()}


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def hookable(records: Sequence[Record]) -> list[bool]:
    """Which of the calls need not be asked for: those on the way to another, of layers that were called once."""
    nodes, dead_ends = {record.edge.node for record in records}, set[Node]()
    calls = Counter(record.unit.name for record in records)
    return [calls[record.unit.name] == 1 and reaches(record.edge.node, nodes, dead_ends) for record in records]


def reaches(start: Node, targets: set[Node], dead_ends: set[Node]) -> bool:
    """Whether there is a target behind `start`; if not, all that is behind it is added to `dead_ends`."""
    stack, seen = [start], set[Node]()
    while stack:
        # The first input is usually a layer's input, the others are parameters: it is followed first.
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
    """Inside, a backward pass hands each record to `take`, with its output gradient."""

    def hook(record: Record) -> Callable[[tuple[Tensor | None, ...]], None]:
        def receive(gradients: tuple[Tensor | None, ...]) -> None:
            gradient = gradients[record.edge.output_nr]
            if gradient is not None:
                take(record, gradient)

        return receive

    handles = [record.edge.node.register_prehook(hook(record)) for record in records]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
