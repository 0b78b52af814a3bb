"""Losses, and what their outputs are made of, read off autograd's graph, which a plain step does not need."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.autograd.graph import Node

from noisygrad.families.base import Statistics
from noisygrad.likelihoods import Counted

_COPIES = {"ToCopyBackward0", "TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "CloneBackward0"}


@dataclass(eq=False, slots=True, weakref_slot=True)
class LossCall:
    """One loss and what was measured of its batch."""

    root: Node | None
    """Where its output was made, in autograd's graph."""
    counted: Counted | None = None
    """What counts of its batch; None where all does."""
    first: LossCall | None = None
    """The first loss of its forward pass, where that is another."""
    further: list[LossCall] = field(default_factory=list)
    """Of the first, the others in their order."""
    statistics: dict[str, Statistics] = field(default_factory=dict)
    """The mean over examples of the moments, by block."""
    passes: int = 0
    """How many backward passes they are the mean of."""
    noise: Tensor | None = None
    """The likelihood's own statistic."""
    parts: float | Tensor = 1.0
    """How many parts of its targets, such as positions, count of an example."""
    witness: Tensor | None = None
    """None where the factor is 1."""

    @property
    def waits(self) -> bool:
        """Whether it was not differentiated yet."""
        return self.witness is not None and self.witness.grad is None


def behind(root: Node | None) -> tuple[list[Node], list[Node]]:
    """What an output was made by, in autograd's graph, and the parameters it was made of.

    Copies of a parameter count for it: autocast keeps those of its type from one forward pass to the next.
    """
    stack, seen, nodes, leaves = [root], set[Node](), list[Node](), list[Node]()
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if not node.next_functions:
            own = isinstance(getattr(node, "variable", None), nn.Parameter)
            (leaves if own else nodes).append(node)
            continue
        stack += [following for following, _ in node.next_functions]
        if not _is_copy(node):
            nodes.append(node)
    return nodes, leaves


def _is_copy(node: Node) -> bool:
    while node.next_functions:
        following = node.next_functions[0][0]
        if node.name() not in _COPIES or following is None:
            return False
        node = following
    return True
