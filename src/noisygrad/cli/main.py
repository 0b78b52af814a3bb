"""The command line: what all commands share. The commands themselves are declared by packages.

A package adds a command by an entry point of the group `noisygrad.commands`: a function with typer's annotations, or a
`typer.Typer` for a group of commands. The paper's reproduction adds `data`, `demo`, `report` and `reproduce` so.
"""

import warnings
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated

import typer

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
