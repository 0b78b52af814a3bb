"""`noisygrad reproduce …`: one command for each table or figure of the paper."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from noisygrad.experiments.cells import Job
    from noisygrad.experiments.runner import Work

app = typer.Typer(help="Regenerate a table or a figure of the paper.", no_args_is_help=True, rich_markup_mode="rich")

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
    validation: Annotated[
        bool, typer.Option("--validation", help="Measure on a held-out fifth of the training rows: to choose settings.")
    ] = False,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="With --validation: another setting.")
    ] = None,
) -> None:
    """Table 1 and its supplement: test RMSE and log-likelihood on the UCI regression sets.

    Cells that are in the results folder are not computed again: stop it at any moment, and start it again.
    """
    from noisygrad.experiments import regression as experiment
    from noisygrad.experiments.methods import METHODS

    with _clear_errors():
        _check_device(device)
        _check_backend(backend, scheduler)
        table = _own_table(csv, target)
        if csv is not None and data is not None:
            raise typer.BadParameter("--csv is instead of --data: give one of them")
        names = [f"csv-{csv.stem}"] if csv is not None else _chosen(data, experiment.DATA, experiment.MORE_DATA)
        asked = _chosen(methods, METHODS)
        where = _data_folder(data_dir)
        jobs = experiment.plan(
            names,
            asked,
            epochs=epochs,
            splits=splits,
            data_dir=where,
            csv=table,
            seed=seed,
            validation=validation,
            settings=_settings(settings or []),
        )
        if not jobs:
            raise ValueError(f"{', '.join(asked)} on {', '.join(names)} would be too large: it is for small sets")
        work = partial(experiment.run_job, data_dir=where, csv=table, device=device)
        name = experiment.VALIDATION if validation else experiment.EXPERIMENT
        failed = _run(name, jobs, work, results, backend, workers, scheduler)
        _show_regression(results, name, names, list(dict.fromkeys(job.method for job in jobs)))
    if failed:
        raise typer.Exit(1)


@app.command()
def convergence(
    data: Names = None,
    methods: Names = None,
    results: ResultsFolder = Path("results"),
    data_dir: DataFolder = None,
    device: Device = "cpu",
    backend: Backend = "local",
    workers: Workers = 1,
    scheduler: Scheduler = None,
    epochs: Epochs = None,
    seed: Seed = 0,
) -> None:
    """The supplement's training curves: ELBO against iterations, with the step size tuned for each method first.

    Cells that are in the results folder are not computed again: stop it at any moment, and start it again.
    """
    from noisygrad.experiments import convergence as experiment
    from noisygrad.experiments.cells import Results

    with _clear_errors():
        _check_device(device)
        sets, names = _chosen(data, experiment.DATA), _chosen(methods, experiment.CHANGES)
        where = _data_folder(data_dir)
        run = partial(_run, results=results, backend=backend, workers=workers, scheduler=scheduler)
        tuning = experiment.tuning_plan(sets, names, experiment.RATES, epochs=epochs, data_dir=where, seed=seed)
        run(experiment.TUNING, tuning, partial(experiment.run_tuning, data_dir=where, device=device))
        asked = {(job.data, job.method) for job in tuning}
        tuned = [c for c in Results(results, experiment.TUNING).load() if (c.data, c.method) in asked]
        jobs = experiment.plan(sets, names, experiment.tuned_rates(tuned), epochs=epochs, data_dir=where, seed=seed)
        run(experiment.EXPERIMENT, jobs, partial(experiment.run_job, data_dir=where, device=device))
        _show_convergence(results)


def _show_convergence(results: Path) -> None:
    from noisygrad.experiments.cells import Results
    from noisygrad.report.convergence import convergence_table
    from noisygrad.report.study import Study

    table = convergence_table(Study(Results(results, "convergence").load())).rich()
    for column in table.columns:
        # On a narrow terminal a name goes on in the next line: cut off, the two variants would read the same.
        column.overflow = "fold"
    console = Console(highlight=False)
    console.print()
    console.print(table)


@app.command()
def classification(
    data: Annotated[Literal["cifar10", "mnist", "digits"], typer.Option(help="Small sets take minutes on a CPU.")] = (
        "cifar10"
    ),
    methods: Names = None,
    configurations: Annotated[
        str | None, typer.Option(metavar="NAME,NAME…", help="Of plain, D (augmented), B (batch norm), D+B.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trainings of each; they show the spread.")] = 1,
    results: ResultsFolder = Path("results"),
    data_dir: DataFolder = None,
    device: Device = "cpu",
    workers: Workers = 1,
    epochs: Epochs = None,
    train_size: Annotated[int | None, typer.Option(min=1, help="Only so many training images.")] = None,
    learned_norm: Annotated[
        bool, typer.Option("--learned-norm", help="Learn scales and shifts of batch norm, unlike the paper.")
    ] = False,
    checkpoints: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Of trainings at work; a folder beside the results else.")
    ] = None,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="In epochs.")] = 1,
) -> None:
    """Table 2 and the reliability diagrams: VGG16 on CIFAR-10, or a small network on digits.

    A training that is stopped goes on at its last checkpoint. Under torchrun the processes share each training.
    """
    from noisygrad.distributed import join_processes
    from noisygrad.experiments import classification as experiment

    with _clear_errors(), join_processes(device) as processes:
        _check_device(device)
        asked = _chosen(methods, experiment.METHODS)
        chosen = _chosen(configurations, experiment.CONFIGURATIONS)
        if processes.size > 1 and workers > 1:
            raise typer.BadParameter("--workers trains networks side by side, torchrun one in all processes: not both")
        jobs = experiment.plan(
            data, asked, chosen, seeds=seeds, epochs=epochs, train_size=train_size, learned_norm=learned_norm
        )
        folder = results / "checkpoints" if checkpoints is None else checkpoints
        work = partial(
            experiment.run_job,
            data_dir=_data_folder(data_dir),
            device=device,
            checkpoints=os.fspath(folder.resolve()),
            checkpoint_every=checkpoint_every,
        )
        if processes.rank > 0:
            for job in _left(experiment.EXPERIMENT, jobs, results):
                work(job, lambda fraction, text: None)
            return
        if processes.size > 1:
            _left(experiment.EXPERIMENT, jobs, results)
        failed = _run(experiment.EXPERIMENT, jobs, work, results, "local", workers, None)
        _show_classification(results, data)
    if failed:
        raise typer.Exit(1)


def _left(experiment: str, jobs: Sequence[Job], results: Path) -> list[Job]:
    """What the first of several processes finds missing, for all of them."""
    from noisygrad.distributed import of_first_process
    from noisygrad.experiments.cells import Results

    return of_first_process(lambda: Results(results, experiment).missing(jobs))


def _show_classification(results: Path, data: str) -> None:
    from noisygrad.experiments.cells import Results
    from noisygrad.report.calibration import scores_table
    from noisygrad.report.classification import accuracy_table
    from noisygrad.report.study import Study

    cells = [cell for cell in Results(results, "classification").load() if cell.data == data]
    study = Study(cells)
    console = Console(highlight=False)
    console.print()
    if data == "cifar10":
        console.print(accuracy_table(study).rich())
    names = {method: method for method in study.methods}
    console.print(
        scores_table(study, data, names, f"{data}: accuracy in per cent, and how well it is calibrated").rich()
    )


@app.command("precision-matrices")
def precision_matrices(
    results: ResultsFolder = Path("results"),
    data_dir: DataFolder = None,
    device: Device = "cpu",
    epochs: Epochs = None,
    seed: Seed = 0,
    force: Annotated[
        bool, typer.Option("--force", help="Replace matrices that are there, whatever made them.")
    ] = False,
) -> None:
    """Figure 1: the normalised precision matrices of four posteriors of one network, trained on boston.

    Matrices that are in the results folder are not computed again: stop it at any moment, and start it again.
    """
    from noisygrad.experiments import precision_matrices as experiment

    with _clear_errors():
        _check_device(device)
        config = (
            experiment.PrecisionConfig(seed=seed)
            if epochs is None
            else experiment.PrecisionConfig(seed=seed, epochs=epochs)
        )
        todo = experiment.missing(config, results, force=force)
        arrays = results / f"{experiment.EXPERIMENT}.npz"
        if not todo:
            typer.echo(f"{arrays} has all four matrices, made with these settings: nothing to do")
            return
        with _bar(len(todo) * config.epochs) as advance:
            experiment.run(
                config,
                results,
                data_dir=data_dir,
                device=device,
                force=force,
                report=lambda method, epoch: advance(
                    todo.index(method) * config.epochs + epoch, f"{method} epoch {epoch}"
                ),
            )
        typer.echo(f"The matrices are in {arrays}; noisygrad report draws them")


@contextmanager
def _bar(total: int) -> Iterator[Callable[[int, str], None]]:
    """A bar on the error stream, where that is a terminal; gives what moves it, by how much is done and a word."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description:<24}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = progress.add_task("", total=total)
    try:
        with progress:
            yield lambda done, text: progress.update(task, completed=done, description=text)
    except KeyboardInterrupt:
        typer.echo("Interrupted: finished matrices are kept; the same command goes on.", err=True)
        raise typer.Exit(130) from None


def _settings(pairs: Sequence[str]) -> dict[str, object]:
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


def _show_regression(results: Path, experiment: str, data: Sequence[str], methods: Sequence[str]) -> None:
    from noisygrad.experiments.cells import Results
    from noisygrad.report.comparison import LOG_LIKELIHOOD, RMSE
    from noisygrad.report.regression import comparison_table
    from noisygrad.report.study import Study

    study = Study(Results(results, experiment).load())
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
) -> int:
    """Run what is missing; returns how many cells came out without figures."""
    from noisygrad.experiments.cells import Results
    from noisygrad.experiments.runner import JobsFailed, run_jobs

    if results.exists() and not results.is_dir():
        raise ValueError(f"--results {results} is a file: name a folder")
    results.mkdir(parents=True, exist_ok=True)
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
        )
    except JobsFailed as failed:
        typer.echo(str(failed), err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    return sum(cell.error is not None for cell in cells)


def _data_folder(data_dir: Path | None) -> str:
    """Where the data are, as other processes and machines find them."""
    from noisygrad.data import data_directory

    return os.fspath(data_directory(data_dir).resolve())


def _own_table(csv: Path | None, target: str | None) -> tuple[str, str] | None:
    if (csv is None) != (target is None):
        raise typer.BadParameter("--csv FILE and --target COLUMN go together")
    return None if csv is None or target is None else (os.fspath(csv.resolve()), target)


def _chosen(names: str | None, usual: Iterable[str], more: Iterable[str] = ()) -> list[str]:
    """The names asked for, each once, or all the usual ones; an unknown one is refused with the list."""
    if names is None:
        return list(usual)
    known = [*usual, *more]
    asked = dict.fromkeys(name.strip() for name in names.split(",") if name.strip())
    unknown = [name for name in asked if name not in known]
    if unknown or not asked:
        raise typer.BadParameter(f"there is no {', '.join(map(repr, unknown)) or 'name'}; known are {', '.join(known)}")
    return list(asked)


def _check_backend(backend: str, scheduler: str | None) -> None:
    if (backend == "dask") != (scheduler is not None):
        raise typer.BadParameter("--backend dask and --scheduler ADDRESS go together")


def _check_device(device: str) -> None:
    import torch

    try:
        kind = torch.device(device)
    except RuntimeError:
        raise typer.BadParameter(f"--device {device}: give cpu, cuda, or cuda:1 and so on") from None
    if kind.type == "cuda" and (kind.index or 0) >= torch.cuda.device_count():
        raise typer.BadParameter(f"--device {device}: this machine has no such usable GPU; leave --device out")


@contextmanager
def _clear_errors() -> Iterator[None]:
    """What a user can mend is told in a sentence, without a traceback."""
    from noisygrad.experiments.cells import ConfigurationError, ResultsError

    try:
        yield
    except (ConfigurationError, ResultsError, ConnectionError, ModuleNotFoundError, OSError, ValueError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None
