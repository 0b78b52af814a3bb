"""How far a run is: a bar by rich where it is installed, else a line for each training."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .runner import Answer

Tell = Callable[[int, int, Answer], None]


def line(answer: Answer) -> str:
    """One training in words."""
    job, found = answer
    name = f"{job.task} · {job.key[1]} · seed {job.seed}"
    if isinstance(found, str):
        return f"{name}: skipped, {found}"
    if "broke" in found:
        return f"{name}: broke after {found['broke_after']} steps, {found['broke']}"
    score = f"accuracy {found['accuracy']:.4f}" if "accuracy" in found else f"RMSE {float(found['rmse']):.4f}"
    diverged = ", diverged" if found["diverged"] else ""
    warned = f", {found['warnings']} warnings" if found["warnings"] else ""
    return f"{name}: nll {float(found['nll']):.4f}, {score}, {found['seconds']:.1f} s{diverged}{warned}"


@contextmanager
def bar() -> Iterator[Tell]:
    """What the runner tells how far it is."""
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError:
        yield lambda done, total, answer: print(f"[{done}/{total}] {line(answer)}", file=sys.stderr, flush=True)
        return
    columns: list[Any] = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns) as shown:
        row = shown.add_task("trainings", total=None)

        def tell(done: int, total: int, answer: Answer) -> None:
            shown.console.print(line(answer), highlight=False, markup=False, soft_wrap=True)
            shown.update(row, completed=done, total=total)

        yield tell
