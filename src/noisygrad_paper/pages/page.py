"""One HTML page that stands alone: everything it shows is inside it.

Page("Title").section("Data").text("...").table(table).figure(figure, caption="...", alt="...").write("page.html")
"""

import html
from pathlib import Path
from string import Template
from typing import ClassVar, Protocol, Self

from matplotlib.figure import Figure

from noisygrad.archive import write_atomically
from noisygrad_paper.pages.images import picture
from noisygrad_paper.pages.stylesheet import CSS

_DOCUMENT = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="noisygrad">
<title>$title</title>
<style>$css</style>
</head>
<body>
<main>
<header>
<h1>$title</h1>
$lead</header>
$sections$footer</main>
</body>
</html>
""")


class Drawn(Protocol):
    """What can write itself as HTML, with all its text escaped."""

    def html(self) -> str:
        """The element."""


class Page:
    """A page under construction; every method adds at the end and returns the page.

    All text is escaped: nothing that is given is read as HTML.

    Args:
        title: The heading, and the name of the window.
        lead: A sentence or two under the heading.
        footer: A last line.
    """

    css: ClassVar[str] = CSS

    def __init__(self, title: str, *, lead: str = "", footer: str = "") -> None:
        self.title, self.lead, self.footer = title, lead, footer
        self._sections: list[list[str]] = []

    def section(self, heading: str) -> Self:
        """Start a section; what follows goes into it."""
        self._sections.append([f"<h2>{html.escape(heading)}</h2>"])
        return self

    def text(self, *paragraphs: str) -> Self:
        """Add paragraphs."""
        return self._add(*(f"<p>{html.escape(paragraph)}</p>" for paragraph in paragraphs))

    def table(self, table: Drawn | None) -> Self:
        """Add a table of results, if there is one."""
        return self if table is None else self._add(table.html())

    def figure(self, figure: Figure, *, caption: str, alt: str) -> Self:
        """Add a figure; `alt` says in words what it shows."""
        return self._add(
            f'<figure>\n<div class="scroll" tabindex="0">{picture(figure, alt)}</div>\n'
            f"<figcaption>{html.escape(caption)}</figcaption>\n</figure>"
        )

    def html(self) -> str:
        """The whole page."""
        return _DOCUMENT.substitute(
            title=html.escape(self.title),
            css=self.css,
            lead=f'<p class="lead">{html.escape(self.lead)}</p>\n' if self.lead else "",
            sections="".join(f"<section>\n{chr(10).join(parts)}\n</section>\n" for parts in self._sections),
            footer=f"<footer>{html.escape(self.footer)}</footer>\n" if self.footer else "",
        )

    def write(self, path: str | Path) -> Path:
        """Write atomically: whoever looks sees the old file or the whole new one, also after an interruption."""
        write_atomically(path, self.html().encode())
        return Path(path)

    def _add(self, *parts: str) -> Self:
        if not self._sections:
            raise ValueError("the page has no section yet: call section(heading) first")
        self._sections[-1] += parts
        return self
