"""Random numbers that are the same on every device, or that leave torch's own generators alone."""

from __future__ import annotations

from contextlib import AbstractContextManager

import numpy as np
import torch


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """The generator of one epoch's order of examples, on the CPU."""
    words = np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(words[0] >> np.uint64(1)))


def own_random_numbers(device: torch.device) -> AbstractContextManager[None]:
    """Torch's generators of the CPU and of this device are afterwards as they were before."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])
