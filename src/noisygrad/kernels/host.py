"""What the host may look at while a device is at work."""

from __future__ import annotations

from torch import Tensor


def reading_waits(tensor: Tensor) -> bool:
    """Whether the host, to read a value of this tensor, has to wait for the device to finish its work."""
    return tensor.is_cuda
