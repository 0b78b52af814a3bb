"""Random numbers of an optimiser: long rows are drawn in parts, on as many threads as there are."""

from __future__ import annotations

import pytest
import torch

from noisygrad.optim.draw import LARGE, PARTS, fill_normal_


def drawn(size: int, threads: int, seed: int = 0):
    """Noise of two replicas, and what their generators say next."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        generators = [torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed + 1)]
        noise = torch.empty(2, size)
        fill_normal_(noise, generators)
        first = noise.clone()
        fill_normal_(noise, generators)
    finally:
        torch.set_num_threads(before)
    return first, noise, [torch.rand((), generator=generator) for generator in generators]


@pytest.mark.parametrize("size", [LARGE - 1, LARGE, LARGE + 5])
def test_a_seed_means_the_same_numbers_on_any_number_of_threads(size: int) -> None:
    one, several = drawn(size, 1), drawn(size, 3)
    assert torch.equal(one[0], several[0])
    assert torch.equal(one[1], several[1])
    assert one[2] == several[2]
    for row in one[0]:
        assert abs(float(row.mean())) < 5 / size**0.5
        assert float(row.var()) == pytest.approx(1.0, abs=5 * (2 / size) ** 0.5)


def test_no_two_parts_are_alike() -> None:
    first, second, _ = drawn(LARGE, 2)
    parts = [part[:100] for noise in (first, second) for row in noise for part in row.chunk(PARTS)]
    correlations = torch.corrcoef(torch.stack(parts)).fill_diagonal_(0.0)
    assert float(correlations.abs().max()) < 0.5


def test_a_lone_replica_draws_what_a_lone_training_does() -> None:
    alone, replica = torch.empty(LARGE), torch.empty(1, LARGE)
    for noise in (alone, replica):
        fill_normal_(noise, [torch.Generator().manual_seed(3)])
    assert torch.equal(alone, replica[0])


def test_short_rows_are_drawn_as_they_are() -> None:
    noise = torch.empty(100)
    fill_normal_(noise, [torch.Generator().manual_seed(0)])
    assert torch.equal(noise, torch.empty(100).normal_(generator=torch.Generator().manual_seed(0)))
