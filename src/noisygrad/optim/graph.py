"""What outputs are made of, read off autograd's graph: where losses need it, which a plain step does not."""

from torch import nn
from torch.autograd.graph import Node

_COPIES = {"ToCopyBackward0", "TBackward0", "TransposeBackward0", "PermuteBackward0", "ViewBackward0", "CloneBackward0"}


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
