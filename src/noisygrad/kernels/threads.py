"""How many threads work on what: one for small networks, and independent pieces of work on one core each.

The threads of one piece of work wait for each other, which for small matrices costs more than they save.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import count
from typing import TypeVar

import torch

Made = TypeVar("Made")

_POOLS: dict[int, ThreadPoolExecutor] = {}
"""Pools by their number of threads, which are kept: a thread that wakes up gets a busy core sooner than a new one."""

INHERITED = threading.local()
"""Settings of a thread of the library's own, which those that work for it (`run_in_threads`) have too."""


@contextmanager
def one_thread(when: bool = True) -> Iterator[None]:
    """One thread for torch's CPU work inside; as many as before outside.

    Small networks train faster so: on two busy cores sevenfold. A result is then also independent of the number of
    cores.
    """
    threads = torch.get_num_threads()
    if when:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if when:
            torch.set_num_threads(threads)


def run_in_threads(
    works: Sequence[Callable[[], Made]], *, when: bool = True, device: torch.device | None = None
) -> list[Made]:
    """The results of independent pieces of work without gradients, as many at a time as torch has threads.

    Each runs on one thread; the caller's thread takes part. Otherwise every small operation would be divided among the
    cores and waited for, which on a busy machine costs more than the work. Without `when`, and on a `device` that is no
    CPU, one after the other.
    """
    when = when and (device is None or device.type == "cpu")
    # Asked in this order, because a step that is compiled cannot ask for the number of threads.
    if not when or len(works) < 2 or (threads := torch.get_num_threads()) == 1:
        return [work() for work in works]
    turns = count()
    found: dict[int, Made] = {}
    settings = dict(vars(INHERITED))

    def take_turns() -> None:
        nonlocal turns
        vars(INHERITED).clear()  # of a helper, which keeps those of the thread that it works for next
        vars(INHERITED).update(settings)
        torch.set_num_threads(1)  # of this thread, and of the libraries below torch
        # Autograd and autocast are settings of a thread: no result may depend on which thread computed it.
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            try:
                while (turn := next(turns)) < len(works):  # atomic in the interpreter: no turn is taken twice
                    found[turn] = works[turn]()
            except BaseException:
                turns = count(len(works))  # no thread starts another one
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
    """Wait until all have finished, even if interrupted."""
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
