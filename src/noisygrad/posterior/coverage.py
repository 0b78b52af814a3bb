"""The table of which block each parameter got and why, and how tables are printed."""

from collections.abc import Container, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Coverage:
    """Which block each parameter got and why; `print` it."""

    rows: tuple[tuple[str, str, str, str], ...]

    def __str__(self) -> str:
        return format_table([("parameter", "shape", "block", "why"), *self.rows])

    __repr__ = __str__


def format_table(rows: Sequence[Sequence[str]], aligned_right: Container[int] = ()) -> str:
    """Rows of text in columns, with a line under the first; the last column has no width."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if index in aligned_right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        lines.append("  ".join([*cells, row[-1]]).rstrip())
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])
