"""The page of the report: what the library's page has, and lists, large numbers and folded settings."""

import html
from collections.abc import Iterable, Mapping
from typing import ClassVar, Self

from noisygrad_paper.pages.page import Page
from noisygrad_paper.pages.stylesheet import CSS

_CSS = """
:root {
  --better: #d3ecf7; --better-ink: #004f7c; --within: #eef1f4; --within-ink: #4a5561;
  --worse: #fde3cf; --worse-ink: #8f3d00;
}
@media (prefers-color-scheme: dark) {
  :root {
    --better: #123a52; --better-ink: #8fd3f7; --within: #232b35; --within-ink: #b9c3ce;
    --worse: #4d2a12; --worse-ink: #ffb98a;
  }
}
.pairs { margin-bottom: 1.5rem; }
.pairs th { white-space: normal; width: 40%; }
.pairs td { white-space: normal; overflow-wrap: anywhere; }
.comparison { width: auto; min-width: 100%; }
.comparison td, .comparison th { vertical-align: top; }
.comparison tbody th { white-space: normal; min-width: 6.5rem; max-width: 10rem; line-height: 1.35; }
.entry { border-left: 3px solid var(--card); line-height: 1.35; }
.entry span.ours, .entry span.theirs, .entry span.note { display: block; }
.theirs, .note { color: var(--muted); font-size: .85rem; }
.note { font-style: italic; }
.mark { display: inline-block; width: 1.1em; text-align: center; font-size: .8em; }
.better { background: var(--better); } .better .ours, .legend .better { color: var(--better-ink); }
.within { background: var(--within); } .within .ours, .legend .within { color: var(--within-ink); }
.worse { background: var(--worse); } .worse .ours, .legend .worse { color: var(--worse-ink); }
.better .theirs, .within .theirs, .worse .theirs, .entry .note { color: inherit; opacity: .8; }
.legend { display: flex; flex-wrap: wrap; gap: .4rem .6rem; font-size: .85rem; max-width: none; }
.legend > span { border-radius: 5px; padding: .1rem .5rem; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .75rem; }
.tiles { margin: 0 0 1.25rem; }
.tiles > div {
  display: flex; flex-direction: column-reverse; justify-content: flex-end;
  border: 1px solid var(--line); border-radius: 10px; padding: .7rem .9rem;
}
.tiles dd { margin: 0; font-size: 1.5rem; line-height: 1.25; font-weight: 600; font-variant-numeric: tabular-nums; }
.tiles dt { color: var(--muted); font-size: .85rem; line-height: 1.35; }
ul { margin: 0 0 1rem; padding-left: 1.2rem; max-width: 52rem; } li { margin-bottom: .35rem; overflow-wrap: anywhere; }
details { margin: 0 0 .75rem; } summary { cursor: pointer; color: var(--accent); padding: .2rem 0; }
"""


class ReportPage(Page):
    """A page with what comparisons and settings need; arguments as of `Page`."""

    css: ClassVar[str] = CSS + _CSS

    def absent(self, what: str, command: str) -> Self:
        """Say what is not among the results, a file or several things, and how to make it."""
        there, it = ("is no", "it") if "." in what else ("are no", "them")
        return self.text(f"There {there} {what} among the results. Make {it} with: noisygrad reproduce {command}")

    def items(self, items: Iterable[str]) -> Self:
        """Add a list of sentences."""
        lines = "\n".join(f"<li>{html.escape(item)}</li>" for item in items)
        return self._add(f"<ul>\n{lines}\n</ul>")

    def tiles(self, tiles: Mapping[str, str]) -> Self:
        """Add the few numbers that matter most: each large, with what it counts below it."""
        boxes = "\n".join(
            f"<div><dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd></div>" for name, value in tiles.items()
        )
        return self._add(f'<dl class="tiles">\n{boxes}\n</dl>')

    def pairs(self, pairs: Mapping[str, object], *, caption: str) -> Self:
        """Add a list of names and values, such as settings or versions."""
        return self._add(
            f'<table class="pairs">\n<caption>{html.escape(caption)}</caption>\n{_pair_rows(pairs)}\n</table>'
        )

    def folded_pairs(self, pairs: Mapping[str, object], *, caption: str) -> Self:
        """Add a list of names and values that opens at a click."""
        summary = f"<summary>{html.escape(caption)}</summary>"
        return self._add(f'<details>\n{summary}\n<table class="pairs">\n{_pair_rows(pairs)}\n</table>\n</details>')


def _pair_rows(pairs: Mapping[str, object]) -> str:
    rows = "\n".join(
        f'<tr><th scope="row">{html.escape(name)}</th><td>{html.escape(str(value))}</td></tr>'
        for name, value in pairs.items()
    )
    return f"<tbody>\n{rows}\n</tbody>"
