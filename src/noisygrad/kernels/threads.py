"""Pieces of work side by side on a CPU, each on one core: their threads then never wait for each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from itertools import count
from typing import TypeVar

import torch

Made = TypeVar("Made")

_POOLS: dict[int, ThreadPoolExecutor] = {}
"""Helpers that stay, by how many there are: a thread that wakes up is let in at once by a core that others wait on."""


def run_in_threads(works: Sequence[Callable[[], Made]], *, when: bool = True) -> list[Made]:
    """The results of independent pieces of work without gradients, as many at a time as torch has threads.

    Each runs on one thread, of which the caller's is one. Many small operations of one layer after the other would
    each be divided among the cores and waited for, which on a busy machine costs more than the work. Without `when`,
    one after the other.
    """
    # Asked in this order, because a step that is compiled cannot ask for the number of threads.
    if not when or len(works) < 2 or (threads := torch.get_num_threads()) == 1:
        return [work() for work in works]
    turns = count()
    found: dict[int, Made] = {}

    def take_turns() -> None:
        nonlocal turns
        torch.set_num_threads(1)  # of this thread, and of the libraries below torch
        # What is switched for the caller alone must not matter, since nobody knows who has which turn.
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            try:
                while (turn := next(turns)) < len(works):  # one step of the interpreter: no turn is taken twice
                    found[turn] = works[turn]()
            except BaseException:
                turns = count(len(works))  # nobody begins anything more
                raise

    pool = _POOLS.get(threads - 1) or _POOLS.setdefault(threads - 1, ThreadPoolExecutor(threads - 1))
    helpers: list[Future[None]] = []
    try:
        helpers.extend(pool.submit(take_turns) for _ in range(threads - 1))
        take_turns()
    finally:
        try:
            _wait_for(helpers)
        finally:
            torch.set_num_threads(threads)
    for helper in helpers:
        helper.result()
    return [found[turn] for turn in range(len(works))]


def _wait_for(helpers: Sequence[Future[None]]) -> None:
    """Until none is at work any more, however often somebody asks to stop."""
    interrupt: KeyboardInterrupt | None = None
    while True:
        try:
            wait(helpers)
            break
        except KeyboardInterrupt as asked:
            interrupt = asked
    if interrupt is not None:
        raise interrupt


if hasattr(os, "register_at_fork"):  # a forked process has the pools, but not their threads
    os.register_at_fork(after_in_child=_POOLS.clear)
