"""What host and device share: random numbers."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch


def own_random_numbers(device: torch.device) -> AbstractContextManager[None]:
    """Torch's generators of the CPU and of this device are afterwards as they were before."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])
