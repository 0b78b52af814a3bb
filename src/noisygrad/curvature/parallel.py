"""Pieces of work side by side on a CPU, each on one core: their threads then never wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

Made = TypeVar("Made")


def side_by_side(works: Sequence[Callable[[], Made]], *, when: bool = True) -> list[Made]:
    """The results of independent pieces of work without gradients, as many at a time as torch has threads.

    Each runs on one thread. Many small operations of one layer after the other would each be divided among the cores
    and waited for, which on a busy machine costs more than the work. Without `when`, one after the other.
    """
    threads = torch.get_num_threads()
    if not when or threads == 1 or len(works) < 2:
        return [work() for work in works]

    def alone(work: Callable[[], Made]) -> Made:
        with torch.no_grad():
            return work()

    torch.set_num_threads(1)  # threads made from now on, and the libraries below torch, have one each
    try:
        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(alone, works))
    finally:
        torch.set_num_threads(threads)
