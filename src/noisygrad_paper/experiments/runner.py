"""Runs the missing cells of an experiment: in this process, in several (joblib), or on a Dask cluster through joblib.

Finished cells are stored as they come in, by this process alone, so that a run stopped at any moment goes on where it
was when it is started again. A job that fails does not stop the others.
"""

import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Literal, TypeAlias

import joblib

from noisygrad.kernels.threads import one_thread
from noisygrad_paper.experiments.cells import Cell, Job, Report, Results
from noisygrad_paper.experiments.display import Announce, Display, cost_of, shown
from noisygrad_paper.experiments.notes import ProgressFile, notes_read

Work: TypeAlias = Callable[[Job, Report], list[Cell]]
"""Computes the cells of a job, one per replicate; at the top of a module, so that other processes can import it."""
Backend: TypeAlias = Literal["local", "joblib", "dask"]

_CONNECT_SECONDS = 10


@dataclass(frozen=True)
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
    on_stored: Callable[[Job], None] = lambda job: None,
) -> list[Cell]:
    """Compute what is missing of a plan and store it; gives the plan's cells, failed ones among them, in its order.

    Args:
        jobs: The plan. Of each job only the replicates that are not stored are computed.
        work: Computes a job's cells; may raise, and then the other jobs go on: JobsFailed is raised at the end.
        results: Where cells are stored; ConfigurationError if those there were made by another configuration.
        backend: "local" computes one job after the other in this process, "joblib" several at once in processes of
            their own, "dask" on a cluster. Other processes use one thread of torch each.
        workers: Processes of "joblib".
        scheduler: Address of the cluster's scheduler, for "dask". Its workers should have one thread each.
        progress: True shows a bar on a terminal, lines elsewhere; None the bar only; False neither.
        announce: Takes the lines of text, failures among them; they go to the error stream by default.
        on_stored: Called, in this process, with each job whose cells have been stored.
    """
    _check(jobs, backend, workers, scheduler, progress)
    left = results.missing(jobs)
    total = sum(len(job.replicates) for job in jobs)
    stored = total - sum(len(job.replicates) for job in left)
    failures: list[Failure] = []
    with shown(progress, announce, total, stored, sum(map(cost_of, left))) as display:
        if stored:
            display.say(f"{stored} of {total} cells are already in {results.path}")
        if backend == "local" or not left:
            outcomes = (_attempt(work, job, results.experiment, partial(display.within, job)) for job in left)
        elif scheduler is None:
            outcomes = _in_processes(work, left, results.experiment, workers, display)
        else:
            outcomes = _on_cluster(work, left, results.experiment, scheduler)
        try:
            with closing(outcomes):
                for job, outcome in outcomes:
                    if isinstance(outcome, Failure):
                        failures.append(outcome)
                        display.say(f"failed: {outcome}")
                    else:
                        results.append(outcome)
                        on_stored(job)
                    display.finished(job, () if isinstance(outcome, Failure) else outcome)
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


_Outcome: TypeAlias = tuple[Job, list[Cell] | Failure]
_Outcomes: TypeAlias = Generator[_Outcome, None, None]


def _attempt(work: Work, job: Job, experiment: str, report: Report) -> _Outcome:
    try:
        cells = work(job, report)
        wanted = [(job.data, job.method, number) for number in sorted(job.replicates)]
        given = sorted(cell.key for cell in cells)
        if given != wanted or any((cell.experiment, cell.config) != (experiment, job.config) for cell in cells):
            raise ValueError(f"the work must give the cells {wanted} of {experiment} with its config; got {cells}")
    except Exception as error:
        return job, Failure(job, f"{type(error).__name__}: {error}", traceback.format_exc())
    return job, cells


def _attempt_elsewhere(work: Work, job: Job, experiment: str, notes: str | None, number: int) -> tuple[int, _Outcome]:
    """In another process: with one thread, since there are several such processes, and notes on how far it is."""
    with one_thread():
        return number, _attempt(work, job, experiment, ProgressFile(notes, number))


def _in_processes(work: Work, jobs: Sequence[Job], experiment: str, workers: int, display: Display) -> _Outcomes:
    """A process that dies takes the whole pool with it: who was at work then is tried again, each in a pool alone."""
    waiting: Iterator[tuple[int, Job]] = enumerate(jobs)
    again: list[tuple[int, Job]] = []
    with notes_read(lambda number, fraction, text: display.within(jobs[number], fraction, text)) as notes:
        while batch := list(waiting):
            waiting, sent = iter(batch), dict[int, Job]()
            try:
                yield from _stream(work, waiting, sent, experiment, notes, n_jobs=workers, backend="loky")
            except BrokenProcessPool:
                again += sent.items()
        for number, job in again:
            try:
                # Two, though one is needed: joblib computes in this process where one is asked for.
                yield from _stream(work, iter([(number, job)]), {}, experiment, notes, n_jobs=2, backend="loky")
            except BrokenProcessPool as error:
                yield job, Failure(job, f"its process died, perhaps out of memory ({type(error).__name__})", str(error))


def _on_cluster(work: Work, jobs: Sequence[Job], experiment: str, scheduler: str) -> _Outcomes:
    with _client(scheduler) as client:
        waiting, sent = enumerate(jobs), dict[int, Job]()
        try:
            yield from _stream(work, waiting, sent, experiment, None, n_jobs=-1, backend=_dask_backend(client))
        except Exception as error:
            # A job's own errors come back as outcomes, and so do those of lost workers: this is the cluster's end.
            for _, job in [*sent.items(), *waiting]:
                yield job, Failure(job, f"the cluster at {scheduler} was lost ({type(error).__name__})", str(error))


def _stream(
    work: Work,
    waiting: Iterator[tuple[int, Job]],
    sent: dict[int, Job],
    experiment: str,
    notes: str | None,
    **parallel: Any,
) -> _Outcomes:
    """Outcomes as they come in; meanwhile `sent` has the jobs at work, and `waiting` gives those not yet sent."""

    def calls() -> Iterator[Any]:
        for number, job in waiting:
            sent[number] = job
            yield joblib.delayed(_attempt_elsewhere)(work, job, experiment, notes, number)

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
                    _, (_, job, _, _, number), _ = func.items[0]
                    failure = Failure(job, f"its workers were lost, perhaps out of memory: {error}")
                    callback([(number, (job, failure))])

            future = super().submit(func, callback)
            future.add_done_callback(told)
            return future

    return Told(client=client)
