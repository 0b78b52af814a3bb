"""How far a run of jobs is: a bar on a terminal, lines in a log. Several jobs may be at work side by side."""

import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean
from typing import ClassVar, TypeAlias

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.text import Text

from noisygrad_paper.experiments.cells import Cell, Job

Announce: TypeAlias = Callable[[str], None]
_Key: TypeAlias = tuple[str, tuple[int, ...]]

_EVERY_SECONDS = 0.1
_LINE_SECONDS = 60.0
"""Between two lines of a log on jobs that are at work."""


def cost_of(job: Job) -> float:
    """Of all its replicates."""
    return job.cost * len(job.replicates)


class Display:
    """Keeps count, and says lines of text; the others also show how far the run is.

    Of `total` cells `done` are stored. `cost` is that of the jobs left. Text goes to the error stream by default.
    """

    _pause: ClassVar[float] = 0.0
    """Seconds between two looks at what is at work."""

    def __init__(self, announce: Announce | None, total: int, done: int, cost: float) -> None:
        self.console = Console(file=sys.stderr, highlight=False, markup=False, soft_wrap=True)
        self.announce, self.total, self.done = announce, total, done
        self._cost, self._spent, self._start = cost, 0.0, time.monotonic()
        self._next = self._start + self._pause
        self._at_work: dict[_Key, tuple[Job, float, str]] = {}
        """Jobs with the fraction that is done and a word on what they do."""
        self._ended: set[_Key] = set()
        self._lock = threading.RLock()

    def say(self, text: str) -> None:
        """A line of text, above the bar where there is one."""
        (self.announce or self.console.print)(text)

    def within(self, job: Job, fraction: float, text: str) -> None:
        """A job is done in part; any thread may say so, and too late."""
        with self._lock:
            if (key := _key(job)) not in self._ended:
                self._at_work[key] = job, min(max(fraction, 0.0), 1.0), text
                if time.monotonic() >= self._next:
                    self._show_work()

    def finished(self, job: Job, cells: Sequence[Cell]) -> None:
        """A job has ended, with cells or without."""
        with self._lock:
            self._ended.add(_key(job))
            self._at_work.pop(_key(job), None)
            self._spent += cost_of(job)
            self.done += sum(cell.error is None for cell in cells)
            for cell in cells:
                if cell.error is not None:
                    self.say(f"failed: {cell.label}: {cell.error}")
            figures = figures_of(cells)
            self._show_end(f"{_label(job)} {figures}" if figures else "")

    def _show_work(self) -> None:
        """What is at work has changed."""

    def _show_end(self, text: str) -> None:
        """A job has ended, with these figures."""

    def spent(self) -> float:
        """The expected cost of what is done, parts of jobs included."""
        return self._spent + sum(cost_of(job) * fraction for job, fraction, _ in self._at_work.values())

    def left(self) -> float | None:
        """Seconds to the end, from those gone by and the expected costs."""
        spent = self.spent()
        return (time.monotonic() - self._start) * (self._cost - spent) / spent if spent else None

    def at_work(self) -> str:
        """What the jobs at work do: a word on a single one, the percentage of each of several."""
        if len(self._at_work) == 1:
            ((job, _, text),) = self._at_work.values()
            return f"{job.name}: {text}"
        return "  ".join(f"{_label(job)} {fraction:.0%}" for job, fraction, _ in self._at_work.values())


class LineDisplay(Display):
    """For a log: a line per finished job, and now and then one on those at work."""

    _pause: ClassVar[float] = _LINE_SECONDS

    def _show_work(self) -> None:
        self._show_end(self.at_work())

    def _show_end(self, text: str) -> None:
        if not text:
            return
        now, left = time.monotonic(), self.left()
        self._next = now + self._pause
        self.say(
            f"{self.done}/{self.total} cells  {text}  {duration(now - self._start)}"
            + (f", {duration(left)} left" if left else "")
        )


class BarDisplay(Display):
    """A bar on a terminal."""

    _pause: ClassVar[float] = _EVERY_SECONDS

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

    def _show_end(self, text: str) -> None:
        if text:
            self._last = f"last: {text}"
        self._show_work()

    def _show_work(self) -> None:
        now, left = time.monotonic(), self.left()
        self._next = now + self._pause
        self.progress.update(
            self._task,
            completed=self.spent(),
            description="   ".join(filter(None, (self.at_work(), self._last))),
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
        return Text("" if end is None else f"{duration(max(0.0, end - time.monotonic()))} left")


@contextmanager
def shown(progress: bool | None, announce: Announce | None, total: int, done: int, cost: float) -> Iterator[Display]:
    """A bar where there is a terminal; elsewhere lines, if progress is True; nothing of both if it is False."""
    if progress is not False and Console(file=sys.stderr).is_terminal:
        bar = BarDisplay(announce, total, done, cost)
        with bar.progress:
            yield bar
    else:
        yield (LineDisplay if progress else Display)(announce, total, done, cost)


def figures_of(cells: Sequence[Cell]) -> str:
    """The first figures of a job, means over its cells; of a list, such as a learning curve, the last entry."""
    ends: dict[str, list[float]] = {}
    for cell in cells:
        for name, value in cell.metrics.items():
            ends.setdefault(name, []).extend(value[-1:] if isinstance(value, list) else [value])
    return "  ".join(f"{name} {fmean(values):.4g}" for name, values in list(ends.items())[:3] if values)


def duration(seconds: float) -> str:
    """In words."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _key(job: Job) -> _Key:
    """Tells the jobs of a plan apart."""
    return job.name, job.replicates


def _label(job: Job) -> str:
    """With the replicate where it is a single one, such as a seed of a method."""
    return job.name if len(job.replicates) > 1 else f"{job.name} [{job.replicates[0]}]"
