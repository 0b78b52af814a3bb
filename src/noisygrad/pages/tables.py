"""A table of results, once: drawn on a terminal and written to a page with the same numbers and the same marks."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import rich.markup
import rich.table

from noisygrad.pages.comparison import IN_STANDARD_ERRORS, MARKS, Verdict

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

    def _marks(self) -> list[list[bool]]:
        by_column = [column.marks([row.get(column.key) for row in self.rows]) for column in self.columns]
        return [list(marks) for marks in zip(*by_column, strict=True)]

    def html(self) -> str:
        """As HTML, inside a box that scrolls sideways on a narrow screen."""
        heads = "".join(
            f'<th scope="col"{_number_class(column)}>{html.escape(column.header)}'
            + (f' <span class="unit">{html.escape(column.unit)}</span>' if column.unit else "")
            + "</th>"
            for column in self.columns
        )
        lines = [f"<tr>{self._row(row, marks)}</tr>" for row, marks in zip(self.rows, self._marks(), strict=True)]
        return (
            f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(self.caption)}">\n'
            f"<table>\n<caption>{html.escape(self.caption)}</caption>\n"
            f"<thead><tr>{heads}</tr></thead>\n<tbody>\n" + "\n".join(lines) + "\n</tbody>\n</table>\n</div>"
        )

    def _row(self, row: Mapping[str, Cell], marks: Sequence[bool]) -> str:
        cells = []
        for index, (column, best) in enumerate(zip(self.columns, marks, strict=True)):
            text = html.escape(column.text(row.get(column.key)))
            if index == 0:
                cells.append(f'<th scope="row"{_number_class(column)}>{text}</th>')
            else:
                content = f'<strong title="best in this column">{text}</strong>' if best else text
                cells.append(f"<td{_number_class(column)}>{content}</td>")
        return "".join(cells)

    def markdown(self) -> str:
        """For the documentation; the best values are bold. The caption is left to the text around it."""
        lines = [
            [f"**{_plain(text)}**" if best else _plain(text) for text, best in zip(texts, marks, strict=True)]
            for texts, marks in zip(self._texts(), self._marks(), strict=True)
        ]
        return _markdown([column.title for column in self.columns], lines)

    def _texts(self) -> list[list[str]]:
        return [[column.text(row.get(column.key)) for column in self.columns] for row in self.rows]

    def rich(self) -> rich.table.Table:
        """For a terminal; the best values are bold and green."""
        drawn = rich.table.Table(title=self.caption, title_justify="left", title_style="bold")
        for column in self.columns:
            drawn.add_column(column.title, justify="left" if column.digits is None else "right")
        for texts, marks in zip(self._texts(), self._marks(), strict=True):
            shown = map(rich.markup.escape, texts)
            drawn.add_row(*(f"[bold green]{t}[/]" if best else t for t, best in zip(shown, marks, strict=True)))
        return drawn


def _number_class(column: Column) -> str:
    return "" if column.digits is None else ' class="number"'


_RICH_STYLES: dict[Verdict, str] = {"better": "green", "within": "default", "worse": "red"}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One place of a comparison: ours, the paper's below it, and how they stand to each other."""

    ours: str = _ABSENT
    theirs: str = ""
    verdict: Verdict | None = None
    tooltip: str = ""
    note: str = ""
    """A word of warning, such as that replicates are missing."""

    def html(self) -> str:
        """As a cell of a table."""
        classes = " ".join(("number", "entry", *((self.verdict,) if self.verdict else ())))
        tooltip = f' title="{html.escape(self.tooltip)}"' if self.tooltip else ""
        mark = ""
        if self.verdict:
            mark = f' <span class="mark" role="img" aria-label="{self.verdict}">{MARKS[self.verdict]}</span>'
        lines = [f'<span class="ours">{html.escape(self.ours)}{mark}</span>']
        lines += [f'<span class="theirs">{html.escape(self.theirs)}</span>'] if self.theirs else []
        lines += [f'<span class="note">{html.escape(self.note)}</span>'] if self.note else []
        return f'<td class="{classes}"{tooltip}>{"".join(lines)}</td>'

    def markdown(self) -> str:
        """For the documentation, with the same marks."""
        mark = f" {MARKS[self.verdict]}" if self.verdict else ""
        below = (f"*{_plain(text)}*" for text in (self.theirs, self.note) if text)
        return "<br>".join((_plain(self.ours) + mark, *below))

    def rich(self) -> str:
        """For a terminal, with the same marks."""
        ours = rich.markup.escape(self.ours)
        if self.verdict:
            ours = f"[{_RICH_STYLES[self.verdict]}]{ours} {MARKS[self.verdict]}[/]"
        below = [f"[dim]{rich.markup.escape(text)}[/]" for text in (self.theirs, self.note) if text]
        return "\n".join((ours, *below))


@dataclass(frozen=True, kw_only=True)
class ComparisonTable:
    """Data sets by methods, or methods by settings; each place has our figure over the paper's."""

    columns: Sequence[str]
    rows: Mapping[str, Sequence[Entry]]
    caption: str
    corner: str = "data"
    legend: bool = True
    """Whether to explain the marks: once is enough for tables that follow each other."""
    meanings: Mapping[Verdict, str] = field(default_factory=lambda: IN_STANDARD_ERRORS)
    """What the marks mean, for the legend."""

    def __post_init__(self) -> None:
        if not self.columns or not self.rows:
            raise ValueError(f"the table {self.caption!r} has no columns or no rows")
        for name, entries in self.rows.items():
            if len(entries) != len(self.columns):
                raise ValueError(
                    f"the row {name!r} of {self.caption!r} has {len(entries)} entries; expected {len(self.columns)}"
                )

    def html(self) -> str:
        """As HTML: a legend if anything is judged, and the table in a box that scrolls sideways."""
        heads = "".join(f'<th scope="col" class="number">{html.escape(name)}</th>' for name in self.columns)
        lines = (
            f'<tr><th scope="row">{html.escape(name)}</th>{"".join(entry.html() for entry in entries)}</tr>'
            for name, entries in self.rows.items()
        )
        return (
            (_legend(self.meanings) + "\n" if self._judged else "")
            + f'<div class="scroll" tabindex="0" role="region" aria-label="{html.escape(self.caption)}">\n'
            f'<table class="comparison">\n<caption>{html.escape(self.caption)}</caption>\n'
            f'<thead><tr><th scope="col">{html.escape(self.corner)}</th>{heads}</tr></thead>\n<tbody>\n'
            + "\n".join(lines)
            + "\n</tbody>\n</table>\n</div>"
        )

    def markdown(self) -> str:
        """For the documentation: the table, and the legend if anything is judged."""
        lines = [[_plain(name), *(entry.markdown() for entry in entries)] for name, entries in self.rows.items()]
        table = _markdown([self.corner, *self.columns], lines)
        if not self._judged:
            return table
        return table + "\n" + ", ".join(f"{MARKS[name]} {text}" for name, text in self.meanings.items()) + "\n"

    @property
    def _judged(self) -> bool:
        return self.legend and any(entry.verdict for entries in self.rows.values() for entry in entries)

    def rich(self) -> rich.table.Table:
        """For a terminal."""
        drawn = rich.table.Table(title=self.caption, title_justify="left", title_style="bold", show_lines=True)
        drawn.add_column(self.corner)
        for name in self.columns:
            drawn.add_column(name, justify="right")
        for name, entries in self.rows.items():
            drawn.add_row(rich.markup.escape(name), *(entry.rich() for entry in entries))
        return drawn


def _legend(meanings: Mapping[Verdict, str]) -> str:
    words = (
        f'<span class="{name}"><span class="mark" aria-hidden="true">{MARKS[name]}</span> {html.escape(text)}</span>'
        for name, text in meanings.items()
    )
    return f'<p class="legend">{" ".join(words)}</p>'


def _markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The heads as they are given, the rows made plain before."""
    lines = [[_plain(head) for head in heads], ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _plain(text: str) -> str:
    """Nothing in it is read as HTML or as the end of a cell."""
    return html.escape(text, quote=False).replace("|", "&#124;")
