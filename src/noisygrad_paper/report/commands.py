"""`noisygrad report`: one page from the results."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from noisygrad.cli.output import interruptible, writable_file


def report(
    results: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the results are.")] = Path("results"),
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="PATH", callback=writable_file, help="Where to write the page.")
    ] = Path("noisygrad-report.html"),
) -> None:
    """One HTML page from the results: our tables and figures beside the paper's. It needs no network."""
    from noisygrad_paper.report.site import build_report

    try:
        with interruptible(output):
            build_report(results).write(output)
    except (OSError, ValueError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None
    Console(highlight=False).print(f"The page is in {output}", soft_wrap=True, markup=False)
