"""What the commands share: their options, running what is missing, and errors told in a sentence."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from noisygrad.cli import output
from noisygrad_paper.extras import INSTALL

if TYPE_CHECKING:
    from noisygrad_paper.experiments.cells import Job
    from noisygrad_paper.experiments.runner import Work

Names = Annotated[str | None, typer.Option(metavar="NAME,NAME…", help="Only these; all by default.")]
ResultsFolder = Annotated[Path, typer.Option(metavar="FOLDER", help="Where finished cells are kept.")]
DataFolder = Annotated[
    Path | None, typer.Option(metavar="FOLDER", help="Where the data are; $NOISYGRAD_DATA or the user's cache else.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, or cuda:1 and so on.")]
Backend = Annotated[
    Literal["local", "joblib", "dask"],
    typer.Option(help="Jobs one after the other, in several processes, or on a Dask cluster."),
]
Workers = Annotated[int, typer.Option(min=1, help="How many processes share the work on this machine.")]
Scheduler = Annotated[str | None, typer.Option(metavar="ADDRESS", help="Of the Dask cluster.")]
Validation = Annotated[
    bool, typer.Option("--validation", help="Measure on held-out training rows instead: to choose settings.")
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="With --validation: another setting.")
]
Seed = Annotated[int, typer.Option(min=0, help="Decides the initial weights, the batches and every draw.")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Instead of each method's own number: for a quick look.")]
Tuning = Annotated[
    bool, typer.Option("--tuning", help="On seeds or trials that no table or figure uses: to choose settings.")
]
TunedSettings = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="With --tuning: another setting.")
]
Splits = Annotated[int | None, typer.Option(min=1, help="Only this many splits of each set.")]


def make_folder(option: str, folder: Path) -> None:
    """The folder that an option names, if it is not there."""
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{option} {folder} is a file: name a folder")
    folder.mkdir(parents=True, exist_ok=True)


def run_missing(
    experiment: str,
    jobs: Sequence[Job],
    work: Work,
    results: Path,
    backend: Literal["local", "joblib", "dask"],
    workers: int,
    scheduler: str | None,
    *,
    on_stored: Callable[[Job], None] = lambda job: None,
    show: Callable[[], None] | None = None,
) -> None:
    """Run what is missing, and tell `on_stored` of each job; then `show` it, and exit with 1 if cells have no figures.

    Without `show`, a cell without figures is a finding like others.
    """
    from noisygrad_paper.experiments.cells import Results
    from noisygrad_paper.experiments.runner import JobsFailed, run_jobs

    make_folder("--results", results)
    if workers > 1 and backend == "local":
        backend = "joblib"
    if backend != "local":
        # Side by side, the longest should not begin last.
        jobs = sorted(jobs, key=lambda job: -job.cost)
    try:
        cells = run_jobs(
            jobs,
            work,
            Results(results, experiment),
            backend=backend,
            workers=workers,
            scheduler=scheduler,
            on_stored=on_stored,
        )
    except JobsFailed as failed:
        typer.echo(str(failed), err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if show is not None:
        show()
        if any(cell.error is not None for cell in cells):
            raise typer.Exit(1)


@contextmanager
def bar(total: int) -> Iterator[Callable[[int, str], None]]:
    """A bar on the error stream, where that is a terminal; gives what moves it, by how much is done and a word."""
    description = TextColumn("{task.description:<24}")
    progress = output.bar(description, BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    task = progress.add_task("", total=total)
    try:
        with progress:
            yield lambda done, text: progress.update(task, completed=done, description=text)
    except KeyboardInterrupt:
        typer.echo("Interrupted: finished matrices are kept; the same command goes on.", err=True)
        raise typer.Exit(130) from None


def parsed_settings(pairs: Sequence[str]) -> dict[str, object]:
    """Settings by name; a value is read as JSON where it is, and as text else."""
    found: dict[str, object] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not (name and equals):
            raise typer.BadParameter(f"--set {pair}: give NAME=VALUE, such as lr=0.01")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
    return found


def data_folder(data_dir: Path | None) -> str:
    """Where the data are, as other processes and machines find them."""
    from noisygrad_paper.data import data_directory

    return os.fspath(data_directory(data_dir).resolve())


def chosen(names: str | None, usual: Iterable[str], more: Iterable[str] = ()) -> list[str]:
    """The names asked for, each once, or all the usual ones; an unknown one is refused with the list."""
    if names is None:
        return list(usual)
    known = [*usual, *more]
    asked = dict.fromkeys(name.strip() for name in names.split(",") if name.strip())
    unknown = [name for name in asked if name not in known]
    if unknown or not asked:
        raise typer.BadParameter(f"there is no {', '.join(map(repr, unknown)) or 'name'}; known are {', '.join(known)}")
    return list(asked)


def check_backend(backend: str, scheduler: str | None) -> None:
    """Refuse one of the two without the other."""
    if (backend == "dask") != (scheduler is not None):
        raise typer.BadParameter("--backend dask and --scheduler ADDRESS go together")


def check_device(device: str) -> None:
    """Refuse a device that does not exist, before anything is loaded."""
    import torch

    try:
        kind: torch.device | None = torch.device(device)
    except RuntimeError:
        kind = None
    if kind is None or kind.type not in ("cpu", "cuda"):
        raise typer.BadParameter(f"--device {device}: give cpu, cuda, or cuda:1 and so on")
    if kind.type == "cuda" and (kind.index or 0) >= torch.cuda.device_count():
        raise typer.BadParameter(f"--device {device}: this machine has no such usable GPU; leave --device out")


@contextmanager
def clear_errors() -> Iterator[None]:
    """What a user can mend is told in a sentence, without a traceback."""
    from noisygrad_paper.experiments.cells import ConfigurationError, ResultsError

    try:
        yield
    except (ConfigurationError, ResultsError, ConnectionError, ModuleNotFoundError, OSError, ValueError) as error:
        known = not isinstance(error, ModuleNotFoundError) or "pip install" in str(error)
        typer.echo(f"Error: {error}" if known else f"Error: {error}: {INSTALL.format('paper')}", err=True)
        raise typer.Exit(2) from None
