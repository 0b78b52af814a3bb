"""The command line: `noisygrad demo`, and the commands that other packages declare.

A package adds a command by an entry point of the group `noisygrad.commands`: a function with typer's annotations, or a
`typer.Typer` for a group of commands. The paper's reproduction adds `data`, `report` and `reproduce` in this way.
"""

import itertools
import time
import warnings
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

from noisygrad.cli.output import bar, interruptible, writable_file

main = typer.Typer(
    name="noisygrad",
    help="Bayesian deep learning by noisy natural gradient.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


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


@main.command()
def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PATH", callback=writable_file, help="Where to write the page.")
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
    description = TextColumn("{task.description:<32}")
    with (
        interruptible(output),
        bar(SpinnerColumn(), description, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()) as progress,
    ):
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


def _add(point: EntryPoint) -> None:
    """Add another package's command; one that cannot be imported says why when it is called, and spoils no other."""
    try:
        command = point.load()
    except (ImportError, AttributeError) as error:
        reason = f"Error: the command {point.name} is in {point.value}, which cannot be imported: {error}"

        def tell() -> None:
            typer.echo(reason, err=True)
            raise typer.Exit(2)

        anything = {"ignore_unknown_options": True, "allow_extra_args": True}
        main.command(point.name, help="Cannot be imported.", context_settings=anything)(tell)
        return
    if isinstance(command, typer.Typer):
        main.add_typer(command, name=point.name)
    else:
        main.command(point.name)(command)


for _point in sorted(entry_points(group="noisygrad.commands")):
    _add(_point)


if __name__ == "__main__":
    main()
