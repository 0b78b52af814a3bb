"""`noisygrad demo`: four posteriors beside a point estimate, on data that comes with scikit-learn."""

import itertools
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, SpinnerColumn, TextColumn, TimeElapsedColumn

from noisygrad.cli.output import bar, interruptible, writable_file


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
    from noisygrad_paper.demo.fits import DATA, METHODS, DemoConfig, run
    from noisygrad_paper.demo.page import demo_page, demo_table

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
