"""The random numbers of an optimiser: one generator per replica, and different ones on every rank unless asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from numbers import Integral

import torch
from torch import Tensor

from noisygrad.distributed import Ranks
from noisygrad.kernels.factorisation import capturing
from noisygrad.kernels.threads import run_in_threads

PARTS, LARGE = 32, 1_000_000
"""A row of so many numbers is drawn in so many parts."""
BETWEEN_RANKS = 1_000_003
"""Between the seeds of neighbouring ranks, so that they do not meet those of neighbouring replicas."""


def make_generators(
    seed: int | Sequence[int] | None, count: int, device: torch.device, ranks: Ranks, *, same_draw: bool
) -> list[torch.Generator]:
    """`count` generators; without a seed they follow `torch.manual_seed`."""
    if seed is None:
        seed = int(torch.randint(2**62, ()).item())
    if not isinstance(seed, Integral) and (isinstance(seed, str) or not isinstance(seed, Sequence)):
        raise ValueError(f"seed must be an integer, or one for each replica; got {seed!r}")
    seeds = [int(seed) + index for index in range(count)] if isinstance(seed, Integral) else [int(s) for s in seed]
    if len(seeds) != count:
        raise ValueError(f"expected {count} seeds, one per replica; got {len(seeds)}")
    seeds = [ranks.same_for_all(value) for value in seeds]
    offset = 0 if same_draw else ranks.rank * BETWEEN_RANKS
    return [torch.Generator(device).manual_seed((value + offset) % 2**63) for value in seeds]


def part_generators_(generators: Sequence[torch.Generator], saved: int, ranks: Ranks, *, same_draw: bool) -> None:
    """After a load: give a rank numbers of its own where the state is that of another rank, `saved`."""
    if same_draw or saved == ranks.rank:
        return
    for generator in generators:
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device).item())
        generator.manual_seed(seed + ranks.rank * BETWEEN_RANKS)


def fill_normal_(noise: Tensor, generators: Sequence[torch.Generator]) -> None:
    """Standard normal numbers into `[*replicas, n]`, each replica's from its own generator."""
    rows = noise.view(len(generators), -1).unbind() if len(generators) > 1 else (noise.view(-1),)
    for row, generator in zip(rows, generators, strict=True):
        if row.numel() >= LARGE and row.device.type == "cpu":
            _fill_in_parts_(row, generator)
        else:
            row.normal_(generator=generator)


def _fill_in_parts_(row: Tensor, generator: torch.Generator) -> None:
    """The same for a long row on a CPU, where a generator keeps one core busy: each part has a generator of its own.

    There are as many parts on every machine, so that a seed means the same numbers however many threads there are.
    """
    # A generator on a CPU knows 32 bits of its seed. In a long training a few of its parts are drawn twice: no harm.
    seeds = torch.randint(2**32, (PARTS,), generator=generator, device=row.device).tolist()

    def fill(part: Tensor, seed: int) -> None:
        part.normal_(generator=torch.Generator(row.device).manual_seed(seed))

    run_in_threads([partial(fill, part, seed) for part, seed in zip(row.chunk(PARTS), seeds, strict=True)])


@contextmanager
def undone_on_failure(generators: Sequence[torch.Generator], drop: Callable[[], None]) -> Iterator[None]:
    """On an exception inside, `drop` what was gathered and set the generators back."""
    states = [] if capturing() else [generator.get_state() for generator in generators]
    try:
        yield
    except BaseException:
        for generator, state in zip(generators, states, strict=False):
            generator.set_state(state)
        drop()
        raise
