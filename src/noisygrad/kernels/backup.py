"""Copies of tensors, for the case that what changes them fails."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Backup:
    """What tensors hold now.

    Args:
        tensors: The tensors.
        elsewhere: Whether the copies of a GPU's tensors belong into the host's memory: nothing waits for them there.
    """

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
