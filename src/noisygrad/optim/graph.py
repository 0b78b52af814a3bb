"""Losses, and what their outputs are made of, read off autograd's graph, which a plain step does not need."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn
from torch.autograd.graph import Node

from noisygrad.families.base import Statistics
from noisygrad.likelihoods import Counted

NEAR = 16
"""So many operations behind an output are looked at for one that takes rows out."""
_ROWWISE = (
    frozenset(
        ("ToCopy", "Clone", "Alias", "Mul", "Div", "Add", "Sub", "Rsub", "Neg", "Pow", "Exp", "Log", "Sqrt", "Abs")
    )
    | frozenset(
        (
            "Clamp",
            "ClampMin",
            "ClampMax",
            "Relu",
            "LeakyRelu",
            "Elu",
            "Celu",
            "Gelu",
            "Silu",
            "Sigmoid",
            "Tanh",
            "Softplus",
        )
    )
    | frozenset(("Hardtanh", "LogSigmoid", "Softmax", "LogSoftmax", "MaskedFill", "Where", "NanToNum"))
)
"""Each row of what they return is made of the same row of their one argument that was computed."""
_RESHAPING = frozenset(("View", "UnsafeView", "ReshapeAlias", "Squeeze"))
_ONE = frozenset(("Select", "Unbind"))
_SOME = frozenset(("Slice", "Split", "SplitWithSizes", "Index", "IndexSelect", "Gather", "MaskedSelect"))
_TAKING = _ONE | _SOME
LOOKED_AT = _ROWWISE | _RESHAPING | _TAKING | {"Unsqueeze", "Transpose", "Permute"}


def kind_of(node: Node) -> str:
    """The operation without the number that autograd gives its variants: "Mul" for MulBackward0."""
    return node.name().partition("Backward")[0]


def check_whole(output: Tensor) -> None:
    """Raise ValueError for an output that is a part of the rows of another, which the layers have all seen.

    Statistics would be of other examples, and the losses of two halves would add, as those of two heads do. What
    keeps rows as they are is looked through; a layer is not: a model may well take parts of what is inside it.
    """
    computed = _rows_behind(output)
    if computed is not None and computed != output.shape[0]:
        raise ValueError(
            f"the output has {output.shape[0]} of the {computed} rows that the model has computed. Of a part of an "
            "output no statistics can be taken: give draw.nll the whole output (mask= and weight= say what counts), "
            "or call the model on that part alone"
        )


def _rows_behind(output: Tensor) -> int | None:
    """How many rows there are of which those of an output were taken; None where nothing tells that they were."""
    shape, added = output.shape, False
    rows = shape[0]
    for kind, node, source, number in _chain(output.grad_fn):
        before, shape = shape, source._input_metadata[number].shape
        same = len(shape) > 0 and shape[0] == rows
        if kind in _ROWWISE:
            if len(shape) != len(before) or not (same or added):
                return None
        elif kind == "Unsqueeze":
            if _dimension(node, "_saved_dim", len(before)) == 0:  # then one row may have been taken
                added = True
            elif not same:
                return None
        elif added:
            taken = kind in _ONE and _dimension(node, "_saved_dim", len(shape)) == 0
            return int(shape[0]) if taken else None
        elif kind in ("Transpose", "Permute"):
            if not same or _moves_rows(node, len(shape)):
                return None
        elif kind in _RESHAPING:
            if not same and not (kind == "View" and kind_of(source) == "MaskedSelect"):
                return None
        elif kind in _ONE:  # of a sequence in front, perhaps
            if _dimension(node, "_saved_dim", len(shape)) == 0:
                return None
        elif not same:
            whole_rows = kind == "MaskedSelect" or _dimension(node, "_saved_dim", len(shape)) == 0
            lookup = kind == "Index" and node._saved_indices[0] is None  # type: ignore[attr-defined]
            return int(shape[0]) if whole_rows and not lookup else None
    return None


def _chain(node: Node | None) -> list[tuple[str, Node, Node, int]]:
    """The operations behind an output that are looked through, each with what it was made of; none if none takes rows.

    It ends where the one argument is a parameter, whose rows are looked up, and where there are two that were computed.
    """
    found, taking = list[tuple[str, Node, Node, int]](), False
    following = () if node is None else node.next_functions
    while node is not None and len(found) < NEAR and (kind := kind_of(node)) in LOOKED_AT:
        inner = [(one, number, one.next_functions) for one, number in following if one is not None]
        computed = [each for each in inner if each[2]]
        if len(computed) != 1:
            break
        source, number, following = computed[0]
        found.append((kind, node, source, number))
        taking = taking or kind in _TAKING
        node = source
    return found if taking else []


def _dimension(node: Node, name: str, dimensions: int) -> int:
    """A dimension that a node has kept."""
    return _wrapped(getattr(node, name, 0), dimensions)


def _wrapped(dimension: int, dimensions: int) -> int:
    """It may be counted from the end, and autograd shows it without its sign."""
    signed = dimension - 2**64 if dimension >= 2**63 else dimension
    return signed % max(1, dimensions)


def _moves_rows(node: Node, dimensions: int) -> bool:
    if kind_of(node) == "Permute":
        return _wrapped(node._saved_dims[0], dimensions) != 0  # type: ignore[attr-defined]
    return 0 in (_dimension(node, "_saved_dim0", dimensions), _dimension(node, "_saved_dim1", dimensions))


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
