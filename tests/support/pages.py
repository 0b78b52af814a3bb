"""What tests of HTML pages share: a page is well formed, and asks for nothing outside itself."""

from __future__ import annotations

import html.parser
import re

REFERENCES = {"src", "srcset", "href", "poster", "data", "action", "background"}
VOID = {"meta", "img", "source", "br", "link", "input"}


class Checker(html.parser.HTMLParser):
    """Every tag is closed in order; what the page shows and refers to is kept."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def check_stands_alone(text: str) -> Checker:
    """The page asks for nothing outside itself, and its images are described."""
    page = Checker(text)
    references = [value for _, attributes in page.tags for name, value in attributes.items() if name in REFERENCES]
    assert all(value.startswith("data:image/") for value in references)
    assert not re.search(r"https?:|url\(|@import|//", re.sub(r"data:[^\"]*", "", text))
    assert not page.all("script")
    for image in page.all("img"):
        assert len(image["alt"]) > 20
    return page


def cell_of(html: str, row: str, column: int) -> str:
    """The HTML of one place of the first table that has the row."""
    line = next(line for line in html.splitlines() if f'<th scope="row">{row}</th>' in line)
    return re.findall(r"<td.*?</td>", line)[column]
