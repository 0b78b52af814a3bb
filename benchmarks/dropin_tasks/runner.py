"""Runs what is missing from a file of results, in one process or several."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import results
from .cell import run_cell
from .methods import Method
from .store import Store, UnavailableError
from .tasks import TASKS
from .variation import Variation


@dataclass(frozen=True, kw_only=True)
class Order:
    """What is asked for."""

    tasks: Sequence[str]
    methods: Sequence[Method]
    seeds: int
    variation: Variation
    output: Path
    folder: Path
    only_prepared: bool = False
    jobs: int = 1


@dataclass(frozen=True)
class Job:
    """One training, as it is sent to another process."""

    task: str
    method: Method
    seed: int
    variation: Variation
    folder: Path
    only_prepared: bool

    @property
    def key(self) -> results.Key:
        """What its record is kept by."""
        return self.task, self.method.name + self.variation.label, self.seed


Answer = tuple[Job, dict[str, Any] | str]
"""A record, or why there is none."""


def missing(order: Order) -> list[Job]:
    """The trainings that have no line yet; all methods of a task and seed follow one another.

    Raises ValueError where a line has other settings under the same name.
    """
    done = results.read(order.output)
    jobs = [
        Job(task, method, seed, order.variation, order.folder, order.only_prepared)
        for seed in range(order.seeds)
        for task in order.tasks
        for method in order.methods
    ]
    for job in jobs:
        known = done.get(job.key, {}).get("settings", dict(job.method.settings))
        if known != dict(job.method.settings):
            raise ValueError(
                f"{order.output} has {job.key[1]} with the settings {known}, not {dict(job.method.settings)}: give "
                "these another --label or another --output"
            )
    return [job for job in jobs if job.key not in done]


_stores: dict[tuple[Path, bool], Store] = {}


def work(job: Job) -> Answer:
    """Do one training; in the main process or in another."""
    torch.set_num_threads(1)
    store = _stores.setdefault((job.folder, job.only_prepared), Store(job.folder, only_prepared=job.only_prepared))
    try:
        return job, run_cell(TASKS[job.task], job.method, job.seed, job.variation, store)
    except UnavailableError as why:
        return job, str(why)


def run(order: Order, tell: Callable[[int, int, Answer], None]) -> dict[str, str]:
    """Run what is missing, each result written as it comes; returns why tasks or methods were skipped."""
    jobs = missing(order)
    skipped: dict[str, str] = {}
    for count, (job, found) in enumerate(_answers(jobs, order.jobs), start=1):
        if isinstance(found, str):
            skipped[f"{job.task} by {job.method.name}"] = found
        else:
            results.append(order.output, found)
        tell(count, len(jobs), (job, found))
    return skipped


def _answers(jobs: Iterable[Job], processes: int) -> Iterator[Answer]:
    if processes == 1:
        yield from map(work, jobs)
        return
    # Not forked: torch's threads do not survive that.
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
    try:
        waiting = {pool.submit(work, job) for job in jobs}
        while waiting:
            finished, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for one in finished:
                yield one.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        for process in list((getattr(pool, "_processes", None) or {}).values()):
            process.terminate()  # what it was at is done again
