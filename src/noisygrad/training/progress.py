"""A progress bar for a long run: epoch, loss, time left. rich is imported when one is shown."""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Self

from noisygrad.training.history import EpochRecord

if TYPE_CHECKING:
    from rich.console import Console

Show = bool | None | Callable[[EpochRecord], None]
"""True: always. False: never. None: where there is a terminal. A function: called after every epoch."""

_EVERY_SECONDS = 0.2
_LINES = 20
"""How many lines a whole run writes where there is no terminal to draw a bar on."""


class Reporter(ExitStack):
    """Hands each epoch to a function, if there is one; what the others are derived from."""

    def __init__(self, function: Callable[[EpochRecord], None] | None = None) -> None:
        super().__init__()
        self._function = function

    def within(self, epochs: float) -> None:
        """So many epochs are done, in part; called after every batch, so it must cost nothing."""

    def finished(self, record: EpochRecord) -> None:
        """An epoch is done."""
        if self._function is not None:
            self._function(record)


class Bar(Reporter):
    """A bar on a terminal."""

    def __init__(self, epochs: int, done: int, console: "Console") -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        super().__init__()
        columns = (
            TextColumn("epoch {task.fields[epoch]}/{task.total:.0f}"),
            BarColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=console)
        self._task = self._progress.add_task("", total=epochs, completed=done, epoch=done, loss="–")
        self._next = 0.0

    def __enter__(self) -> Self:
        self.enter_context(self._progress)
        return self

    def within(self, epochs: float) -> None:
        """So many epochs are done, in part."""
        now = time.monotonic()
        if now >= self._next:
            self._next = now + _EVERY_SECONDS
            self._progress.update(self._task, completed=epochs)

    def finished(self, record: EpochRecord) -> None:
        """An epoch is done."""
        now = time.monotonic()
        if now >= self._next or record.epoch == record.epochs:
            self._next = now + _EVERY_SECONDS
            self._progress.update(self._task, completed=record.epoch, epoch=record.epoch, loss=f"{record.loss:.4g}")


class Lines(Reporter):
    """A line now and then, for a log."""

    def __init__(self, epochs: int, done: int, console: "Console") -> None:
        super().__init__()
        self._console = console
        self._every = max(1, epochs // _LINES)
        self._start, self._done = time.monotonic(), done

    def finished(self, record: EpochRecord) -> None:
        """An epoch is done."""
        if record.epoch % self._every and record.epoch != record.epochs:
            return
        spent = time.monotonic() - self._start
        left = spent / (record.epoch - self._done) * (record.epochs - record.epoch)
        self._console.print(
            f"epoch {record.epoch}/{record.epochs}  loss {record.loss:.4g}  {spent:.0f} s, {left:.0f} s left"
        )


def reporter(show: Show, epochs: int, done: int = 0) -> Reporter:
    """What shows the progress of `epochs` epochs, of which `done` were done before."""
    if callable(show):
        return Reporter(show)
    if show is not None and not isinstance(show, bool):
        raise ValueError(f"progress must be True, False, None or a function of an EpochRecord; got {show!r}")
    if show is False:
        return Reporter()
    from rich.console import Console

    console = Console(file=sys.stderr, highlight=False)
    if console.is_terminal:
        return Bar(epochs, done, console)
    return Lines(epochs, done, console) if show else Reporter()
