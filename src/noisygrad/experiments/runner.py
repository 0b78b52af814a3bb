"""Runs the missing cells of an experiment: in this process, in several (joblib), or on a Dask cluster through joblib.

Finished cells are stored as they come in, by this process alone, so that a run stopped at any moment goes on where it
was when it is started again. A job that fails does not stop the others.
"""

from __future__ import annotations

import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from statistics import fmean
from typing import Any, Literal, TypeAlias

import joblib
from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from noisygrad.experiments.cells import Cell, Job, Results
from noisygrad.training.threads import one_thread

Report: TypeAlias = Callable[[float, str], None]
"""Called by a job at work: the fraction of it that is done, and a word on what it does."""
Work: TypeAlias = Callable[[Job, Report], list[Cell]]
"""Computes the cells of a job, one per replicate; at the top of a module, so that other processes can import it."""
Announce: TypeAlias = Callable[[str], None]
Backend: TypeAlias = Literal["local", "joblib", "dask"]

_CONNECT_SECONDS = 10
_EVERY_SECONDS = 0.1


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A job that failed: none of its cells is stored."""

    job: Job
    error: str
    trace: str = ""
    """The traceback, where there is one."""

    def __str__(self) -> str:
        return f"{self.job.name} (replicates {', '.join(map(str, self.job.replicates))}): {self.error}"


class JobsFailed(RuntimeError):  # noqa: N818
    """Some jobs failed; all others are done and stored. `failures` says which and why."""

    def __init__(self, failures: Sequence[Failure], jobs: int) -> None:
        self.failures = tuple(failures)
        lines = "".join(f"\n  {failure}" for failure in failures)
        super().__init__(f"{len(failures)} of {jobs} jobs failed; the same command tries them again:{lines}")


def run_jobs(
    jobs: Sequence[Job],
    work: Work,
    results: Results,
    *,
    backend: Backend = "local",
    workers: int = 1,
    scheduler: str | None = None,
    progress: bool | None = True,
    announce: Announce | None = None,
) -> list[Cell]:
    """Compute what is missing of a plan and store it; gives the plan's cells, failed ones among them, in its order.

    Args:
        jobs: The plan. Of each job only the replicates that are not stored are computed.
        work: Computes a job's cells; may raise, and then the other jobs go on.
        results: Where cells are stored.
        backend: "local" computes one job after the other in this process, "joblib" several at once in processes of
            their own, "dask" on a cluster. Other processes use one thread of torch each.
        workers: Processes of "joblib".
        scheduler: Address of the cluster's scheduler, for "dask". Its workers should have one thread each.
        progress: True shows a bar on a terminal, a line per finished job elsewhere; None the bar only; False neither.
        announce: Takes the lines of text, failures among them; they go to the error stream by default.

    Raises:
        ConfigurationError: The stored cells were made by another configuration.
        JobsFailed: Some jobs failed; raised when all others are done.
        ConnectionError: No scheduler answers, or it has no workers. ModuleNotFoundError: Dask is not installed.
        ValueError: An argument is wrong.
    """
    _check(jobs, backend, workers, scheduler, progress)
    left = results.missing(jobs)
    total = sum(len(job.replicates) for job in jobs)
    stored = total - sum(len(job.replicates) for job in left)
    failures: list[Failure] = []
    with _display(progress, announce, total, stored, sum(map(_cost, left))) as display:
        if stored:
            display.say(f"{stored} of {total} cells are already in {results.path}")
        if backend == "local" or not left:
            outcomes = _one_by_one(work, left, results.experiment, display)
        elif scheduler is None:
            outcomes = _in_processes(work, left, results.experiment, workers)
        else:
            outcomes = _on_cluster(work, left, results.experiment, scheduler)
        try:
            with closing(outcomes):
                for outcome in outcomes:
                    if outcome.failure is not None:
                        failures.append(outcome.failure)
                        display.say(f"failed: {outcome.failure}")
                    else:
                        results.append(outcome.cells)
                    display.finished(outcome.job, outcome.cells)
        except KeyboardInterrupt:
            kept = total - sum(len(job.replicates) for job in results.missing(jobs))
            display.say(f"Interrupted: {kept} of {total} cells are in {results.path}; the same command goes on.")
            raise
    if failures:
        raise JobsFailed(failures, len(left))
    found = {cell.key: cell for cell in results.load()}
    return [found[job.data, job.method, number] for job in jobs for number in job.replicates]


def _check(jobs: Sequence[Job], backend: str, workers: int, scheduler: str | None, progress: bool | None) -> None:
    if backend not in ("local", "joblib", "dask"):
        raise ValueError(f'backend must be "local", "joblib" or "dask"; got {backend!r}')
    if progress is not None and not isinstance(progress, bool):
        raise ValueError(f"progress must be True, False or None; got {progress!r}")
    if workers < 1 or (workers > 1 and backend != "joblib"):
        raise ValueError(f'workers must be at least 1, and is for the backend "joblib"; got {workers} for {backend!r}')
    if backend == "dask" and not scheduler:
        raise ValueError('the backend "dask" needs the scheduler\'s address: --scheduler tcp://HOST:8786')
    if backend != "dask" and scheduler:
        raise ValueError(f'a scheduler is for the backend "dask"; got {scheduler!r} for {backend!r}')
    keys = Counter((job.data, job.method, number) for job in jobs for number in job.replicates)
    twice = [" ".join(map(str, key)) for key, count in keys.items() if count > 1]
    if twice:
        raise ValueError(f"a plan has each cell once; more than once are {', '.join(twice)}")


def _cost(job: Job) -> float:
    return job.cost * len(job.replicates)


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    job: Job
    cells: tuple[Cell, ...] = ()
    failure: Failure | None = None


_Outcomes: TypeAlias = Generator[_Outcome, None, None]


def _failed(job: Job, error: str, trace: str = "") -> _Outcome:
    return _Outcome(job=job, failure=Failure(job=job, error=error, trace=trace))


def _attempt(work: Work, job: Job, experiment: str, report: Report) -> _Outcome:
    try:
        cells = tuple(work(job, report))
        wanted = [(job.data, job.method, number) for number in sorted(job.replicates)]
        given = sorted(cell.key for cell in cells)
        if given != wanted or any((cell.experiment, cell.config) != (experiment, job.config) for cell in cells):
            raise ValueError(f"the work must give the cells {wanted} of {experiment} with its config; got {cells}")
    except Exception as error:
        return _failed(job, f"{type(error).__name__}: {error}", traceback.format_exc())
    return _Outcome(job=job, cells=cells)


def _attempt_elsewhere(work: Work, job: Job, experiment: str, number: int) -> tuple[int, _Outcome]:
    """In another process: with one thread, since there are several such processes, and without a bar to move."""
    with one_thread():
        return number, _attempt(work, job, experiment, lambda fraction, text: None)


def _one_by_one(work: Work, jobs: Sequence[Job], experiment: str, display: _Display) -> _Outcomes:
    for job in jobs:
        yield _attempt(work, job, experiment, partial(display.within, job))


def _in_processes(work: Work, jobs: Sequence[Job], experiment: str, workers: int) -> _Outcomes:
    """A process that dies takes the whole pool with it: who was at work then is tried again, each in a pool alone."""
    waiting: Iterator[tuple[int, Job]] = enumerate(jobs)
    again: list[tuple[int, Job]] = []
    while batch := list(waiting):
        waiting, sent = iter(batch), dict[int, Job]()
        try:
            yield from _stream(work, waiting, sent, experiment, n_jobs=workers, backend="loky")
        except BrokenProcessPool:
            again += sent.items()
    for number, job in again:
        try:
            # Two, though one is needed: joblib computes in this process where one is asked for.
            yield from _stream(work, iter([(number, job)]), {}, experiment, n_jobs=2, backend="loky")
        except BrokenProcessPool as error:
            yield _failed(job, f"its process died, perhaps for want of memory ({type(error).__name__})", str(error))


def _on_cluster(work: Work, jobs: Sequence[Job], experiment: str, scheduler: str) -> _Outcomes:
    with _client(scheduler) as client:
        waiting, sent = enumerate(jobs), dict[int, Job]()
        try:
            yield from _stream(work, waiting, sent, experiment, n_jobs=-1, backend=_dask_backend(client))
        except Exception as error:
            # A job's own errors come back as outcomes, and so do those of lost workers: this is the cluster's end.
            for _, job in [*sent.items(), *waiting]:
                yield _failed(job, f"the cluster at {scheduler} was lost ({type(error).__name__})", str(error))


def _stream(
    work: Work, waiting: Iterator[tuple[int, Job]], sent: dict[int, Job], experiment: str, **parallel: Any
) -> _Outcomes:
    """Outcomes as they come in; meanwhile `sent` has the jobs at work, and `waiting` gives those not yet sent."""

    def calls() -> Iterator[Any]:
        for number, job in waiting:
            sent[number] = job
            yield joblib.delayed(_attempt_elsewhere)(work, job, experiment, number)

    # Sent one by one as processes become free, so that `sent` has no job that nobody works at.
    pool = joblib.Parallel(return_as="generator_unordered", pre_dispatch="n_jobs", batch_size=1, **parallel)
    with closing(pool(calls())) as outcomes:
        for number, outcome in outcomes:
            del sent[number]
            yield outcome


@contextmanager
def _client(scheduler: str) -> Iterator[Any]:
    try:
        distributed = import_module("distributed")
    except ImportError as reason:
        raise ModuleNotFoundError('Dask is not installed: pip install "noisygrad[cluster]"') from reason
    try:
        client = distributed.Client(scheduler, timeout=_CONNECT_SECONDS, set_as_default=False)
    except (OSError, ValueError) as reason:
        raise ConnectionError(
            f"no Dask scheduler answered at {scheduler} within {_CONNECT_SECONDS} s ({reason}): "
            "check the address, or start one with `dask scheduler` and workers with `dask worker --nthreads 1 ADDRESS`"
        ) from reason
    with client:
        try:
            client.wait_for_workers(1, timeout=_CONNECT_SECONDS)
        except TimeoutError as reason:
            raise ConnectionError(
                f"the Dask scheduler at {scheduler} has no workers: start some, `dask worker --nthreads 1 {scheduler}`"
            ) from reason
        if max(client.nthreads().values()) > 1:
            # Torch's global generator is one for all threads of a process.
            warnings.warn("Dask workers with several threads may give other figures: use --nthreads 1", stacklevel=2)
        yield client


def _dask_backend(client: Any) -> Any:
    """joblib's backend for Dask, which also says when a job's workers are lost; joblib's own would wait for ever."""
    from joblib._dask import DaskDistributedBackend

    class Told(DaskDistributedBackend):  # type: ignore[misc]
        def submit(self, func: Any, callback: Callable[[Any], None]) -> Any:
            def told(future: Any) -> None:
                if error := future.exception():
                    _, (_, job, _, number), _ = func.items[0]
                    callback([(number, _failed(job, f"its workers were lost, perhaps for want of memory: {error}"))])

            future = super().submit(func, callback)
            future.add_done_callback(told)
            return future

    return Told(client=client)


class _Display:
    """Keeps count, and says lines of text; the others also show how far the run is."""

    def __init__(self, announce: Announce | None, total: int, done: int, cost: float) -> None:
        self.console = Console(file=sys.stderr, highlight=False, markup=False, soft_wrap=True)
        self.announce, self.total, self.done = announce, total, done
        self._cost, self._spent, self._start = cost, 0.0, time.monotonic()

    def say(self, text: str) -> None:
        """A line of text, above the bar where there is one."""
        (self.announce or self.console.print)(text)

    def within(self, job: Job, fraction: float, text: str) -> None:
        """A job is done in part."""

    def finished(self, job: Job, cells: Sequence[Cell]) -> None:
        """A job has ended, with cells or without."""
        self._spent += _cost(job)
        self.done += sum(cell.error is None for cell in cells)
        for cell in cells:
            if cell.error is not None:
                self.say(f"failed: {cell.label}: {cell.error}")

    def left(self, fraction: float = 0.0) -> float | None:
        """Seconds to the end, from those gone by and the expected costs; `fraction` is a part of a cost besides."""
        spent = self._spent + fraction
        return (time.monotonic() - self._start) * (self._cost - spent) / spent if spent else None


class _Lines(_Display):
    """One line per finished job, for a log."""

    def finished(self, job: Job, cells: Sequence[Cell]) -> None:
        super().finished(job, cells)
        left = self.left()
        if figures := _figures(cells):
            self.say(
                f"{self.done}/{self.total} cells  {job.name} {figures}  {_duration(time.monotonic() - self._start)}"
                + (f", {_duration(left)} left" if left else "")
            )


class _Bar(_Display):
    """A bar on a terminal."""

    def __init__(self, announce: Announce | None, total: int, done: int, cost: float) -> None:
        super().__init__(announce, total, done, cost)
        self.progress = _TwoLines(
            TextColumn("{task.fields[cells]} cells", markup=False),
            BarColumn(),
            TimeElapsedColumn(),
            _TimeLeft(),
            console=self.console,
            transient=True,
        )
        self._task = self.progress.add_task("", total=cost or 1.0, cells=f"{done}/{total}", end=None)
        self._last, self._next = "", 0.0

    def within(self, job: Job, fraction: float, text: str) -> None:
        if time.monotonic() >= self._next:
            last = f"   last: {self._last}" if self._last else ""
            self._move(_cost(job) * min(max(fraction, 0.0), 1.0), f"{job.name}: {text}{last}")

    def finished(self, job: Job, cells: Sequence[Cell]) -> None:
        super().finished(job, cells)
        if figures := _figures(cells):
            self._last = f"{job.name} {figures}"
        self._move(0.0, self._last)

    def _move(self, part: float, text: str) -> None:
        now, left = time.monotonic(), self.left(part)
        self._next = now + _EVERY_SECONDS
        self.progress.update(
            self._task,
            completed=self._spent + part,
            description=text,
            cells=f"{self.done}/{self.total}",
            end=None if left is None else now + left,
        )


class _TwoLines(Progress):
    """The figures have a line of their own, so that a narrow terminal keeps the bar."""

    def get_renderables(self) -> Iterator[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        for task in self.tasks:
            yield Text(task.description, no_wrap=True, overflow="ellipsis")


class _TimeLeft(ProgressColumn):
    """Counts down to the end that was last foreseen."""

    def render(self, task: Task) -> Text:
        end = task.fields["end"]
        return Text("" if end is None else f"{_duration(max(0.0, end - time.monotonic()))} left")


@contextmanager
def _display(
    progress: bool | None, announce: Announce | None, total: int, done: int, cost: float
) -> Iterator[_Display]:
    if progress is not False and Console(file=sys.stderr).is_terminal:
        bar = _Bar(announce, total, done, cost)
        with bar.progress:
            yield bar
    else:
        yield (_Lines if progress else _Display)(announce, total, done, cost)


def _figures(cells: Sequence[Cell]) -> str:
    """The first figures of a job, means over its cells; of a list, such as a learning curve, the last entry."""
    ends: dict[str, list[float]] = {}
    for cell in cells:
        for name, value in cell.metrics.items():
            ends.setdefault(name, []).extend(value[-1:] if isinstance(value, list) else [value])
    return "  ".join(f"{name} {fmean(values):.4g}" for name, values in list(ends.items())[:3] if values)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
