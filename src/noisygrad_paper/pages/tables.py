"""A table of results, once: drawn on a terminal and written to a page with the same numbers and the same marks."""

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import rich.markup
import rich.table

Cell: TypeAlias = str | float | None
Best: TypeAlias = Literal["highest", "lowest"] | float

_ABSENT = "–"
_MINUS = "\N{MINUS SIGN}"


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column: where its values are, how they are written, and which of them is best."""

    key: str
    header: str
    unit: str = ""
    digits: int | None = None
    """Decimals of a column of numbers; None for a column of text."""
    best: Best | None = None
    """Mark the highest or the lowest value, or the one nearest to a number."""

    def __post_init__(self) -> None:
        if self.digits is not None and self.digits < 0:
            raise ValueError(f"digits must be at least 0; got {self.digits} for the column {self.header!r}")
        if self.best is not None and self.digits is None:
            raise ValueError(f"the column {self.header!r} is of text: it has no best value; give digits")

    @property
    def title(self) -> str:
        """The header with its unit."""
        return f"{self.header} ({self.unit})" if self.unit else self.header

    def text(self, value: Cell) -> str:
        """A value as it is written."""
        if value is None or (isinstance(value, float) and math.isnan(value)):
            return _ABSENT
        if isinstance(value, str) or self.digits is None:
            return str(value)
        return f"{value:,.{self.digits}f}".replace(",", "\N{THIN SPACE}").replace("-", _MINUS)

    def marks(self, values: Sequence[Cell]) -> list[bool]:
        """Which values are best; all that read the same as the best one are."""
        found = [v for v in values if isinstance(v, int | float) and math.isfinite(v)]
        if self.best is None or not found:
            return [False] * len(values)
        if self.best == "highest":
            best = max(found)
        elif self.best == "lowest":
            best = min(found)
        else:
            goal = float(self.best)
            best = min(found, key=lambda value: abs(value - goal))
        return [value is not None and self.text(value) == self.text(best) for value in values]


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows by column; a key that a row lacks is shown as a dash."""

    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Cell]]
    caption: str

    def __post_init__(self) -> None:
        if not self.columns or not self.rows:
            raise ValueError(f"the table {self.caption!r} has no columns or no rows")

    def cells(self) -> list[list[tuple[str, bool]]]:
        """Each value of each row as it is written, and whether it is the best of its column."""
        by_column = []
        for column in self.columns:
            values = [row.get(column.key) for row in self.rows]
            by_column.append(zip(map(column.text, values), column.marks(values), strict=True))
        return [list(cells) for cells in zip(*by_column, strict=True)]

    def html(self) -> str:
        """As HTML, inside a box that scrolls sideways on a narrow screen."""
        heads = "".join(
            f'<th scope="col"{_number_class(column)}>{html.escape(column.header)}'
            + (f' <span class="unit">{html.escape(column.unit)}</span>' if column.unit else "")
            + "</th>"
            for column in self.columns
        )
        lines = [f"<tr>{self._row(cells)}</tr>" for cells in self.cells()]
        return (
            f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(self.caption)}">\n'
            f"<table>\n<caption>{html.escape(self.caption)}</caption>\n"
            f"<thead><tr>{heads}</tr></thead>\n<tbody>\n" + "\n".join(lines) + "\n</tbody>\n</table>\n</div>"
        )

    def _row(self, cells: Sequence[tuple[str, bool]]) -> str:
        found = []
        for index, (column, (text, best)) in enumerate(zip(self.columns, cells, strict=True)):
            content = html.escape(text)
            if index == 0:
                found.append(f'<th scope="row"{_number_class(column)}>{content}</th>')
            else:
                marked = f'<strong title="best in this column">{content}</strong>' if best else content
                found.append(f"<td{_number_class(column)}>{marked}</td>")
        return "".join(found)

    def rich(self) -> rich.table.Table:
        """For a terminal; the best values are bold and green."""
        drawn = rich.table.Table(title=self.caption, title_justify="left", title_style="bold")
        for column in self.columns:
            drawn.add_column(column.title, justify="left" if column.digits is None else "right")
        for cells in self.cells():
            shown = [(rich.markup.escape(text), best) for text, best in cells]
            drawn.add_row(*(f"[bold green]{text}[/]" if best else text for text, best in shown))
        return drawn


def _number_class(column: Column) -> str:
    return "" if column.digits is None else ' class="number"'
