"""The table of which block each parameter got and why."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Coverage:
    """Which block each parameter got and why; `print` it."""

    rows: tuple[tuple[str, str, str, str], ...]

    def __str__(self) -> str:
        header = ("parameter", "shape", "block", "why")
        table = [header, *self.rows]
        widths = [max(len(row[column]) for row in table) for column in range(3)]
        lines = ["  ".join([*(row[c].ljust(widths[c]) for c in range(3)), row[3]]).rstrip() for row in table]
        return "\n".join([lines[0], "-" * max(len(line) for line in lines), *lines[1:]])

    __repr__ = __str__
