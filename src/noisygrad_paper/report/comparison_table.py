"""Our figures over the paper's, with marks for how the two stand: for a page, a terminal and the documentation."""

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import rich.markup
import rich.table

from noisygrad_paper.report.comparison import IN_STANDARD_ERRORS, MARKS, Verdict
from noisygrad_paper.report.markdown import markdown_rows, plain

_RICH_STYLES: dict[Verdict, str] = {"better": "green", "within": "default", "worse": "red"}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One place of a comparison: ours, the paper's below it, and how they stand to each other."""

    ours: str = "–"
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
        below = (f"*{plain(text)}*" for text in (self.theirs, self.note) if text)
        return "<br>".join((plain(self.ours) + mark, *below))

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
        lines = [[plain(name), *(entry.markdown() for entry in entries)] for name, entries in self.rows.items()]
        table = markdown_rows([self.corner, *self.columns], lines)
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
