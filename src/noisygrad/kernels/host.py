"""What host and device share: values that the host reads, and random numbers."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor


def reading_waits(tensor: Tensor) -> bool:
    """Whether the host, to read a value of this tensor, has to wait for the device to finish its work."""
    return tensor.is_cuda


def own_random_numbers(device: torch.device) -> AbstractContextManager[None]:
    """Torch's generators of the CPU and of this device are afterwards as they were before."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])
