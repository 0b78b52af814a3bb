"""The random generators of an optimiser: one for each replica, others on each rank."""

from collections.abc import Sequence
from numbers import Integral

import numpy as np
import torch

from noisygrad.distributed import Ranks

BETWEEN_RANKS = 1_000_003
"""Between the seeds of neighbouring ranks, so that they do not meet those of neighbouring replicas."""


def seeds_of(seed: int | Sequence[int] | None, count: int) -> list[int]:
    """One for each replica: those given, or the first of them and its successors; without any from torch's own."""
    if seed is None:
        seed = int(torch.randint(2**62, ()).item())
    if isinstance(seed, Integral):
        return [int(seed) + index for index in range(count)]
    if isinstance(seed, str) or not isinstance(seed, Sequence | np.ndarray) or len(seed) != count:
        raise ValueError(f"seed must be an integer, or {count} of them, one per replica; got {seed!r}")
    return [int(value) for value in seed]


def make_generators(
    seed: int | Sequence[int] | None, count: int, device: torch.device, ranks: Ranks, *, same_draw: bool
) -> list[torch.Generator]:
    """A generator for each replica, others on each rank unless they are to draw the same."""
    seeds = [ranks.same_for_all(value) for value in seeds_of(seed, count)]
    offset = 0 if same_draw else ranks.rank * BETWEEN_RANKS
    return [torch.Generator(device).manual_seed((value + offset) % 2**63) for value in seeds]


def part_generators_(generators: Sequence[torch.Generator], saved: int, ranks: Ranks, *, same_draw: bool) -> None:
    """After a load: give a rank numbers of its own where the state is that of another rank, `saved`."""
    if same_draw or saved == ranks.rank:
        return
    for generator in generators:
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device).item())
        generator.manual_seed(seed + ranks.rank * BETWEEN_RANKS)
