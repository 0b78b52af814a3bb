"""Processes of tests that may be killed: they start from a clean one, never from this one with its threads."""

from __future__ import annotations

import datetime
import faulthandler
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.context import BaseContext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def clean_processes() -> BaseContext:
    """A context whose processes start without the threads of this one, such as JAX's, which do not outlive a fork.

    Where there can be a server it has imported what takes long, so that a process starts in an instant.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["noisygrad_paper.experiments.runner"])
    return context


def run_ranks(work: Callable[[int, str], Any], folder: Path, seconds: int) -> list[dict[str, Any]]:
    """What `work(rank, folder)` returns in two processes of one gloo group; none outlives this, whatever happens."""
    context = mp.spawn(_run_rank, args=(work, str(folder), seconds), nprocs=2, join=False)
    try:
        deadline = time.monotonic() + seconds
        while not context.join(timeout=5):
            assert time.monotonic() < deadline, "the two processes wait for one another"
    finally:
        for process in context.processes:
            if process.is_alive():
                process.kill()
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in (0, 1)]


def _run_rank(rank: int, work: Callable[[int, str], Any], folder: str, seconds: int) -> None:
    faulthandler.dump_traceback_later(seconds * 0.9, exit=True)  # says where it waits
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=seconds / 2)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2, timeout=timeout)
    torch.save(work(rank, folder), f"{folder}/{rank}.pt")
    dist.destroy_process_group()
    faulthandler.cancel_dump_traceback_later()
