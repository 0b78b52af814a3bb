"""`noisygrad data list | fetch | verify`: what data there is, getting it, and checking it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TransferSpeedColumn
from rich.table import Table as Grid

from noisygrad.cli import output
from noisygrad_paper.data.catalogue import DATA_SETS, DataSet, UnknownDataSetError, data_directory, data_set

if TYPE_CHECKING:
    from noisygrad_paper.data.fetch import Report

app = typer.Typer(
    help="Data sets: what there is, getting it, checking it.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Directory = Annotated[
    Path | None,
    typer.Option(
        "--data-dir",
        metavar="PATH",
        file_okay=False,
        help="Where the data lies; $NOISYGRAD_DATA or the user's cache folder if not given.",
    ),
]


@app.command("list")
def list_sets(data_dir: Directory = None) -> None:
    """Show every data set: its size, splits, licence and address, and whether it is there."""
    directory = data_directory(data_dir)
    console = Console(highlight=False)
    for entry in DATA_SETS.values():
        here = "there" if all((directory / file).is_file() for file in entry.files) else "not fetched"
        if not entry.files:
            here = "comes with scikit-learn"
        console.print(f"[bold]{entry.name}[/bold]  {here}", soft_wrap=True)
        lines = [entry.about, f"{_size(entry)}; {_protocol(entry)}", f"licence: {entry.licence}"]
        if entry.label != entry.name:
            lines.insert(1, f"in results: {entry.label}")
        if entry.address:
            lines.append(f"from {entry.address}")
        if None in entry.files.values():
            lines.append("no checksum of the cached numbers is known: shape and range are checked instead")
        for line in lines:
            console.print(f"  {line}", markup=False, soft_wrap=True)
    console.print(f"\nThe data lies in {directory}", markup=False, soft_wrap=True)


@app.command("fetch")
def fetch_sets(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help='Names of data sets, or "all".')],
    data_dir: Directory = None,
    force: Annotated[bool, typer.Option("--force", help="Download also what is there and right.")] = False,
) -> None:
    """Download data sets from their official addresses, check them and put them into the cache.

    A file that is not what it should be is kept aside and never used. What is there and right is not downloaded again.
    """
    from noisygrad_paper.data.fetch import FetchError, fetch
    from noisygrad_paper.data.files import DamagedDataError

    try:
        entries = [data_set(name) for name in (DATA_SETS if "all" in names else names)]
    except UnknownDataSetError as error:
        raise typer.BadParameter(str(error), param_hint="NAME") from error
    failed = False
    # Two names may stand for one file.
    for name in dict.fromkeys(entry.fetched_with for entry in entries):
        if not DATA_SETS[name].files:
            typer.echo(f"{name}: comes with scikit-learn, nothing to fetch")
            continue
        try:
            with _bar() as report:
                written = fetch(name, data_dir, force=force, report=report)
        except (FetchError, DamagedDataError) as error:
            typer.echo(f"{name}: {error}", err=True)
            failed = True
        except KeyboardInterrupt:
            typer.echo(f"Interrupted: {name} was not fetched.", err=True)
            raise typer.Exit(130) from None
        else:
            for path in written:
                typer.echo(f"{name}: wrote {path}")
            if not written:
                typer.echo(f"{name}: already there, checksum ok")
    if failed:
        raise typer.Exit(1)


@app.command("verify")
def verify_sets(data_dir: Directory = None) -> None:
    """Check every data file that is there; a wrong one is kept aside, and the exit code is then 1."""
    from noisygrad_paper.data.files import DamagedDataError, MissingDataError, check_images
    from noisygrad_paper.data.tables import load_table

    directory = data_directory(data_dir)
    grid = Grid("name", "present", "rows × features", "target sd", "splits", "checksum", box=None, pad_edge=False)
    for column in grid.columns[2:5]:
        column.justify = "right"
    complaints: dict[str, str] = {}
    # Two tasks may share a file, which is gone from its place once the first of them has refused it.
    refused: dict[str, str] = {}
    for entry in DATA_SETS.values():
        present, deviation, checksum = "yes", "", "ok"
        try:
            if entry.fetched_with in refused:
                checksum = "wrong"
            elif entry.kind == "images":
                check_images(entry, directory)
            else:
                deviation = f"{load_table(entry.name, directory).y.std():.5f}"
                if None in entry.files.values():
                    checksum = "none known; shape and range ok"
            if not entry.files:
                checksum = "with scikit-learn"
        except MissingDataError:
            missing = [file for file in entry.files if not (directory / file).is_file()]
            present = "no" if len(missing) == len(entry.files) else "in part"
            checksum = "absent"
        except DamagedDataError as error:
            checksum = "wrong"
            refused[entry.name] = complaints[entry.name] = str(error)
        except OSError as error:
            checksum = "wrong"
            complaints[entry.name] = f"cannot be read: {error}"
        size = f"{entry.rows} × {entry.features}"
        grid.add_row(entry.name, present, size, deviation, str(entry.splits), checksum)
    console = Console(highlight=False)
    console.print(grid)
    console.print(f"\nThe data lies in {directory}", markup=False, soft_wrap=True)
    for name, complaint in complaints.items():
        typer.echo(f"{name}: {complaint}", err=True)
    if complaints:
        raise typer.Exit(1)


def _size(entry: DataSet) -> str:
    if entry.kind == "images":
        return f"{entry.rows} images of {entry.features} numbers"
    return f"{entry.rows} rows × {entry.features} features; target: {entry.target}"


def _protocol(entry: DataSet) -> str:
    if entry.kind == "images":
        return "the official files are the split" if entry.files else "1 fixed split"
    if entry.first_rows_train is not None:
        return f"1 split: the first {entry.first_rows_train} rows are for training"
    return f"{entry.splits} splits, 90 % for training"


@contextmanager
def _bar() -> Iterator[Report]:
    """Bytes as they come in, on the error stream; nothing where there is no terminal."""
    tasks: dict[str, TaskID] = {}
    columns = TextColumn("{task.description:<28}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with output.bar(*columns) as progress:

        def report(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=total)
            progress.update(tasks[name], completed=done)

        yield report
