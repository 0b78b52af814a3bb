"""Pieces of work side by side on a CPU, each on one core: their threads then never wait for each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import TypeVar

import torch

Made = TypeVar("Made")

_POOLS: dict[int, ThreadPoolExecutor] = {}
"""Helpers that stay, by their number: a thread that wakes up is let in at once by a core that is merely waited on."""


def side_by_side(works: Sequence[Callable[[], Made]], *, when: bool = True) -> list[Made]:
    """The results of independent pieces of work without gradients, as many at a time as torch has threads.

    Each runs on one thread, of which the caller's is one. Many small operations of one layer after the other would
    each be divided among the cores and waited for, which on a busy machine costs more than the work. Without `when`,
    one after the other.
    """
    threads = torch.get_num_threads()
    if not when or threads == 1 or len(works) < 2:
        return [work() for work in works]
    turns = count()
    found: dict[int, Made] = {}

    def take_turns() -> None:
        with torch.no_grad():
            while (turn := next(turns)) < len(works):  # one step of the interpreter: no turn is taken twice
                found[turn] = works[turn]()

    torch.set_num_threads(1)  # threads made from now on, and the libraries below torch, have one each
    try:
        pool = _POOLS.get(threads) or _POOLS.setdefault(threads, ThreadPoolExecutor(threads - 1))
        helpers = [pool.submit(take_turns) for _ in range(threads - 1)]
        try:
            take_turns()
        finally:
            for helper in helpers:
                helper.exception()  # nothing is left at work, whatever happened here
        for helper in helpers:
            helper.result()
    finally:
        torch.set_num_threads(threads)
    return [found[turn] for turn in range(len(works))]


if hasattr(os, "register_at_fork"):  # a forked process has the pools, but not their threads
    os.register_at_fork(after_in_child=_POOLS.clear)
