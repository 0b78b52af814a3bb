"""`noisygrad reproduce …`: one command for each table or figure of the paper."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console

if TYPE_CHECKING:
    from noisygrad.experiments.cells import Job
    from noisygrad.experiments.runner import Work

app = typer.Typer(
    help="Regenerate a table or a figure of the paper.", no_args_is_help=True, rich_markup_mode="rich"
)

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
Workers = Annotated[int, typer.Option(min=1, help="Processes of the backend joblib.")]
Scheduler = Annotated[str | None, typer.Option(metavar="ADDRESS", help="Of the Dask cluster.")]
Seed = Annotated[int, typer.Option(min=0, help="Decides the initial weights, the batches and every draw.")]
Epochs = Annotated[int | None, typer.Option(min=1, help="Instead of each method's own number: for a quick look.")]
Splits = Annotated[int | None, typer.Option(min=1, help="Only the first so many splits of each set.")]


@app.command()
def regression(
    data: Names = None,
    methods: Names = None,
    csv: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A table of your own, with a header, instead of the UCI sets.")
    ] = None,
    target: Annotated[str | None, typer.Option(metavar="COLUMN", help="What to predict in it.")] = None,
    results: ResultsFolder = Path("results"),
    data_dir: DataFolder = None,
    device: Device = "cpu",
    backend: Backend = "local",
    workers: Workers = 1,
    scheduler: Scheduler = None,
    epochs: Epochs = None,
    splits: Splits = None,
    seed: Seed = 0,
) -> None:
    """Table 1 and its supplement: test RMSE and log-likelihood on the UCI regression sets.

    Cells that are in the results folder are not computed again: stop it at any moment, and start it again.
    """
    from noisygrad.experiments import regression as experiment
    from noisygrad.experiments.methods import METHODS

    with _clear_errors():
        _check_device(device)
        table = _own_table(csv, target)
        names = [f"csv-{csv.stem}"] if csv is not None else _chosen(data, experiment.DATA)
        where = None if data_dir is None else str(data_dir)
        jobs = experiment.plan(
            names, _chosen(methods, METHODS), epochs=epochs, splits=splits, data_dir=where, csv=table, seed=seed
        )
        work = partial(experiment.run_job, data_dir=where, csv=table, device=device)
        _run(experiment.EXPERIMENT, jobs, work, results, backend, workers, scheduler)
        _show_regression(results, names, _chosen(methods, METHODS))


def _show_regression(results: Path, data: Sequence[str], methods: Sequence[str]) -> None:
    from noisygrad.experiments.cells import Results
    from noisygrad.report.comparison import LOG_LIKELIHOOD, RMSE
    from noisygrad.report.regression import comparison_table
    from noisygrad.report.study import Study

    study = Study(Results(results, "regression").load())
    console = Console(highlight=False)
    for metric in (RMSE, LOG_LIKELIHOOD):
        console.print()
        console.print(comparison_table(study, methods, data, metric).rich())


def _run(
    experiment: str,
    jobs: Sequence[Job],
    work: Work,
    results: Path,
    backend: Literal["local", "joblib", "dask"],
    workers: int,
    scheduler: str | None,
) -> None:
    from noisygrad.experiments.cells import Results
    from noisygrad.experiments.runner import JobsFailed, run_jobs

    results.mkdir(parents=True, exist_ok=True)
    if workers > 1 and backend == "local":
        backend = "joblib"
    if backend != "local":
        # Side by side, the longest should not begin last.
        jobs = sorted(jobs, key=lambda job: -job.cost)
    try:
        run_jobs(
            jobs,
            work,
            Results(results, experiment),
            backend=backend,
            workers=workers,
            scheduler=scheduler,
        )
    except JobsFailed as failed:
        typer.echo(str(failed), err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _own_table(csv: Path | None, target: str | None) -> tuple[str, str] | None:
    if (csv is None) != (target is None):
        raise typer.BadParameter("--csv FILE and --target COLUMN go together")
    return None if csv is None or target is None else (os.fspath(csv.resolve()), target)


def _chosen(names: str | None, known: Iterable[str]) -> list[str]:
    """The names asked for, or all that are known; an unknown one is refused with the list."""
    every = list(known)
    if names is None:
        return every
    asked = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in asked if name not in every]
    if unknown or not asked:
        raise typer.BadParameter(f"there is no {', '.join(map(repr, unknown)) or 'name'}; known are {', '.join(every)}")
    return asked


def _check_device(device: str) -> None:
    import torch

    if device.startswith("cuda") and not torch.cuda.is_available():
        raise typer.BadParameter(f"--device {device}: this machine has no usable GPU; leave --device out")


@contextmanager
def _clear_errors() -> Iterator[None]:
    """What a user can mend is told in a sentence, without a traceback."""
    from noisygrad.experiments.cells import ConfigurationError, ResultsError

    try:
        yield
    except (ConfigurationError, ResultsError, ConnectionError, ModuleNotFoundError, OSError, ValueError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None
