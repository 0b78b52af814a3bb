"""Work on long vectors and on many tensors at once, which a CPU and a GPU do best in different ways."""

from collections.abc import Sequence

import torch
from torch import Tensor


def inner_product(first: Tensor, second: Tensor) -> Tensor:
    """Σ a b over the last dimension, `[..., 1]`; not by cuBLAS, which would keep some memory of its own for it."""
    on_cpu = first.device.type == "cpu"
    found: Tensor = torch.linalg.vecdot(first, second) if on_cpu else (first * second).sum(dim=-1)
    return found.unsqueeze(-1)


def scale_unless_one_(vector: Tensor, factor: Tensor) -> Tensor:
    """In place: vector · factor; a CPU looks first whether the pass over the vector would change anything."""
    if factor.device.type == "cpu" and not torch.compiler.is_compiling() and bool((factor == 1.0).all()):
        return vector
    return vector.mul_(factor)


def average_into_(new: list[Tensor], old: list[Tensor], rate: Tensor | float, mask: Tensor | None = None) -> None:
    """In place: old + rate · (new − old) in the place of new, for each pair; nothing bad in them where masked.

    On a GPU by a few launches, and nowhere in other memory: the moments of a deep network are as large as its
    activations.
    """
    if mask is not None:
        masked = mask <= 0
        for tensor in new:
            tensor.masked_fill_(masked, 0.0)
    if old[0].device.type == "cpu":
        for tensor, other in zip(old, new, strict=True):
            torch.lerp(tensor, other, rate, out=other)
        return
    rate = rate.reshape(()) if isinstance(rate, Tensor) else rate  # one of several would not be taken for a number
    torch._foreach_sub_(new, old)
    torch._foreach_mul_(new, rate)
    torch._foreach_add_(new, old)


class Backup:
    """What tensors hold now; with `elsewhere` a GPU's are copied to the host's memory: nothing waits for them there."""

    @torch.no_grad()
    def __init__(self, tensors: Sequence[Tensor], *, elsewhere: bool) -> None:
        self._tensors = list(tensors)
        self._copies = [_on_host(t) if elsewhere and t.is_cuda else t.clone() for t in self._tensors]

    @torch.no_grad()
    def restore(self) -> None:
        """Write it back."""
        for tensor, copy in zip(self._tensors, self._copies, strict=True):
            tensor.copy_(copy)


def _on_host(tensor: Tensor) -> Tensor:
    try:
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    except RuntimeError:  # a system may allow few such pages; then the copy is waited for
        return tensor.cpu()
    return copy.copy_(tensor, non_blocking=True)
