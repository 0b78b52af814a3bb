"""Tables as Markdown, for the documentation."""

import html
from collections.abc import Sequence

from noisygrad_paper.pages.tables import Table


def markdown(table: Table) -> str:
    """The table with its best values in bold; the caption is left to the text around it."""
    lines = [[f"**{plain(text)}**" if best else plain(text) for text, best in cells] for cells in table.cells()]
    return markdown_rows([column.title for column in table.columns], lines)


def markdown_rows(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table from its heads, as they are given, and rows that were made `plain` before."""
    lines = [[plain(head) for head in heads], ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def plain(text: str) -> str:
    """The text, with nothing in it that is read as HTML or as the end of a cell."""
    return html.escape(text, quote=False).replace("|", "&#124;")
