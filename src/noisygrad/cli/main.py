"""The command line: `noisygrad demo` fits four posteriors to embedded data and writes a page about them."""

from __future__ import annotations

import itertools
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from noisygrad_paper.data.commands import app as data_commands
from noisygrad_paper.reproduce import app as reproduce_commands

main = typer.Typer(
    name="noisygrad",
    help="Bayesian deep learning by noisy natural gradient.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


main.add_typer(data_commands, name="data")
main.add_typer(reproduce_commands, name="reproduce")


def _show_version(wanted: bool) -> None:
    if wanted:
        from noisygrad import __version__

        typer.echo(f"noisygrad {__version__}")
        raise typer.Exit


@main.callback()
def options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Bayesian deep learning by noisy natural gradient: swap the optimiser, get a posterior."""
    # Of a program, where a warning comes from in the code is of no use; a process that goes on has its own way again.
    usual = warnings.formatwarning
    warnings.formatwarning = lambda message, *args, **kwargs: f"Warning: {message}\n"
    context.call_on_close(lambda: setattr(warnings, "formatwarning", usual))


def _writable_file(path: Path) -> Path:
    """The path, if a file can be put there; found out by trying, since permissions do not tell all."""
    path = path.expanduser()
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder; name a file in it, such as {path / 'noisygrad-demo.html'}")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"the folder {path.parent} does not exist; create it or choose another")
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise typer.BadParameter(f"cannot write to the folder {path.parent}: {error.strerror or error}") from error
    return path


@main.command()
def demo(
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="PATH", callback=_writable_file, help="Where to write the page."),
    ] = Path("noisygrad-demo.html"),
    seed: Annotated[
        int,
        typer.Option(metavar="N", min=0, max=2**32 - 1, help="Decides the splits, the initial weights and every draw."),
    ] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few epochs only: shows that all works, with poor numbers.")
    ] = False,
) -> None:
    """Fit four posteriors and a point estimate to embedded data, and write a page about them.

    Uses the diabetes (regression) and digits (classification) data that come with scikit-learn: nothing is downloaded.
    Prints a table for each and writes one HTML page that needs no network. Takes about a minute on one core.
    """
    from noisygrad.cli.demo_fits import DATA, METHODS, DemoConfig, run
    from noisygrad.cli.demo_page import demo_page, demo_table

    start = time.perf_counter()
    config = DemoConfig.quick(seed) if quick else DemoConfig(seed=seed)
    with _interruptible(output), _progress() as progress:
        task = progress.add_task("", total=len(DATA) * len(METHODS) + 1)
        begun = itertools.count()

        def announce(data: str, method: str) -> None:
            progress.update(task, completed=next(begun), description=f"{data}: fitting {method}")

        found = run(config, announce)
        progress.update(task, completed=next(begun), description="writing the page")
        demo_page(found).write(output)
    console = Console(highlight=False)
    for data in DATA:
        console.print()
        console.print(demo_table(found, data).rich())
    console.print()
    if quick:
        console.print("Quick trial: far too few epochs for good numbers.")
    console.print(f"{time.perf_counter() - start:.0f} s in all. The page is in ", end="")
    console.print(str(output), style="bold", soft_wrap=True, markup=False)


@main.command()
def report(
    results: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the results are.")] = Path("results"),
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="PATH", callback=_writable_file, help="Where to write the page."),
    ] = Path("noisygrad-report.html"),
) -> None:
    """One HTML page from the results: our tables and figures beside the paper's. It needs no network."""
    from noisygrad_paper.report.site import write_report

    try:
        with _interruptible(output):
            write_report(results, output)
    except (FileNotFoundError, ValueError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None
    Console(highlight=False).print(f"The page is in {output}", soft_wrap=True, markup=False)


@contextmanager
def _interruptible(output: Path) -> Iterator[None]:
    """Ctrl-C ends the command with a word about the file, which is written whole or not at all."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"Interrupted: {output} was not written.", err=True)
        raise typer.Exit(130) from None


def _progress() -> Progress:
    """A bar on the error stream, which leaves the output alone; nothing where there is no terminal."""
    console = Console(stderr=True)
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description:<32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


if __name__ == "__main__":
    main()
