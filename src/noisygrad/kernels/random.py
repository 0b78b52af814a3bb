"""Random numbers that are the same on every device."""

import numpy as np
import torch


def epoch_generator(seed: int, epoch: int) -> torch.Generator:
    """The generator of one epoch's order of examples, on the CPU."""
    words = np.random.SeedSequence([seed, epoch]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(words[0] >> np.uint64(1)))
