"""Files that a command writes: refused before the work where they cannot be, and never left half written."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import Progress, ProgressColumn


def writable_file(path: Path) -> Path:
    """The path, if a file can be put there; found out by trying, since permissions do not tell all."""
    path = path.expanduser()
    if path.is_dir():
        raise typer.BadParameter(f"{path} is a folder; name a file in it, such as {path / 'noisygrad.html'}")
    if not path.parent.is_dir():
        raise typer.BadParameter(f"the folder {path.parent} does not exist; create it or choose another")
    try:
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise typer.BadParameter(f"cannot write to the folder {path.parent}: {error.strerror or error}") from error
    return path


def bar(*columns: ProgressColumn) -> Progress:
    """A bar on the error stream, which leaves the output alone; nothing where there is no terminal."""
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


@contextmanager
def interruptible(output: Path) -> Iterator[None]:
    """Ctrl-C ends the command with a word about the file, which is written whole or not at all."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo(f"Interrupted: {output} was not written.", err=True)
        raise typer.Exit(130) from None
