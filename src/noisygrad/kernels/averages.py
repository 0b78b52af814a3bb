"""Moving averages of many tensors at once."""

from __future__ import annotations

import torch
from torch import Tensor


def average_(old: list[Tensor], new: list[Tensor], rate: Tensor | float, mask: Tensor | None = None) -> None:
    """In place: old + rate · (new − old) for each pair, overwriting the new ones; nothing bad in them where masked.

    On a GPU by a few launches and in the memory of the new ones: the moments of a deep network are as large as its
    activations.
    """
    if mask is not None:
        masked = mask <= 0
        for tensor in new:
            tensor.masked_fill_(masked, 0.0)
    if old[0].device.type == "cpu":
        for tensor, other in zip(old, new, strict=True):
            tensor.lerp_(other, rate)
        return
    torch._foreach_sub_(new, old)
    torch._foreach_mul_(new, rate)
    torch._foreach_add_(old, new)
